"""The simulator itself: nothing is lost or invented, every term of a profile matters, equal seeds give equal runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.replay import SHIPPED as SHIPPED_TRACE
from bench.sim.experiment import POLICIES, RESERVING, Experiment, Setting
from bench.sim.metrics import summary
from bench.sim.profile import Profile, find
from bench.sim.trace import Entry, KeyBook
from bench.sim.world import Fleet, Outcome, World
from router.policy.speeds import Speeds

SHIPPED = {name: yaml.safe_load(find(name).read_text()) for name in ("sim-h100-8b", "sim-hybrid-48b")}


def profile(name: str = "sim-h100-8b", **changes: Any) -> Profile:
    content = copy.deepcopy(SHIPPED[name])
    for section, values in changes.items():
        content[section].update(values)
    return Profile.parse(name, content)


QUIET: dict[str, Any] = {
    "noise": {"lognormal_sigma": 0, "stall_probability": 0, "stall_factor": 1, "clock_drift_ppm": 0},
    "heterogeneity": {"speed_sigma": 0},
}


def chats(count: int = 60, gap: float = 0.05, turns: int = 3) -> list[Entry]:
    """Conversations whose every turn begins with the one before."""
    entries = []
    for number in range(count):
        talk, turn = number % (count // turns), number // (count // turns)
        blocks = tuple(range(100 * talk, 100 * talk + 6 + 6 * turn))
        entries.append(Entry(number * gap, 512 * len(blocks) - 100, 1 + 17 * (number % 5), blocks))
    return entries


def run(
    policy: str, entries: Sequence[Entry], terms: Profile, fleet: Fleet | None = None, unit: int = 64
) -> tuple[list[Outcome], World]:
    speeds, book = Speeds(), KeyBook(unit)
    shape = fleet or Fleet(2, 2, seed=1, unit_tokens=unit)
    world = World(terms, shape, POLICIES[policy](speeds, 1), speeds, reserving=policy in RESERVING)
    return world.run(entries, [book.of(entry) for entry in entries], 1.0), world


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_everything_is_given_back(policy: str, name: str) -> None:
    outcomes, world = run(policy, chats(), profile(name))
    world.check()
    assert not any(outcome.failed for outcome in outcomes)
    assert all(outcome.ttft_s > 0 and outcome.tpot_s >= 0 for outcome in outcomes)
    assert all(0 <= outcome.cached < outcome.entry.prompt_tokens for outcome in outcomes)


def test_pools_that_are_always_full_still_serve_everybody() -> None:
    tight = profile(pool={"kv_tokens": 24_000, "host_kv_tokens": 20_000, "max_batch": 3})
    for policy in ("round_robin", "predicted"):
        outcomes, world = run(policy, chats(gap=0.01), tight)
        world.check()
        assert not any(outcome.failed for outcome in outcomes)


def test_few_state_slots_still_serve_everybody() -> None:
    tight = profile("sim-hybrid-48b", pool={"state_slots": 3, "host_state_slots": 2})
    outcomes, world = run("predicted", chats(gap=0.01), tight)
    world.check()
    assert not any(outcome.failed for outcome in outcomes)


def test_a_request_larger_than_a_pool_is_refused_and_the_rest_goes_on() -> None:
    tight = profile(pool={"kv_tokens": 4000})
    entries = [Entry(0.0, 5000, 10, tuple(range(10))), Entry(0.1, 500, 10, (0,))]
    outcomes, world = run("predicted", entries, tight)
    assert [outcome.failed for outcome in outcomes] == ["context_length_exceeded", ""]
    world.check()


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    figures = [
        summary(*run("predicted", chats(), profile(), Fleet(2, 2, seed=seed, unit_tokens=64))) for seed in (1, 1, 2)
    ]
    assert figures[0] == figures[1]
    assert figures[0]["ttft_mean"] != figures[2]["ttft_mean"]


# --- timing by hand -----------------------------------------------------------------------------------------------


def test_a_lone_requests_times_are_the_profiles_arithmetic() -> None:
    entry = Entry(0.0, 6000, 11, tuple(range(12)))
    outcomes, _ = run("round_robin", [entry], profile(**QUIET), Fleet(1, 1, unit_tokens=16), unit=16)
    prefill = 0.004 + 2 * 0.0015 + 6000 * 3.6e-5 + 1.1e-9 * (4096 * 2048 + 1904 * (4096 + 952))
    assert outcomes[0].ttft_s == pytest.approx(prefill)
    steps = sum(0.0058 + 2.2e-5 + 1.5e-8 * (6001 + step) for step in range(10))
    first_chunk = 0.004 + 0.0015 + 4096 * 3.6e-5 + 1.1e-9 * 4096 * 2048
    flew = min((prefill - first_chunk) * 3.8e10, 6000 * 131072 - 4096 * 131072)
    flight = 0.0004 + (6000 * 131072 - flew) / 3.8e10
    assert outcomes[0].tpot_s == pytest.approx((steps + flight) / 10)


def test_prefill_beside_decoding_stretches_the_steps_it_rides_on() -> None:
    """Both on one worker: the second prompt's 1000 tokens make one step of the first one's answer long."""
    entries = [Entry(0.0, 160, 101, (1,)), Entry(0.2, 1000, 2, (2, 3))]
    quiet = profile(**QUIET)
    alone, _ = run("round_robin", entries[:1], quiet, Fleet(0, 0, both=1, unit_tokens=16), unit=16)
    mixed, _ = run("round_robin", entries, quiet, Fleet(0, 0, both=1, unit_tokens=16), unit=16)
    chunk = 0.004 + quiet.prefill_s(0, 1000)
    step = 0.0058 + 2.2e-5 + 1.5e-8 * 190
    longer = 100 * (mixed[0].tpot_s - alone[0].tpot_s)
    assert longer == pytest.approx(chunk + 0.00012 * 1000 * step, rel=0.02)


def test_a_repeated_prompt_is_resumed_where_a_dense_and_a_hybrid_model_can() -> None:
    blocks = tuple(range(20))
    entries = [Entry(0.0, 10_000, 5, blocks), Entry(5.0, 10_000, 5, blocks)]
    dense, _ = run("round_robin", entries, profile(), Fleet(1, 1, unit_tokens=16), unit=16)
    hybrid, _ = run("round_robin", entries, profile("sim-hybrid-48b"), Fleet(1, 1, unit_tokens=16), unit=16)
    assert [outcome.cached for outcome in dense] == [0, 9999]
    assert [outcome.cached for outcome in hybrid] == [0, 8192], "the last state at a multiple of 4096"


def test_what_left_the_device_is_promoted_from_host_memory_faster_than_it_is_computed() -> None:
    small = profile(pool={"kv_tokens": 12_000}, **QUIET)
    first, other = tuple(range(20)), tuple(range(50, 70))
    entries = [Entry(at, 10_000, 2, blocks) for at, blocks in ((0.0, first), (5.0, other), (10.0, first))]
    outcomes, _ = run("round_robin", entries, small, Fleet(1, 1, unit_tokens=16), unit=16)
    assert outcomes[2].cached == 9999
    assert 10_000 * 131072 / 2.4e10 * 0.7 < outcomes[2].ttft_s < outcomes[0].ttft_s / 3


CHANGES: list[tuple[str, str, str, float]] = [
    ("sim-h100-8b", "prefill", key, factor)
    for key, factor in (("fixed_s", 40), ("per_token_s", 2), ("per_token_context_s", 9), ("per_chunk_s", 40))
]
CHANGES += [
    ("sim-h100-8b", "prefill", "chunk_tokens", 0.25),
    ("sim-h100-8b", "decode", "fixed_s", 2),
    ("sim-h100-8b", "decode", "per_request_s", 50),
    ("sim-h100-8b", "decode", "per_context_token_s", 9),
    ("sim-h100-8b", "mixed", "decode_slowdown_per_prefill_token", 30),
    ("sim-h100-8b", "transfer", "setup_s", 100),
    ("sim-h100-8b", "transfer", "bandwidth_Bps", 0.02),
    ("sim-h100-8b", "transfer", "shared_nic_workers", 0.5),
    ("sim-h100-8b", "tiers", "host_Bps", 0.1),
    ("sim-h100-8b", "tiers", "disk_Bps", 0.1),
    ("sim-h100-8b", "tiers", "setup_s", 50),
    ("sim-h100-8b", "noise", "lognormal_sigma", 2),
    ("sim-h100-8b", "noise", "stall_probability", 20),
    ("sim-h100-8b", "noise", "stall_factor", 2),
    ("sim-h100-8b", "noise", "clock_drift_ppm", 1e4),
    ("sim-h100-8b", "heterogeneity", "speed_sigma", 2),
    ("sim-h100-8b", "pool", "kv_tokens", 0.8),
    ("sim-h100-8b", "pool", "host_kv_tokens", 0.4),
    ("sim-h100-8b", "pool", "disk_kv_tokens", 0.1),
    ("sim-h100-8b", "pool", "max_batch", 0.5),
    ("sim-h100-8b", "model", "kv_bytes_per_token", 9),
    ("sim-hybrid-48b", "model", "state_bytes", 90),
    ("sim-hybrid-48b", "model", "checkpoint_interval", 0.5),
    ("sim-hybrid-48b", "pool", "state_slots", 0.5),
    ("sim-hybrid-48b", "pool", "host_state_slots", 0.1),
]


@pytest.mark.parametrize(("name", "section", "key", "factor"), CHANGES)
def test_every_term_of_a_profile_is_used(name: str, section: str, key: str, factor: float) -> None:
    """A small, busy fleet in which each term decides something: changing it changes the result."""
    content = copy.deepcopy(SHIPPED[name])
    content["pool"].update(kv_tokens=24_000, host_kv_tokens=20_000, disk_kv_tokens=80_000, max_batch=4)
    content["noise"]["stall_probability"] = 0.02
    if name == "sim-hybrid-48b":
        content["pool"].update(state_slots=6, host_state_slots=20)
    if section == "transfer":
        content["transfer"]["bandwidth_Bps"] = 2e9
    policy = "round_robin" if section == "transfer" or key.startswith("disk") else "predicted"
    changed = copy.deepcopy(content)
    value = float(changed[section][key])
    changed[section][key] = type(changed[section][key])(value * factor) if value > 1 else value * factor
    assert busy(policy, yaml.safe_dump(content)) != busy(policy, yaml.safe_dump(changed))


@cache
def busy(policy: str, terms: str) -> tuple[Any, float]:
    """The result under a profile given as YAML; the unchanged one is asked for by every test."""
    fleet = Fleet(2, 2, both=2, seed=3, unit_tokens=64)
    outcomes, world = run(policy, chats(90, gap=0.03), Profile.parse("p", yaml.safe_load(terms)), fleet)
    return summary(outcomes, world), world.speeds.prefill_s("x", 1000, 0)


# --- policies against each other ----------------------------------------------------------------------------------


def hot_prefix(gap: float = 0.03) -> list[Entry]:
    """Everybody asks about the same long document at once."""
    document = tuple(range(30))
    return [Entry(gap * n, 32 * 512, 20, (*document, 1000 + n, 2000 + n)) for n in range(80)]


def test_a_hot_prefix_is_shared_and_does_not_drown_its_first_owner() -> None:
    outcomes, world = run("predicted", hot_prefix(), profile(), Fleet(4, 4, seed=2, unit_tokens=64))
    assert len({outcome.prefill for outcome in outcomes}) >= 2, "another takes a share of the crowd"
    spread, _ = run("round_robin", hot_prefix(), profile(), Fleet(4, 4, seed=2, unit_tokens=64))
    assert _mean(outcomes) < 0.75 * _mean(spread)
    world.check()


@pytest.mark.parametrize("policy", ["predicted", "predicted_pairs"])
def test_a_hot_prefix_on_a_nearly_idle_fleet_is_copied_before_its_holders_are_queued_at(policy: str) -> None:
    """A cost that only spreads load has copies everywhere from the start, by not knowing of the first one."""
    crowd, seeds = hot_prefix(gap=0.06), (1, 2, 3, 4)
    ours, peer = (
        sum(_mean(run(name, crowd, profile(), Fleet(4, 4, seed=seed, unit_tokens=64))[0]) for seed in seeds)
        for name in (policy, "dynamo")
    )
    assert ours <= peer


def test_a_herd_of_equal_requests_in_one_instant_is_spread_over_the_fleet() -> None:
    herd = [Entry(0.0, 4000, 10, tuple(range(50 * n, 50 * n + 8))) for n in range(32)]
    outcomes, _ = run("predicted", herd, profile(**QUIET), Fleet(8, 8, unit_tokens=64))
    counts = [sum(outcome.prefill == name for outcome in outcomes) for name in {o.prefill for o in outcomes}]
    assert len(counts) >= 14
    assert max(counts) <= 4


@pytest.mark.parametrize("policy", ["predicted", "predicted_pairs"])
def test_a_fleet_short_of_decode_room_does_not_slow_down_those_who_hold_it(policy: str) -> None:
    """Prompts were sent to workers that were full, and prefilled beside others who held their room for longer then:
    2.9 s and 0.65 of goodput, where a cost that ignores room takes 3.5."""
    experiment = Experiment(Setting(str(SHIPPED_TRACE), "sim-h100-8b", 12, 4, 300, 21, skip=3000))
    ours, theirs = experiment.measure(policy, 24.0), experiment.measure("dynamo", 24.0)
    assert ours["goodput"] > 0.95
    assert ours["ttft_mean"] < 0.5 * theirs["ttft_mean"]


def test_predictions_come_close_to_what_is_observed() -> None:
    entries = chats(300, gap=0.12)
    outcomes, world = run("predicted", entries, profile(), Fleet(3, 3, seed=4, unit_tokens=64))
    assert summary(outcomes, world)["prediction_error_median"] < 0.2


def _mean(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.ttft_s for outcome in outcomes) / len(outcomes)


# --- files --------------------------------------------------------------------------------------------------------


def _without(section: str, key: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content[section].pop(key)


@pytest.mark.parametrize(
    "spoil",
    [
        _without("decode", "fixed_s"),
        lambda content: content["decode"].update(extra=1),
        lambda content: content.pop("noise"),
        lambda content: content["prefill"].update(fixed_s="soon"),
        lambda content: content["prefill"].update(fixed_s=-1),
        lambda content: content["prefill"].update(fixed_s=float("nan")),
        lambda content: content["model"].update(kind="hybrid"),
        lambda content: content["model"].update(kind="sparse"),
    ],
)
def test_a_profile_that_is_not_understood_whole_is_refused(
    spoil: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    from runtime.errors import InvalidRequest

    content = copy.deepcopy(SHIPPED["sim-h100-8b"])
    spoil(content)
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(InvalidRequest) as caught:
        Profile.load(file)
    assert caught.value.field == "sim"


def test_numbers_that_yaml_takes_for_text_are_numbers() -> None:
    assert Profile.load("sim-h100-8b").transfer.bandwidth_Bps == 3.8e10
