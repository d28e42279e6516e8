"""Simulated hardware in real time; the sleeps are recorded, not slept, except for a few milliseconds of transfers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from bench.sim import live
from bench.sim.live import CONTEXT, Nics, SimRunner, SimTransport, configured
from bench.sim.profile import Profile
from engine.plan import Row, SampleSpec, SamplingParams, StepPlan
from kvtransfer.transport import Incarnation
from runtime.clock import FakeClock
from runtime.config import Config
from runtime.errors import DeadlineExceeded, TransferFailed
from tests.unit.sim.test_world import QUIET, profile


def runner(name: str = "w", terms: Profile | None = None, **fields: Any) -> SimRunner:
    made = SimRunner(terms or profile(**QUIET), name, 1000, (7,), **fields)
    made.allocate(100, 0)
    return made


def prompt(seq: int, start: int, count: int, *samples: SampleSpec) -> Row:
    return Row(seq, tuple(range(count)), start, tuple(range(1, 2 + (start + count) // 16)), samples=samples)


def spec(position: int, **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), position, 0)


def test_a_step_takes_the_profiles_arithmetic() -> None:
    terms, made = profile(**QUIET), runner()
    chunk = StepPlan(1, (prompt(1, 0, 4096),))
    assert made.seconds(chunk) == pytest.approx(0.004 + terms.prefill_s(0, 4096)), "the first chunk has the fixed part"
    last = StepPlan(2, (prompt(1, 4096, 100, spec(4196)),))
    assert made.seconds(last) == pytest.approx(terms.prefill_s(4096, 100))
    decode = StepPlan(3, (prompt(1, 4196, 1, spec(4197)), prompt(2, 99, 1, spec(100))))
    assert made.seconds(decode) == pytest.approx(terms.step_s(2, 4197 + 100))
    mixed = StepPlan(4, (prompt(1, 4197, 1, spec(4198)), prompt(3, 0, 1000)))
    beside = terms.step_s(1, 4198) * (1 + 0.00012 * 1000)
    assert made.seconds(mixed) == pytest.approx(0.004 + terms.prefill_s(0, 1000) + beside)


def test_the_time_is_slept_and_workers_differ_from_one_another() -> None:
    slept: list[float] = []
    plan = StepPlan(1, (prompt(1, 0, 500, spec(500)),))
    for name in ("a", "b", "a"):
        runner(name, profile(), sleep=slept.append).run(plan)
    assert slept[0] == slept[2] != slept[1]


def test_tokens_are_a_function_of_position_and_seed_and_never_end_an_answer() -> None:
    plan = StepPlan(1, tuple(prompt(n, n, 1, spec(n, seed=3, stop_token_ids=(5, 6))) for n in range(1, 600)))
    first = [row.tokens for row in runner("a", sleep=lambda s: None).run(plan).rows]
    again = [row.tokens for row in runner("b", sleep=lambda s: None).run(plan).rows]
    assert first == again
    drawn = {token for (token,) in first}
    assert not drawn & {5, 6, 7}
    assert len(drawn) > 300


def test_the_engine_is_configured_as_the_profile_says() -> None:
    config = configured(Config(), profile("sim-hybrid-48b"))
    assert (config.kv_pool_tokens, config.max_batch, config.chunk_tokens) == (6_000_000, 512, 8192)
    assert (config.state_slots, config.state_interval_tokens) == (900, 4096)
    assert config.max_batched_tokens == 8192 + 512
    assert runner().spec().max_model_len == CONTEXT


def test_pages_and_states_keep_their_proportions() -> None:
    terms = profile("sim-hybrid-48b")
    page, state = SimRunner(terms, "w", 1000).spec().components
    real = 16 * terms.model.kv_bytes_per_token / terms.model.state_bytes
    assert page.item_bytes / state.item_bytes == pytest.approx(real, rel=0.01)


# --- transfers ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ranges:
    """Of kvtransfer.mapping.Moves, what a transport that moves nothing looks at."""

    size: int
    local: np.ndarray[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.local = np.array([[0, self.size, 0]], dtype=np.uint64)

    def __len__(self) -> int:
        return 1


async def pair(terms: Profile) -> tuple[SimTransport, str]:
    nics = Nics(terms)
    source, target = SimTransport(Incarnation("p", 0, 1), nics), SimTransport(Incarnation("d", 0, 1), nics)
    agent = await source.start(())
    await target.start(())
    await target.connect(Incarnation("p", 0, 1), agent)
    return target, agent.name


def later(seconds: float) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Transfers take no time but on this clock. Those that fly at once end in order."""
    clock = FakeClock(monotonic=0.0)

    async def until(end: float) -> None:
        await asyncio.sleep(0)  # the others begin
        clock.advance(max(end - clock.monotonic(), 0.0))

    monkeypatch.setattr(live, "time", clock)
    monkeypatch.setattr(live, "_until", until)
    return clock


async def test_a_read_takes_setup_and_bytes_over_bandwidth(virtual: FakeClock) -> None:
    target, peer = await pair(profile(**QUIET, transfer={"bandwidth_Bps": 131072 * 1e5, "setup_s": 0.005}))
    stats = await target.read(peer, Ranges(2000), 5).result  # type: ignore[arg-type]
    assert stats.nbytes == 2000
    assert stats.seconds == pytest.approx(0.025)


async def test_reads_that_share_a_nic_share_its_bandwidth(virtual: FakeClock) -> None:
    target, peer = await pair(profile(**QUIET, transfer={"bandwidth_Bps": 131072 * 1e5, "setup_s": 0.0}))
    flights = [target.read(peer, Ranges(2000), 5) for _ in range(3)]  # type: ignore[arg-type]
    assert [(await flight.result).seconds for flight in flights] == pytest.approx([0.02, 0.04, 0.06])
    assert (await target.read(peer, Ranges(2000), 5).result).seconds == pytest.approx(0.02)  # type: ignore[arg-type]


async def test_a_read_is_never_over_before_its_time() -> None:
    end = later(0.0025)
    await live._until(end)
    assert time.monotonic() >= end


async def test_a_read_past_its_deadline_fails_and_is_quiet() -> None:
    target, peer = await pair(profile(**QUIET, transfer={"bandwidth_Bps": 131072 * 1e3}))
    flight = target.read(peer, Ranges(60_000), later(0.01))  # type: ignore[arg-type]
    with pytest.raises(DeadlineExceeded):
        await flight.result
    await flight.quiet
    assert target.quarantined() == 0


async def test_a_lost_or_unknown_peer_fails_its_reads_alone() -> None:
    target, peer = await pair(profile(**QUIET, transfer={"bandwidth_Bps": 131072 * 1e3}))
    flight = target.read(peer, Ranges(60_000), later(60))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await target.disconnect(peer)
    for lost in (flight, target.read(peer, Ranges(1), later(1))):  # type: ignore[arg-type]
        with pytest.raises(TransferFailed):
            await lost.result
        await lost.quiet
    await target.close()
