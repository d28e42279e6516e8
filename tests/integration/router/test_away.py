"""All workers of a role are away for a moment: what comes meanwhile waits for them, if not for ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.app import Router
from router.policy.pairing import Role
from tests.integration.router.scripted import ScriptedWorker, until
from tests.integration.router.sites import BODY, Site, config, serving, site

ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])
POLICIES = pytest.mark.parametrize("policy", ["least_load", "predicted"])


def usable(router: Router) -> set[str]:
    return {state.worker_id for state in router.fleet.states() if state.usable}


async def asked(made: Site) -> asyncio.Task[tuple[int, object]]:
    """A request, on its way; with nobody there it is in the line then."""
    call = asyncio.create_task(made.complete())
    await until(lambda: len(made.router.dispatcher.booking.line) == 1 or call.done())
    return call


@ROLES
@POLICIES
async def test_a_request_waits_for_another_process_in_place_of_one_that_died(role: str, policy: str) -> None:
    workers = [ScriptedWorker(name, f"{name}-0") for name in ("prefill", "decode")]
    async with site(*workers, settings=config(policy=policy)) as made:
        await made.worker(role).die()
        await until(lambda: f"{role}-0" not in usable(made.router))
        call = await asked(made)
        next_life = ScriptedWorker(role, f"{role}-0")
        next_life.epoch = next_life.described.epoch = made.worker(role).epoch + 1
        async with serving(next_life, made.router):
            assert (await call)[0] == 200
            if (role, policy) != ("prefill", "predicted"):  # then those that decode do both meanwhile
                assert len(next_life.submitted) == 1


@ROLES
@POLICIES
async def test_a_request_waits_for_a_worker_whose_streams_were_given_up(
    role: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process lives, but could not be reached for longer than reattach_s, so that it is met anew."""
    monkeypatch.setattr("router.workers.fleet.RETRY_FIRST_S", 0.5)
    workers = [ScriptedWorker(name, f"{name}-0") for name in ("prefill", "decode")]
    async with site(*workers, settings=config(policy=policy)) as made:
        worker = made.router.fleet.worker(f"{role}-0")
        assert worker is not None
        worker.lost.set()
        await until(lambda: worker.facts is None)
        assert not worker.usable
        call = await asked(made)
        assert (await call)[0] == 200


@ROLES
async def test_a_request_waits_for_a_worker_whose_record_has_expired_while_its_streams_are_there(role: str) -> None:
    """A machine that is too busy renews it too late."""
    workers = [ScriptedWorker(name, f"{name}-0") for name in ("prefill", "decode")]
    async with site(*workers) as made:
        fleet, late = made.router.fleet, f"{role}-0"
        worker = fleet.worker(late)
        assert worker is not None
        worker.idle.clear()  # something of ours still runs there
        fleet.removed(worker.record)
        assert late not in usable(made.router)
        call = await asked(made)
        fleet.added(worker.record)
        assert (await call)[0] == 200
        worker.idle.set()


@ROLES
@POLICIES
async def test_nobody_waits_for_long_for_workers_that_do_not_come_back(
    role: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.workers.worker.AWAY_S", 1.0)
    workers = [ScriptedWorker(name, f"{name}-0") for name in ("prefill", "decode")]
    async with site(*workers, settings=config(policy=policy)) as made:
        await made.worker(role).die()
        await until(lambda: f"{role}-0" not in usable(made.router))
        if (role, policy) == ("prefill", "predicted"):
            assert (await made.complete())[0] == 200
            return
        status, _, headers = await made.post("/v1/completions", BODY)
        assert (status, headers["x-pd-reason"]) == (503, f"no_{role}_worker")
        began = time.monotonic()
        status, _, headers = await made.post("/v1/completions", BODY)
        assert (status, headers["x-pd-reason"]) == (503, f"no_{role}_worker")
        assert time.monotonic() - began < 0.9, "by then it is known to be away"


async def test_workers_that_do_not_fit_or_drain_or_have_never_been_there_are_not_waited_for() -> None:
    workers = [ScriptedWorker("prefill"), ScriptedWorker("decode", "d0")]
    async with site(*workers) as made:
        worker = made.router.fleet.worker("d0")
        assert worker is not None
        assert not made.router.fleet.returning(Role.DECODE), "it is there"
        workers[1].advertise(draining=True)
        await until(lambda: worker.record.draining)
        assert not made.router.fleet.returning(Role.DECODE)
        status, _, headers = await made.post("/v1/completions", BODY)
        assert (status, headers["x-pd-reason"]) == (503, "no_decode_worker")
    stranger = ScriptedWorker("decode", "d1")
    stranger.described.tokenizer_digest = "other"
    async with site(ScriptedWorker("prefill")) as made, serving(stranger, made.router):
        await until(lambda: made.router.fleet.worker("d1") is not None and made.router.fleet.worker("d1").refused)  # type: ignore[union-attr]
        status, _, headers = await made.post("/v1/completions", BODY)
        assert (status, headers["x-pd-reason"]) == (503, "no_decode_worker")
