"""A worker's next process, at another port, is heard of before its record has gone: its cache is followed anew."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.router.scripted import until
from tests.integration.router.sites import config, serving, site
from tests.integration.router.test_policies import STORED, CachingWorker, idle


async def test_the_cache_of_a_workers_next_process_is_followed_and_the_last_ones_forgotten() -> None:
    first, second = CachingWorker("both", "b0"), CachingWorker("both", "b0")
    second.epoch = first.epoch + 1
    second.described.epoch = second.epoch
    first.snapshot, second.snapshot = [bytes(32)], [bytes([1]) * 32]
    async with site(first, settings=config(policy="predicted")) as made:
        index = made.router.planner.index
        await until(lambda: index.position("b0") == (first.epoch, 1) and len(index) == 1)
        async with serving(second, made.router):
            await until(lambda: second.asked != [])
            await until(lambda: index.position("b0")[0] == second.epoch)
            second.says(STORED, [bytes([2]) * 32], sequence=2)
            await until(lambda: index.position("b0") == (second.epoch, 2))
            assert len(index) == 2, "nothing of the process before"
            await until(lambda: sum(state.usable for state in made.router.fleet.states()) == 1)
            status, _ = await made.complete(prompt="still there?", max_tokens=2)
            assert status == 200
            assert idle(made)


async def test_a_fault_over_one_message_does_not_end_a_workers_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.planner.RETRY_S", 0.01)
    worker = CachingWorker("both", "b0")
    async with site(worker, settings=config(policy="predicted")) as made:
        index, faults = made.router.planner.index, [ZeroDivisionError()]
        await until(lambda: index.position("b0") == (worker.epoch, 1))
        apply = index.apply

        def once(*args: Any) -> bool:
            if faults:
                raise faults.pop()
            return apply(*args)

        monkeypatch.setattr(index, "apply", once)
        worker.says(STORED, [bytes([1]) * 32], sequence=2)
        await until(lambda: not faults and len(worker.asked) == 2)
        worker.says(STORED, [bytes([2]) * 32], sequence=2)
        await until(lambda: index.position("b0") == (worker.epoch, 2))
