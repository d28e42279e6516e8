"""Prefixes on the host: they go down before they are dropped, and come up when somebody asks for them."""

from __future__ import annotations

import pytest

from engine.api import Mode
from kvtransfer.hashing import page_keys, root
from kvtransfer.types import First
from runtime import faults
from tests.unit.engine_core.lab import ROOT, move, prompt, request, undisturbed
from tests.unit.tiers.lab import Lazy, Manual, TierLab


def said(lab: TierLab, name: str, tokens: tuple[int, ...], **more: object) -> list[int]:
    """Run one request to its end; it must say what an undisturbed one says."""
    made = request(name, tokens, max_tokens=4, **more)  # type: ignore[arg-type]
    key = lab.submit(made)
    lab.run()
    assert tuple(lab.tokens(key)) == undisturbed(tokens, made.sampling)[0]
    return lab.tokens(key)


def cached(lab: TierLab, name: str) -> int:
    key = request(name, (1,)).key
    return next(e.cached_tokens for e in lab.of(key) if hasattr(e, "cached_tokens"))


def test_a_prefix_that_was_evicted_from_the_device_comes_back_from_the_host() -> None:
    lab = TierLab(pages=12)
    first = prompt(128)
    said(lab, "a", first)
    said(lab, "b", prompt(176, seed=1))  # takes the whole pool
    assert not lab.engine.cache.match(page_keys(ROOT, first))

    said(lab, "c", first)

    assert cached(lab, "c") == 112  # all but the page that holds the last token
    assert lab.tiers.counts.hit_pages == 7
    lab.baseline()


def test_a_page_that_was_not_copied_up_shows_because_the_device_is_poisoned() -> None:
    lab = TierLab(pages=12)
    first = prompt(128)
    said(lab, "a", first)
    said(lab, "b", prompt(176, seed=1))
    object.__setattr__(lab.tiers._mover, "carrier", Lazy())

    with pytest.raises(AssertionError):
        said(lab, "c", first)


def test_another_tenants_equal_prompt_does_not_hit() -> None:
    lab = TierLab(pages=12)
    first = prompt(128)
    said(lab, "a", first)
    said(lab, "b", prompt(176, seed=1))

    said(lab, "c", first, root=root(b"other", "oracle", "1"))

    assert cached(lab, "c") == 0
    assert lab.tiers.counts.hit_pages == 0


def test_a_device_hit_longer_than_the_hosts_loads_nothing() -> None:
    """The device has 128 tokens of a prompt of 300, the host its first 64."""
    lab = TierLab(pages=40, host_pages=64)
    long = prompt(300)
    said(lab, "a", long[:64])
    taken = lab.engine.pages.allocate(30)  # nothing goes down while half of the pool is free
    assert taken is not None
    lab.settle()
    lab.engine.pages.release(taken)
    assert len(lab.tiers.host) == 4
    found = lab.tiers.hits.pages(page_keys(ROOT, long), 8)
    assert found == []


def test_a_host_tier_of_four_pages_serves_ten_prompts_of_eight() -> None:
    lab = TierLab(pages=12, host_pages=4)
    for turn in range(2):
        for number in range(10):
            said(lab, f"{turn}-{number}", prompt(128, seed=number))
            lab.check()
    assert lab.tiers.counts.lost > 0
    lab.baseline()


def test_nothing_is_readable_on_the_host_before_its_copy_is_done() -> None:
    lane = Manual()
    lab = TierLab(pages=12, lane=lane)
    first = prompt(128)
    said(lab, "a", first)
    lab.engine.turn()
    assert lane.waiting, "a copy is under way"
    assert len(lab.tiers.host) == 0
    assert lab.tiers.hits.pages(page_keys(ROOT, first), 0) == []

    lane.run_all()
    lab.engine.turn()

    assert len(lab.tiers.host) == 1  # one page at a time: an eighth of the pool
    lab.check()


