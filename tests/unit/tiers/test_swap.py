"""Running requests go to the host under pressure and come back as they were."""

from __future__ import annotations

import pytest

from engine.api import Mode
from engine.plan import SamplingParams
from runtime import faults
from tests.unit.engine_core.lab import move, prompt, request, undisturbed
from tests.unit.tiers.lab import Manual, TierLab

GREEDY: dict[str, object] = {}
SEEDED: dict[str, object] = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.1, "frequency_penalty": 0.2}


def swap(lab: TierLab, name: str) -> None:
    """What pressure does to a running request, without the pressure."""
    scheduler = lab.engine._scheduler
    seq = next(s for s in scheduler._running if s.request.spec.key.request_id == name)
    scheduler._preempt(seq)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("step", range(1, 41))
def test_a_request_swapped_at_any_step_says_the_same(step: int, sampling: dict[str, object], state: bool) -> None:
    lab = TierLab(pages=20, state=state, changes={"host_pool_tokens": 512})
    made = request("a", prompt(70), max_tokens=40, **sampling)  # type: ignore[arg-type]
    key = lab.submit(made)
    lab.turns(step)

    swap(lab, "a")
    lab.run()

    assert tuple(lab.tokens(key)) == undisturbed(made.tokens, made.sampling, state=state)[0]
    assert lab.tiers.counts.swapped_out == lab.tiers.counts.swapped_in == 1
    assert lab.ends(key) == 1
    lab.baseline()


@pytest.mark.parametrize("state", [False, True])
def test_nothing_is_computed_again_after_a_swap(state: bool) -> None:
    lab = TierLab(pages=20, state=state, changes={"host_pool_tokens": 512})
    key = lab.submit(request("a", prompt(70), max_tokens=40))
    lab.turns(20)
    swap(lab, "a")
    lab.run()
    assert lab.of(key)[-1].recomputed_tokens == 0  # type: ignore[union-attr]


def test_pressure_swaps_the_request_with_the_latest_deadline() -> None:
    lab = TierLab(pages=14, changes={"headroom_tokens": 1})
    urgent = lab.submit(request("urgent", prompt(60, seed=2), max_tokens=100, deadline=5e6))
    patient = lab.submit(request("patient", prompt(60), max_tokens=100, deadline=9e6))
    while not lab.tiers.counts.swapped_out:
        assert lab.engine.turn()
    assert [s.request.spec.key for s in lab.engine._scheduler._running] == [urgent]
    lab.run()

    for key, seed in ((urgent, 2), (patient, 0)):
        right = undisturbed(prompt(60, seed=seed), SamplingParams(max_tokens=100))[0]
        assert tuple(lab.tokens(key)) == right
    lab.baseline()


def test_the_later_arrival_with_the_earlier_deadline_is_not_the_victim() -> None:
    lab = TierLab(pages=14, changes={"headroom_tokens": 1})
    patient = lab.submit(request("patient", prompt(60), max_tokens=100, deadline=9e6))
    urgent = lab.submit(request("urgent", prompt(60, seed=2), max_tokens=100, deadline=5e6))
    while not lab.tiers.counts.swapped_out:
        assert lab.engine.turn()
    assert [s.request.spec.key for s in lab.engine._scheduler._running] == [urgent]
    lab.run()
    assert len(lab.tokens(patient)) == len(lab.tokens(urgent)) == 100
    lab.baseline()


def test_without_room_on_the_host_a_victim_is_computed_again() -> None:
    lab = TierLab(pages=14, host_pages=2, changes={"headroom_tokens": 1})
    keys = [lab.submit(request(f"r{i}", prompt(60, seed=i), max_tokens=100)) for i in range(2)]
    lab.run()
    assert lab.tiers.counts.swapped_out == 0
    for i, key in enumerate(keys):
        assert tuple(lab.tokens(key)) == undisturbed(prompt(60, seed=i), SamplingParams(max_tokens=100))[0]
    lab.baseline()


