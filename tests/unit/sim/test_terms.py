"""Every term of a profile, live: the real engine, tiers and transport around the timing model, on a clock that only
moves when something is simulated. A term without a place in the tables here fails; so does one that changes nothing."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, get_type_hints

import pytest
import yaml

from bench.sim import below, live
from bench.sim.clock import DriftingClock, drift_of
from bench.sim.live import Nics, SimRunner, SimTransport, configured, refuse_overridden
from bench.sim.profile import Profile
from engine.api import Event, Failed, SourceDone, Tokens
from engine.loop import Engine, EngineSpec
from engine.tiers.stats import TierReport
from engine.tiers.work import Inline
from kvtransfer.transport import Incarnation
from runtime.clock import FakeClock
from runtime.config import Config
from runtime.errors import InvalidRequest
from tests.unit.engine_core.lab import prompt, request
from tests.unit.sim.test_live import Ranges
from tests.unit.sim.test_world import CHANGES, QUIET, SHIPPED, profile

DENSE: dict[str, dict[str, Any]] = {
    "pool": {"kv_tokens": 2048, "host_kv_tokens": 1536, "disk_kv_tokens": 6144, "max_batch": 3},
    "prefill": {"chunk_tokens": 512},
    "noise": {"stall_probability": 0.2},
}
HYBRID: dict[str, dict[str, Any]] = {
    **DENSE,
    "model": {"checkpoint_interval": 256},
    "pool": {**DENSE["pool"], "state_slots": 8, "host_state_slots": 6},
}
BASES = {"sim-h100-8b": DENSE, "sim-hybrid-48b": HYBRID}


class Worker:
    """One live worker's engine. slept: what it has taken, in order; clock: the true time; own: the worker's."""

    def __init__(self, terms: Profile, name: str = "w") -> None:
        self.clock = FakeClock()
        self.own = DriftingClock(self.clock, drift_of(terms, name))
        self.slept: list[float] = []
        self.events: list[Event] = []
        runner = SimRunner(terms, name, 1000, (7,), self.sleep)
        config = configured(Config(model="oracle"), terms)
        made = below.ways(terms, name, self.own, self.sleep)
        ways = replace(made, lane=Inline(made.clock), disk_lane=Inline(made.clock))
        self.engine = Engine(runner, EngineSpec.of(runner.spec(), config), config, self.own, ways)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)

    def run(self, *names: str, tokens: int = 1200, output: int = 4) -> None:
        """Prompts that begin together; until all have ended. Equal first letters are equal prompts."""
        ended = len(names) + self._ended()
        for name in names:
            self.engine.submit(request(name, prompt(tokens, ord(name[0])), max_tokens=output), self.events.extend)
        for _ in range(5000):
            if not self.engine.turn() and self._ended() >= ended:
                return
        raise AssertionError("it runs for ever")

    def _ended(self) -> int:
        assert not any(isinstance(event, Failed) for event in self.events)
        return sum(isinstance(e, SourceDone) or (isinstance(e, Tokens) and e.last) for e in self.events)

    def reports(self) -> list[TierReport]:
        return self.engine.tiers.reports() if self.engine.tiers is not None else []

    def check(self) -> None:
        self.engine.pages.check()
        self.engine.cache.check()
        assert self.engine.tiers is not None
        self.engine.tiers.check()


def busy(terms: Profile) -> Worker:
    """More prompts than any tier holds, and every one again; several at once."""
    worker = Worker(terms)
    for names in ("a", "b", "c", "a2", "d", "e", "b2", "a3", "f", "c2"):
        worker.run(names)
    worker.run(*"ghijkl", tokens=200, output=12)
    worker.check()
    return worker


async def reads(terms: Profile) -> list[float]:
    """What two pairs measure that read at once, each on a NIC of its own where that has two workers."""
    nics = Nics(terms)
    transports = [SimTransport(Incarnation(name, 0, 1), nics) for name in "pdqe"]
    agents = [await transport.start(()) for transport in transports]
    flights = []
    for source, target in ((0, 1), (2, 3)):
        await transports[target].connect(Incarnation("pq"[source // 2], 0, 1), agents[source])
        flights.append(transports[target].read(agents[source].name, Ranges(5000), 1e9))  # type: ignore[arg-type]
    return [(await flight.result).seconds for flight in flights]


@cache
def observed(terms: str) -> tuple[Any, ...]:
    """All that a router can see of a busy worker, and of two pairs that read, under a profile given as YAML."""
    made = Profile.parse("p", yaml.safe_load(terms))
    worker, clock = busy(made), FakeClock(monotonic=0.0)

    async def until(end: float) -> None:
        await asyncio.sleep(0)  # the others begin
        clock.advance(max(end - clock.monotonic(), 0.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "time", clock)
        patch.setattr(live, "_until", until)
        flown = asyncio.run(reads(made))
    changes = worker.engine.cache.changes_after(0)
    return worker.slept, worker.own.monotonic(), worker.reports(), changes, worker.engine.model.device, flown


def terms_of(*sections: str) -> list[str]:
    kinds = get_type_hints(Profile)
    return [f"{section}.{field.name}" for section in sections for field in fields(kinds[section])]


ALL = terms_of(*(section.name for section in fields(Profile) if section.name != "name"))

NO_TIME = {"model.layers": "names the model; no time or size depends on it"}
DENSE_AND_HYBRID = {"model.kind": "test_world: a_repeated_prompt_is_resumed_where_a_dense_and_a_hybrid_model_can"}

LIVE: dict[str, tuple[str, float]] = {
    "model.layers": ("sim-h100-8b", 2),
    "model.kv_bytes_per_token": ("sim-h100-8b", 3),
    "model.state_bytes": ("sim-hybrid-48b", 2),
    "model.checkpoint_interval": ("sim-hybrid-48b", 2),
    "pool.kv_tokens": ("sim-h100-8b", 0.75),
    "pool.state_slots": ("sim-hybrid-48b", 0.75),
    "pool.host_kv_tokens": ("sim-h100-8b", 0.5),
    "pool.max_batch": ("sim-h100-8b", 2),
    "pool.host_state_slots": ("sim-hybrid-48b", 0.5),
    "pool.disk_kv_tokens": ("sim-h100-8b", 0.5),
    "prefill.fixed_s": ("sim-h100-8b", 2),
    "prefill.per_token_s": ("sim-h100-8b", 2),
    "prefill.per_token_context_s": ("sim-h100-8b", 2),
    "prefill.chunk_tokens": ("sim-h100-8b", 0.5),
    "prefill.per_chunk_s": ("sim-h100-8b", 2),
    "decode.fixed_s": ("sim-h100-8b", 2),
    "decode.per_request_s": ("sim-h100-8b", 2),
    "decode.per_context_token_s": ("sim-h100-8b", 2),
    "mixed.decode_slowdown_per_prefill_token": ("sim-h100-8b", 2),
    "transfer.setup_s": ("sim-h100-8b", 2),
    "transfer.bandwidth_Bps": ("sim-h100-8b", 0.5),
    "transfer.shared_nic_workers": ("sim-h100-8b", 2),
    "tiers.host_Bps": ("sim-h100-8b", 0.5),
    "tiers.disk_Bps": ("sim-h100-8b", 0.5),
    "tiers.setup_s": ("sim-h100-8b", 2),
    "noise.lognormal_sigma": ("sim-h100-8b", 2),
    "noise.stall_probability": ("sim-h100-8b", 3),
    "noise.stall_factor": ("sim-h100-8b", 2),
    "noise.clock_drift_ppm": ("sim-h100-8b", 2),
    "heterogeneity.speed_sigma": ("sim-h100-8b", 2),
}


def content(name: str) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(SHIPPED[name])
    for section, values in BASES[name].items():
        made[section].update(values)
    return made


def test_every_term_has_a_place_in_both_tables() -> None:
    assert {*LIVE, *DENSE_AND_HYBRID} == set(ALL), "live"
    virtual = {f"{section}.{key}" for _, section, key, _ in CHANGES}
    assert {*virtual, *DENSE_AND_HYBRID, *NO_TIME} == set(ALL), "in virtual time"


@pytest.mark.parametrize("term", LIVE)
def test_every_term_of_a_profile_is_used_by_a_live_worker(term: str) -> None:
    """Changing it changes what a router can see."""
    name, factor = LIVE[term]
    section, _, key = term.partition(".")
    changed = content(name)
    changed[section][key] = type(changed[section][key])(float(changed[section][key]) * factor)
    assert observed(yaml.safe_dump(content(name))) != observed(yaml.safe_dump(changed))


def test_the_same_profile_is_seen_the_same_twice() -> None:
    text = yaml.safe_dump(content("sim-h100-8b"))
    assert observed(text) == observed.__wrapped__(text)


def test_only_a_hybrid_model_has_states() -> None:
    dense, hybrid = (SimRunner(profile(name), "w", 1000).spec() for name in SHIPPED)
    assert (dense.has_state, hybrid.has_state) == (False, True)


# --- by hand ------------------------------------------------------------------------------------------------------


def quiet(name: str, **changes: dict[str, Any]) -> Profile:
    base = BASES[name]
    sections = {*base, *changes, *QUIET}
    return profile(name, **{s: {**base.get(s, {}), **QUIET.get(s, {}), **changes.get(s, {})} for s in sections})


def tier(worker: Worker, name: str) -> TierReport:
    return next(report for report in worker.reports() if report.tier == name)


def until_first(worker: Worker, names: Sequence[str]) -> list[float]:
    for name in names[:-1]:
        worker.run(name)
    before = len(worker.slept)
    worker.run(names[-1])
    return worker.slept[before:]


def test_what_left_the_device_comes_up_from_the_host_in_setup_and_bytes_over_bandwidth() -> None:
    worker = Worker(quiet("sim-h100-8b", pool={"host_kv_tokens": 1 << 16, "disk_kv_tokens": 0}))
    slept = until_first(worker, ["a", "b", "c", "a2"])
    host = tier(worker, "host")
    assert host.hit_pages == 1199 // 16, "all but the page with the last token"
    up = 0.0003 + host.hit_pages * 16 * 131072 / 2.4e10
    assert host.seconds_up == pytest.approx(up)
    assert any(took == pytest.approx(up) for took in slept)
    assert tier(worker, "disk").hit_pages == 0


def test_what_left_the_host_comes_up_from_the_disk_first() -> None:
    worker = Worker(quiet("sim-h100-8b"))
    for name in ("a", "b", "c", "d", "e", "a2"):
        worker.run(name)
    disk, host = tier(worker, "disk"), tier(worker, "host")
    assert disk.pages_total == 6144 // 16
    assert disk.hit_pages > 0
    assert disk.seconds_up == pytest.approx(0.0003 + disk.hit_pages * 16 * 131072 / 5e9)
    assert host.hit_pages >= disk.hit_pages


def test_a_state_comes_up_with_its_real_size() -> None:
    terms = quiet("sim-hybrid-48b", pool={"host_kv_tokens": 1 << 16, "host_state_slots": 100})
    worker = Worker(terms)
    until_first(worker, ["a", "b", "c", "d", "a2"])
    host = tier(worker, "host")
    assert host.states_total == 100
    assert host.hit_states == 1
    pages = 0.0003 + host.hit_pages * 16 * 8064 / 4e10 if host.hit_pages else 0.0
    assert host.seconds_up == pytest.approx(pages + 0.0003 + 43421696 / 4e10, rel=1e-3)


def test_a_fetch_that_takes_longer_than_computing_is_not_made_again() -> None:
    """The worker learns from what it has measured, as a real one does."""
    slow = quiet("sim-h100-8b", tiers={"host_Bps": 1e8}, pool={"host_kv_tokens": 1 << 16})
    worker = Worker(slow)
    for name in ("a", "b", "c", "a2", "d", "e"):
        worker.run(name)
    hits = tier(worker, "host").hit_pages
    worker.run("b2")
    assert worker.engine.tiers is not None
    assert worker.engine.tiers.counts.declined > 0
    assert tier(worker, "host").hit_pages == hits


def test_a_router_is_told_of_every_change_of_tier() -> None:
    worker = busy(quiet("sim-h100-8b"))
    changes = worker.engine.cache.changes_after(0)
    assert changes is not None
    assert {(change.stored, change.tier) for change in changes} == {
        (True, "device"), (True, "host"), (True, "disk"), (False, "device"),
    }  # fmt: skip
    told: dict[bytes, str] = {}
    for change in changes:
        for key in change.keys:
            told[key] = change.tier
            if not change.stored:
                del told[key]
    seen = worker.engine.cache.snapshot()
    lower = {key: tier for tier, keys in seen.lower for key in keys}
    assert told == {**lower, **dict.fromkeys(seen.keys, "device")}


def test_all_that_a_worker_measures_is_by_its_own_clock() -> None:
    terms = quiet("sim-h100-8b", noise={"clock_drift_ppm": 500_000})
    right, wrong = busy(quiet("sim-h100-8b")), busy(terms)
    pace = 1 + drift_of(terms, "w")
    assert abs(pace - 1) > 0.01
    assert right.slept == wrong.slept, "the truth is the same"
    for true, told in zip(right.reports(), wrong.reports(), strict=True):
        assert told.seconds_up == pytest.approx(true.seconds_up * pace)
        assert told.seconds_down == pytest.approx(true.seconds_down * pace)
    begun = FakeClock().monotonic()
    assert wrong.own.monotonic() - begun == pytest.approx((wrong.clock.monotonic() - begun) * pace)
    assert wrong.own.wall() - FakeClock().wall() == pytest.approx((wrong.clock.monotonic() - begun) * pace)


def test_clocks_are_fast_or_slow_for_life_and_never_by_more_than_the_profile_says() -> None:
    terms = profile()
    drifts = [drift_of(terms, f"w{n}") for n in range(50)]
    assert drifts == [drift_of(terms, f"w{n}") for n in range(50)]
    assert min(drifts) < 0 < max(drifts)
    assert max(map(abs, drifts)) <= 80e-6


@pytest.mark.parametrize("key", ["max_batch", "kv_pool_tokens", "host_pool_bytes", "disk_pool_bytes"])
def test_what_the_profile_says_cannot_be_configured_as_well(key: str) -> None:
    terms = profile()
    refuse_overridden(Config.load({"host_queue_pages": 7}), terms)
    with pytest.raises(InvalidRequest) as refused:
        refuse_overridden(Config.load({key: 7 << 20}), terms)
    assert refused.value.field == key
