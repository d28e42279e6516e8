"""Prefixes that lie on the host, offered to another worker from there."""

from __future__ import annotations

import numpy as np
import pytest

from engine.prefixes import Staged
from engine.tiers.pool import host_name
from kvtransfer.checksum import wsum64
from kvtransfer.types import LegKey, Prefix
from tests.unit.engine_core.lab import Lab, prompt, request, undisturbed, view
from tests.unit.engine_core.test_prefixes import offered, staged, wanted
from tests.unit.tiers.lab import TierLab


@pytest.fixture(params=[False, True], ids=["dense", "hybrid"])
def state(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def ask(lab: TierLab, name: str, tokens: tuple[int, ...], count: int) -> list[int]:
    """Run one request to its end, copies included."""
    key = lab.submit(request(name, tokens, max_tokens=count))
    for _ in range(200):
        lab.run()
        if lab.ends(key):
            break
        lab.settle()
    lab.settle()
    return lab.tokens(key)


def turn_on_host(source: TierLab) -> tuple[int, ...]:
    """A turn of a conversation whose pages and state have gone down; returns the next turn's prompt."""
    tokens = prompt(100)
    said = ask(source, "turn 1", tokens, 8)
    ask(source, "other", prompt(176, seed=1), 4)  # takes the whole pool
    return (*tokens, *said, 5, 6, 7, 8, 9)


def copy(source: TierLab, target: Lab, prefix: Prefix, room: Staged) -> None:
    """What a pull does, from both of the source's pools; checksums of host pages are as they were kept."""
    landed, below = room.destination, prefix.below
    border = below.first if below is not None else len(prefix.pages)
    host = {region.component: region for region in source.engine.host_regions()}
    components = {c.name: c for c in source.engine.model.components}
    for number, region in enumerate(source.engine.regions()):
        mine, theirs = target.memory()[number], source.memory()[number]
        low = host.get(host_name(region.component))
        if not components[region.component].paged:
            on_host = below is not None and bool(below.slot_sums)
            mine[list(landed.slots)] = (view(low) if on_host and low else theirs)[list(prefix.slots)]
            continue
        for index, (to, source_page) in enumerate(zip(landed.pages, prefix.pages, strict=True)):
            if index < border:
                mine[to] = theirs[source_page]
            else:
                assert low is not None
                assert below is not None
                mine[to] = view(low)[source_page]
                sums = wsum64(low, components[region.component], (source_page,), (16,))
                assert tuple(sums) == below.sums[index - border][: len(sums)]
    landed.hold.release()
    prefix.hold.release()


def test_a_turn_that_went_down_to_the_host_is_offered_from_there_whole(state: bool) -> None:
    source, target = TierLab(pages=12, state=state), Lab(state=state)
    turn = turn_on_host(source)
    want = wanted(turn, state=state)
    assert source.engine.prefixes.held(want) == (107 if state else 96)
    prefix = offered(source, want)
    assert prefix is not None
    assert prefix.tier == "host"
    assert prefix.token_count == (107 if state else 96)
    room = staged(target, want, prefix.token_count)
    assert room is not None
    copy(source, target, prefix, room)
    target.engine.prefixes.publish(room)
    key = target.submit(request("turn 2", turn, max_tokens=4))
    target.run()
    expected = undisturbed(turn, request("r", turn, max_tokens=4).sampling, state=state)[0]
    assert target.tokens(key) == list(expected)
    source.baseline()
    target.engine.check_baseline()


def test_host_pages_that_are_offered_are_not_overwritten(state: bool) -> None:
    source = TierLab(pages=12, state=state, host_pages=24)
    prefix = offered(source, wanted(turn_on_host(source), state=state))
    assert prefix is not None
    assert prefix.below is not None
    low = source.engine.host_regions()[0]
    before = view(low)[list(prefix.pages[prefix.below.first :])].copy()
    for seed in range(2, 8):
        ask(source, f"later {seed}", prompt(176, seed), 4)
    assert np.array_equal(before, view(low)[list(prefix.pages[prefix.below.first :])])
    prefix.hold.release()
    source.baseline()


def test_room_for_a_prefix_is_made_by_sending_others_down_first(state: bool) -> None:
    target = TierLab(pages=16, state=state, host_pages=64)
    first = prompt(200)
    target.submit(request("first", first, max_tokens=2))
    target.run()
    future = target.engine.prefixes.stage(
        wanted(prompt(150, 3), state=state), 144, LegKey("r", "prefill", 1), target.clock.monotonic() + 1
    )
    target.settle()
    room = future.result(timeout=0)
    assert room is not None
    assert target.engine.prefixes.held(wanted(first, state=state)) >= 192, "all of it is on the host or still here"
    target.engine.prefixes.drop(room)
    room.destination.hold.release()
    target.baseline()