def test_a_swap_that_costs_more_than_computing_is_not_made() -> None:
    lab = TierLab(pages=14, changes={"headroom_tokens": 1})
    lab.tiers.costs.copied("host", "up", 1 << 20, seconds=100.0)
    lab.tiers.costs.prefill.saw(1000, seconds=0.001)
    for i in range(2):
        lab.submit(request(f"r{i}", prompt(60, seed=i), max_tokens=100))
    lab.run()
    assert lab.tiers.counts.declined > 0
    assert lab.tiers.counts.swapped_out == 0
    lab.baseline()


@pytest.mark.parametrize("fault", ["tier.store=fail", "tier.load=fail", "tier.corrupt=count*1"])
def test_a_swap_that_fails_is_computed_again(fault: str) -> None:
    lab = TierLab(pages=20)
    made = request("a", prompt(70), max_tokens=40)
    key = lab.submit(made)
    lab.turns(20)
    with faults.armed(fault):
        swap(lab, "a")
        lab.run()
    assert tuple(lab.tokens(key)) == undisturbed(made.tokens, made.sampling)[0]
    assert lab.tiers.counts.failed + lab.tiers.counts.corrupt == 1
    lab.baseline()


@pytest.mark.parametrize("when", ["saving", "saved", "loading"])
def test_a_swapped_request_can_be_cancelled_at_any_stage(when: str) -> None:
    lane = Manual()
    lab = TierLab(pages=20, lane=lane)
    key = lab.submit(request("a", prompt(70), max_tokens=40))
    lab.turns(20)
    swap(lab, "a")
    if when != "saving":
        lane.run_all()
    if when == "loading":
        lab.turns(1)
        assert lane.waiting
    if when == "saved":
        lab.tiers.poll()
    lab.engine.cancel(key)
    lab.turns(1)
    lane.run_all()
    lab.baseline()


def test_pages_of_a_swapped_request_are_nobodys_before_its_copy_is_done() -> None:
    lane = Manual()
    lab = TierLab(pages=20, lane=lane)
    lab.submit(request("a", prompt(70), max_tokens=40))
    lab.turns(20)
    seq = lab.engine._scheduler._running[0]
    pages = list(seq.pages[:5])
    swap(lab, "a")

    got = lab.engine.pages.allocate(lab.engine.pages.available)
    assert got is not None
    assert not set(got) & set(pages)
    lab.engine.pages.release(got)
    lane.run_all()
    lab.engine.turn()
    lane.run_all()
    lab.run()
    lab.baseline()


def test_a_request_from_a_peer_is_swapped_like_any_other_and_asks_for_nothing_again() -> None:
    """T084: preempted 20 tokens after its one hand-off."""
    p, d = TierLab(pages=32), TierLab(pages=32)
    tokens = prompt(70)
    source = p.submit(request("r", tokens, Mode.SOURCE, max_tokens=40))
    p.run()
    remote = d.submit(request("r", tokens, Mode.REMOTE, max_tokens=40))
    d.run()
    move(p, d, p.admitted(source), d.admitted(remote))
    d.engine.start(remote, p.done(source).first)
    d.turns(20)
    d.admitted(remote).hold.release()
    p.admitted(source).hold.release()

    swap(d, "r")
    d.run()

    right = undisturbed(tokens, SamplingParams(max_tokens=40))[0]
    assert tuple(d.tokens(remote)) == right[1:]
    assert sum(type(e).__name__ == "Admitted" for e in d.of(remote)) == 1
    d.baseline()


def test_two_requests_whose_headroom_does_not_fit_together_both_finish() -> None:
    """T021: seven pages; one needs four and one page of headroom, the other three and one."""
    p, d = TierLab(pages=32), TierLab(pages=7)
    legs = []
    for name, length in (("a", 64), ("b", 48)):
        tokens = prompt(length, seed=length)
        source = p.submit(request(name, tokens, Mode.SOURCE, max_tokens=16))
        p.run()
        legs.append((tokens, source, d.submit(request(name, tokens, Mode.REMOTE, max_tokens=16))))
    for tokens, source, remote in legs:
        d.run()
        move(p, d, p.admitted(source), d.admitted(remote))
        d.engine.start(remote, p.done(source).first)
        d.admitted(remote).hold.release()
        p.admitted(source).hold.release()
        d.run()
        assert tuple(d.tokens(remote)) == undisturbed(tokens, SamplingParams(max_tokens=16))[0][1:]
    d.baseline()
    p.baseline()
