"""A request that pressure has put aside goes on at another worker, from the bytes on the host."""

from __future__ import annotations

import pytest

from engine.api import Admitted, EngineRequest, HandedOver, Mode
from kvtransfer.types import First, LegKey
from tests.unit.engine_core.lab import ROOT, Lab, prompt, request, undisturbed, view
from tests.unit.tiers.lab import Manual, TierLab
from tests.unit.tiers.test_swap import swap

GREEDY: dict[str, object] = {}
SEEDED: dict[str, object] = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
SAMPLED_STEPS = (4, 11, 20, 40)


def steps() -> list[object]:
    return [pytest.param(s, marks=() if s in SAMPLED_STEPS else pytest.mark.slow) for s in range(4, 41)]


def left(lab: Lab, key: LegKey) -> HandedOver:
    return next(e for e in lab.of(key) if isinstance(e, HandedOver))


def go_on(source: TierLab, target: Lab, made: EngineRequest) -> LegKey:
    """Continue at the target from the source's host memory."""
    event = left(source, made.key)
    assert event.below is not None
    tokens = (made.tokens + tuple(source.tokens(made.key)))[: event.token_count]
    key = LegKey(made.key.request_id, "decode", 2)
    target.submit(EngineRequest(key, Mode.REMOTE, tokens, made.prompt_len, made.sampling, ROOT, 1e9))
    target.engine.turn()
    copy(source, target, event, target.admitted(key))
    event.hold.release()
    target.admitted(key).hold.release()
    target.engine.start(key, (First(0, event.token),))
    return key


def copy(source: TierLab, target: Lab, event: HandedOver, to: Admitted) -> None:
    held = to.ready // 16
    paged = {f"{c.name}@host": c.paged for c in target.engine.model.components}
    host = {region.component: view(region) for region in source.engine.host_regions()}
    for region, mine in zip(target.engine.regions(), target.memory(), strict=True):
        name = f"{region.component}@host"
        into = to.pages[held : len(event.pages)] if paged[name] else to.slots
        mine[list(into)] = host[name][list(event.pages[held:] if paged[name] else event.slots)]


@pytest.mark.parametrize("state", [False, True], ids=["pages", "state"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("step", steps())
def test_a_request_swapped_at_any_step_goes_on_at_another_worker(
    step: int, sampling: dict[str, object], state: bool
) -> None:
    source, target = TierLab(pages=20, state=state, changes={"host_pool_tokens": 512}), Lab(state=state)
    made = request("a", prompt(70), max_tokens=40, **sampling)  # type: ignore[arg-type]
    key = source.submit(made)
    source.turns(step)
    assert source.tokens(key), "the prompt has three chunks"

    swap(source, "a")
    source.engine.handover(key, 0)
    source.run()
    moved = go_on(source, target, made)
    target.run()

    said = source.tokens(key) + target.tokens(moved)
    assert tuple(said) == undisturbed(made.tokens, made.sampling, state=state)[0]
    assert (source.tiers.counts.swapped_out, source.tiers.counts.swapped_in) == (1, 0)
    source.baseline()
    target.engine.check_baseline()


def test_it_leaves_only_when_its_bytes_have_arrived_on_the_host() -> None:
    lane = Manual()
    lab = TierLab(pages=20, lane=lane)
    key = lab.submit(request("a", prompt(70), max_tokens=40))
    lab.turns(10)
    swap(lab, "a")
    lab.engine.handover(key, 0)
    lab.turns(3)
    assert not any(isinstance(e, HandedOver) for e in lab.of(key))
    assert lab.ends(key) == 0

    lane.open()
    lab.turns(2)

    event = left(lab, key)
    assert event.below is not None
    assert len(event.below.sums) == len(event.pages)
    event.hold.release()
    lab.baseline()


def test_bytes_on_the_host_stay_there_as_long_as_somebody_may_read_them() -> None:
    lab = TierLab(pages=20, host_pages=8)
    key = lab.submit(request("a", prompt(70), max_tokens=40))
    lab.turns(10)
    swap(lab, "a")
    lab.engine.handover(key, 0)
    lab.run()
    event = left(lab, key)
    assert lab.tiers.host.pool.referenced == len(event.pages)
    assert lab.engine.load().swapped == 0

    lab.submit(request("b", prompt(200, seed=1), max_tokens=100))  # its pages go down as far as there is room
    lab.run()
    assert all(lab.tiers.host.pool.refs(page) == 1 for page in event.pages)

    event.hold.release()
    lab.baseline()


def test_a_cancel_after_it_was_asked_to_leave_frees_the_host() -> None:
    lane = Manual()
    lab = TierLab(pages=20, lane=lane)
    key = lab.submit(request("a", prompt(70), max_tokens=40))
    lab.turns(10)
    swap(lab, "a")
    lab.engine.handover(key, 0)
    lab.engine.cancel(key)
    lab.turns(2)
    lane.open()
    lab.run()
    assert not any(isinstance(e, HandedOver) for e in lab.of(key))
    lab.baseline()


def test_what_could_not_be_kept_is_computed_elsewhere() -> None:
    """Put aside without room on the host, alone in its request: whoever asked is told to find it another place."""
    lab = TierLab(pages=14, host_pages=2, changes={"headroom_tokens": 1})
    keys = [lab.submit(request(f"r{i}", prompt(60, seed=i), max_tokens=100)) for i in range(2)]
    while not lab.tiers.counts.dropped:
        assert lab.engine.turn()
    lab.engine.handover(keys[1], 0)
    lab.run()

    assert lab.failed(keys[1]).error.reason == "draining"
    assert len(lab.tokens(keys[0])) == 100
    lab.baseline()