def test_a_page_is_not_evicted_while_it_is_copied_down() -> None:
    lane = Manual()
    lab = TierLab(pages=12, lane=lane)
    said(lab, "a", prompt(128))
    lab.engine.turn()
    held = [page for page in range(1, 13) if lab.engine.pages.refs(page)]
    assert len(held) == 1

    assert lab.engine.pages.allocate(12) is None
    others = lab.engine.pages.allocate(11)

    assert others is not None
    assert held[0] not in others


def test_a_request_whose_pages_come_up_does_not_hold_up_the_others() -> None:
    """T123: the head of the queue finds no room, the one behind it has finished loading."""
    lane = Manual()
    lab = TierLab(pages=16, lane=lane, changes={"headroom_tokens": 1})
    old = prompt(128)
    said(lab, "old", old)
    lab.settle()
    said(lab, "other", prompt(240, seed=1))
    lane.run_all()
    assert len(lab.tiers.host) >= 7

    loading = lab.submit(request("loading", old, max_tokens=3))
    lab.engine.turn()
    assert lab.tiers.idle is False
    big = lab.submit(request("big", prompt(200, seed=2), max_tokens=3))
    lab.turns(3)
    assert lab.tokens(loading) == []
    lane.run_all()
    for _ in range(30):
        lab.engine.turn()
        lane.run_all()

    assert lab.finish(loading)
    assert lab.finish(big)
    lab.baseline()


def test_a_cancelled_load_gives_everything_back_when_its_copy_is_over() -> None:
    lane = Manual()
    lab = TierLab(pages=12, lane=lane)
    old = prompt(128)
    said(lab, "old", old)
    lab.settle()
    said(lab, "other", prompt(176, seed=1))
    lane.run_all()

    key = lab.submit(request("c", old, max_tokens=3))
    lab.engine.turn()
    lab.engine.cancel(key)
    lab.engine.turn()
    assert lab.engine.pages.referenced > 0, "they are being written"
    lane.run_all()
    lab.turns(2)
    lane.run_all()

    lab.baseline()


def test_a_corrupted_host_page_is_a_miss_and_is_forgotten() -> None:
    lab = TierLab(pages=12)
    first = prompt(128)
    said(lab, "a", first)
    said(lab, "b", prompt(176, seed=1))

    with faults.armed("tier.corrupt=count*1"):
        said(lab, "c", first)

    assert lab.tiers.counts.corrupt == 1
    assert cached(lab, "c") == 96  # the last of seven pages was damaged
    lab.baseline()


@pytest.mark.parametrize("point", ["tier.store", "tier.load"])
def test_a_copy_that_fails_is_a_miss(point: str) -> None:
    lab = TierLab(pages=12)
    first = prompt(128)
    with faults.armed(f"{point}=fail"):
        said(lab, "a", first)
        said(lab, "b", prompt(176, seed=1))
        said(lab, "c", first)
    assert lab.tiers.counts.failed > 0
    assert lab.tiers.counts.hit_pages == 0
    lab.baseline()


def test_a_page_goes_down_at_its_second_sighting_when_that_is_asked_for() -> None:
    lab = TierLab(pages=12, changes={"host_store_after": 2})
    said(lab, "a", prompt(128))
    lab.settle()
    assert len(lab.tiers.host) == 0

    said(lab, "b", prompt(128))
    lab.settle()

    assert len(lab.tiers.host) == 8
    lab.baseline()


def test_pages_with_generated_tokens_stay_up_when_only_prompts_are_kept() -> None:
    for scope, pages in (("all", 3), ("prompt", 2)):
        lab = TierLab(pages=4, changes={"host_store": scope, "headroom_tokens": 1})
        key = lab.submit(request("a", prompt(32), max_tokens=20))
        lab.run()
        lab.settle()
        assert len(lab.tokens(key)) == 20
        assert len(lab.tiers.host) == pages


