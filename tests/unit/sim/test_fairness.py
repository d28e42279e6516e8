"""Fairness in virtual time: a greedy tenant, weights, long prompts among short ones. Figures are asserted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from bench.sim.experiment import HOLD_S
from bench.sim.profile import Profile
from bench.sim.trace import Entry, KeyBook
from bench.sim.world import Fleet, Outcome, World
from router.admission.admission import Limits
from router.policy.cost import CostConfig, Predicted
from router.policy.speeds import Speeds

LONG, SHORT = 32_000, 2_000
START = 10.0
_OWN = 1 << 41
"""Blocks from here on are nobody else's."""


def prompt(at: float, number: int, tokens: int, output: int, tenant: str, priority: int = 0) -> Entry:
    first = _OWN + 1024 * number
    return Entry(at, tokens, output, tuple(range(first, first - (-tokens // 512))), tenant, priority)


def known() -> list[Entry]:
    """What speeds are learned from, before anything is measured."""
    return [prompt(0.15 * n, 90_000 + n, (2000, 8000, 16_000)[n % 3], 40, "early") for n in range(40)]


def crowd(count: int = 80, output: int = 100) -> list[Entry]:
    return [prompt(START, n, LONG, output, "greedy") for n in range(count)]


def modest(count: int = 50, gap: float = 0.4) -> list[Entry]:
    times = START + np.cumsum(np.random.default_rng(5).exponential(gap, count))
    return [prompt(float(at), 50_000 + n, SHORT, 60, "modest") for n, at in enumerate(times)]


def run(
    profile: str, entries: Sequence[Entry], limits: Mapping[str, Limits] | None = None, *, deflect: bool = True
) -> list[Outcome]:
    speeds, book = Speeds(), KeyBook(256)
    policy = Predicted(speeds, CostConfig(hold_s=HOLD_S, deflect=deflect))
    terms, fleet = Profile.load(profile), Fleet(4, 4, seed=1, unit_tokens=256)
    world = World(terms, fleet, policy, speeds, reserving=True, limits=limits)
    arranged = sorted([*known(), *entries], key=lambda entry: entry.at)
    outcomes = world.run(arranged, [book.of(entry) for entry in arranged], 1.0)
    world.check()
    assert not any(outcome.failed for outcome in outcomes)
    return outcomes


def of(outcomes: Sequence[Outcome], tenant: str) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.entry.tenant == tenant]


def p99(outcomes: Sequence[Outcome], tenant: str) -> float:
    return float(np.percentile([outcome.ttft_s for outcome in of(outcomes, tenant)], 99))


@pytest.mark.parametrize("deflect", [True, False])
@pytest.mark.parametrize("profile", ["sim-h100-8b", "sim-hybrid-48b"])
def test_a_modest_tenant_under_a_greedy_one_waits_no_longer_than_twice_and_one_long_prompt(
    profile: str, deflect: bool
) -> None:
    alone = p99(run(profile, modest(), deflect=deflect), "modest")
    long_s = of(run(profile, crowd(1), deflect=deflect), "greedy")[0].ttft_s
    both = run(profile, [*modest(), *crowd()], deflect=deflect)
    last = max(outcome.arrived + outcome.waited_s for outcome in of(both, "greedy"))
    assert last > START + 5, "there was a crowd for a while"
    assert p99(both, "modest") <= 2 * alone + long_s
    assert p99(both, "modest") <= 0.7, "they pass long prompts between two chunks"


@pytest.mark.parametrize(
    ("profile", "gold"), [("sim-h100-8b", (2000, 60)), ("sim-hybrid-48b", (8000, 60))], ids=["short gold", "equal"]
)
def test_weights_of_one_and_three_are_shares_of_one_and_three(profile: str, gold: tuple[int, int]) -> None:
    entries = [prompt(START, n, 8000, 60, "iron") for n in range(100)]
    entries += [prompt(START, 5000 + n, *gold, "gold") for n in range(240 * 8000 // gold[0])]
    outcomes = run(profile, entries, {"iron": Limits(weight=1.0), "gold": Limits(weight=3.0)})
    end = min(max(o.arrived + o.waited_s for o in of(outcomes, name)) for name in ("iron", "gold"))
    assert end > START + 5
    assert 3 / 1.2 <= placed(outcomes, "gold", end) / placed(outcomes, "iron", end) <= 3 * 1.2


def placed(outcomes: Sequence[Outcome], tenant: str, until: float) -> int:
    """Prompt tokens that had left the line by then."""
    mine = [outcome.entry for outcome in of(outcomes, tenant) if outcome.arrived + outcome.waited_s <= until]
    return sum(entry.prompt_tokens for entry in mine)


def test_a_stream_of_long_prompts_does_not_starve_short_ones_nor_they_the_long_ones() -> None:
    """One tenant, a fleet that is full of long prompts for half a minute."""
    longs = [prompt(START + 0.3 * n, n, LONG, 20, "one") for n in range(100)]
    shorts = [prompt(START + 5 + 0.1 * n, 50_000 + n, SHORT, 20, "one") for n in range(200)]
    outcomes = of(run("sim-h100-8b", [*longs, *shorts], deflect=False), "one")
    quick = [outcome.ttft_s for outcome in outcomes if outcome.entry.prompt_tokens == SHORT]
    slow = [outcome.ttft_s for outcome in outcomes if outcome.entry.prompt_tokens == LONG]
    alone = of(run("sim-h100-8b", longs, deflect=False), "one")
    assert float(np.mean(quick)) < 0.5 * float(np.mean(slow))
    assert max(slow) < 1.5 * max(outcome.ttft_s for outcome in alone), "the work of the short ones, and no more"


def test_a_priority_is_sooner_in_a_crowd_and_starves_nobody() -> None:
    entries = [prompt(START, n, 16_000, 20, "low", 1) for n in range(60)]
    entries += [prompt(START, 5000 + n, 16_000, 20, "high", -1) for n in range(60)]
    outcomes = run("sim-h100-8b", entries)
    low, high = ([outcome.ttft_s for outcome in of(outcomes, name)] for name in ("low", "high"))
    assert float(np.mean(high)) < 0.8 * float(np.mean(low))
    assert min(low) < 0.6 * max(high), "ten seconds of service ahead, and then share and share alike"
