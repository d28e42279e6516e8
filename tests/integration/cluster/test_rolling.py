"""Workers are replaced one after the other while clients ask: nobody's request fails."""

from __future__ import annotations

import asyncio

import pytest

from deploy.restart import Restart, RestartFailed
from protos.v1 import common_pb2
from runtime.errors import InvalidRequest
from tests.integration.cluster.local_fleet import LocalFleet, local_fleet


def restart(made: LocalFleet, said: list[str] | None = None) -> Restart:
    def say(worker: str, what: str) -> None:
        if said is not None:
            said.append(f"{worker} {what}")

    return Restart(made.fleet, made.replace, made.router.http, 5.0, say)


async def test_the_only_worker_of_a_role_is_stood_in_for_and_no_request_fails() -> None:
    said: list[str] = []
    async with local_fleet("prefill", "decode") as made:
        async with made.under_load(6, 40, 30):
            done = await restart(made, said).rolling([], force=False)
        assert made.failed == []
        assert made.answered > 0
        assert done == ["prefill-0", "decode-0"]
        assert [one.lives for one in made.workers.values()] == [2, 2]
        assert made.roles() == {"prefill-0": "prefill", "decode-0": "decode"}
    told = [line for line in said if not line.endswith(("starting", "pools"))]  # as it happened to be when looked at
    assert told[:4] == [
        "decode-0 does both meanwhile, as prefill-0 is the only one for prefill",
        "prefill-0 drains",
        "prefill-0 restarts",
        "prefill-0 is ready",
    ]


async def test_a_role_counts_when_its_worker_has_said_so_not_when_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet("prefill", "decode") as made:
        at_once, later = made.fleet.set_role, []

        async def late(address: str, role: common_pb2.Role.ValueType) -> None:
            async def soon() -> None:
                await asyncio.sleep(0.5)
                await at_once(address, role)

            later.append(asyncio.create_task(soon()))

        monkeypatch.setattr(made.fleet, "set_role", late)
        async with made.under_load(4, 40, 20):
            assert await restart(made).rolling([], force=False) == ["prefill-0", "decode-0"]
            await asyncio.gather(*later)
        assert made.failed == []
        assert made.roles() == {"prefill-0": "prefill", "decode-0": "decode"}


async def test_the_last_worker_is_not_restarted_unless_it_must_be() -> None:
    async with local_fleet("both") as made:
        with pytest.raises(InvalidRequest, match="both-0 is the only worker") as caught:
            await restart(made).rolling([], force=False)
        assert caught.value.field == "force"
        assert made.workers["both-0"].lives == 1
        assert await restart(made).rolling([], force=True) == ["both-0"]
        assert made.workers["both-0"].lives == 2


async def test_a_failure_puts_back_what_was_changed_and_ends_it() -> None:
    async with local_fleet("prefill", "decode") as made:
        made.broken = {"decode-0"}
        with pytest.raises(RestartFailed, match="decode-0: no answer"):
            await restart(made).rolling(["decode-0"], force=False)
        records = {record.worker_id: record for record in await made.fleet.workers()}
        assert not records["decode-0"].draining
        assert records["prefill-0"].role == common_pb2.ROLE_PREFILL
        await made.ask(20, 5, 1)
        assert made.failed == []


async def test_a_worker_gets_its_role_back_and_others_are_left_alone() -> None:
    async with local_fleet("both", "both") as made:
        records = {record.worker_id: record for record in await made.fleet.workers()}
        await made.fleet.set_role(records["both-1"].address, common_pb2.ROLE_DECODE)
        assert await restart(made).rolling(["both-1"], force=False) == ["both-1"]
        assert made.roles() == {"both-0": "both", "both-1": "decode"}
        assert made.workers["both-0"].lives == 1
        with pytest.raises(InvalidRequest, match="no worker"):
            await restart(made).rolling(["other"], force=False)