def test_one_request_takes_no_more_of_the_host_than_its_cap() -> None:
    lab = TierLab(pages=12, changes={"host_tokens_per_request": 48})
    said(lab, "a", prompt(128))
    lab.settle()
    assert len(lab.tiers.host) == 3


def test_a_fetch_that_takes_longer_than_computing_is_not_made() -> None:
    lab = TierLab(pages=12)
    first = prompt(128)
    said(lab, "a", first)
    said(lab, "b", prompt(176, seed=1))
    lab.tiers.costs.copied("host", "up", 1 << 20, seconds=100.0)
    lab.tiers.costs.prefill.saw(1000, seconds=0.001)

    said(lab, "c", first)

    assert lab.tiers.counts.declined > 0
    assert cached(lab, "c") == 0


def test_events_follow_a_page_from_the_device_to_the_host_and_away() -> None:
    lab = TierLab(pages=12, host_pages=12)
    first = prompt(128)
    said(lab, "a", first)
    keys = set(page_keys(ROOT, first))
    start = lab.engine.cache.sequence
    said(lab, "b", prompt(176, seed=1))

    changes = lab.engine.cache.changes_after(start)
    assert changes is not None
    lowered = {k for c in changes if c.stored and c.tier == "host" for k in c.keys}
    assert keys <= lowered
    snapshot = lab.engine.cache.snapshot()
    assert keys <= {k for tier, found in snapshot.lower for k in found if tier == "host"}

    said(lab, "d", prompt(176, seed=2))
    said(lab, "e", prompt(176, seed=3))

    gone = lab.engine.cache.changes_after(start)
    assert gone is not None
    assert keys <= {k for c in gone if not c.stored for k in c.keys}


def test_only_pages_that_have_arrived_go_down_at_a_decode_worker() -> None:
    """T126: the request is cancelled while its pages are still arriving; the same prompt again is computed right."""
    p, d = TierLab(pages=32), TierLab(pages=12)
    tokens = prompt(128)
    source = p.submit(request("r", tokens, Mode.SOURCE, max_tokens=4))
    p.run()
    remote = d.submit(request("r", tokens, Mode.REMOTE, max_tokens=4))
    d.run()
    admitted = d.admitted(remote)
    d.engine.cancel(remote)
    d.run()
    said(d, "b", prompt(32, seed=1))
    assert not [k for k in page_keys(ROOT, tokens) if k in d.tiers.host]
    admitted.hold.release()

    again = d.submit(request("r2", tokens, Mode.REMOTE, max_tokens=4))
    d.run()
    move(p, d, p.admitted(source), d.admitted(again))
    d.engine.start(again, p.done(source).first)
    d.run()
    right = undisturbed(tokens, request("r", tokens, max_tokens=4).sampling)[0]
    assert tuple(d.tokens(again)) == right[1:]
    d.admitted(again).hold.release()
    p.admitted(source).hold.release()
    d.run()
    said(d, "c", prompt(176, seed=2))
    said(d, "d", tokens)
    assert cached(d, "d") == 112
    d.baseline()


def test_a_decode_worker_reads_from_its_peer_only_what_its_host_lacks() -> None:
    p, d = TierLab(pages=32), TierLab(pages=12)
    tokens = prompt(128)
    said(d, "before", tokens[:100])
    said(d, "fill", prompt(176, seed=1))
    source = p.submit(request("r", tokens, Mode.SOURCE, max_tokens=4))
    p.run()
    remote = d.submit(request("r", tokens, Mode.REMOTE, max_tokens=4))
    d.run()

    assert d.admitted(remote).ready == 96
    move(p, d, p.admitted(source), d.admitted(remote))
    d.engine.start(remote, p.done(source).first)
    d.run()

    right = undisturbed(tokens, request("r", tokens, max_tokens=4).sampling)[0]
    assert tuple(d.tokens(remote)) == right[1:]
    assert isinstance(p.done(source).first[0], First)
