"""What is kept and what goes first."""

from __future__ import annotations

import threading

from engine.tiers.cost import Costs
from engine.tiers.index import Entry, TierIndex
from engine.tiers.policy import Sightings, first_to_go
from engine.tiers.work import Job, Thread, Urgency


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def fill(index: TierIndex, chains: list[tuple[int, int]]) -> None:
    """A page for each (key, depth), hanging on nothing; the first is the longest unused."""
    for number, depth in chains:
        page = index.pool.allocate(1)
        assert page is not None
        index.add(Entry(key(number), page[0], None, depth, (1,)))
        index.pool.release(page)


def test_the_longest_unused_page_goes_first() -> None:
    index = TierIndex(4)
    fill(index, [(1, 0), (2, 0), (3, 0)])
    index.pool.release(index.pool.allocate(1) or [])
    assert index.keys() == [key(2), key(3)]


def test_a_tail_goes_before_what_it_hangs_on() -> None:
    index = TierIndex(4)
    for number in (1, 2, 3):
        page = index.pool.allocate(1)
        assert page is not None
        index.add(Entry(key(number), page[0], key(number - 1) if number > 1 else None, number - 1, (1,)))
        index.pool.release(page)
    index.pool.allocate(1)
    assert index.keys() == [key(1), key(2)]


def test_by_flops_a_deep_page_outlives_a_shallow_one_of_about_its_age() -> None:
    kept = {}
    for order in ("lru", "flops"):
        index = TierIndex(4, order)
        fill(index, [(1, 4000), (2, 0), (3, 0)])
        index.pool.allocate(1)
        kept[order] = index.keys()
    assert kept == {"lru": [key(2), key(3)], "flops": [key(1), key(3)]}


def test_a_page_that_is_read_is_not_evicted() -> None:
    index = TierIndex(3)
    fill(index, [(1, 0), (2, 0)])
    (entry,) = index.match([key(1)], 0)
    with index.pool.hold([entry.page]):
        assert index.pool.allocate(2) is None
        assert index.pool.allocate(1) is not None
        assert index.keys() == [key(1)]


def test_equal_worth_leaves_the_choice_to_age() -> None:
    assert first_to_go([5.0, 5.0, 5.0]) == 0
    assert first_to_go([9.0, 1.0, 5.0]) == 1


def test_sightings_are_bounded_and_the_unseen_are_forgotten_first() -> None:
    seen = Sightings(after=2, bound=2)
    seen.asked([key(1)])
    seen.asked([key(2)])
    seen.asked([key(1)])
    seen.asked([key(3)])
    assert [seen.wanted(key(n)) for n in (1, 2, 3)] == [True, False, False]


def test_what_is_unknown_is_tried_and_what_was_measured_decides() -> None:
    costs = Costs()
    assert costs.fetch_pays("host", 1 << 30, 16)
    costs.copied("host", "up", 1 << 30, seconds=1.0)
    assert costs.fetch_pays("host", 1 << 30, 16)
    costs.prefill.saw(1000, seconds=1.0)
    assert not costs.fetch_pays("host", 1 << 30, 999)
    assert costs.fetch_pays("host", 1 << 30, 1001)
    costs.copied("host", "down", 1 << 30, seconds=1.0)
    assert not costs.swap_pays(1 << 30, 1999)
    assert costs.swap_pays(1 << 30, 2001)


def test_a_load_overtakes_stores_that_wait() -> None:
    gate, ran, news = threading.Event(), [], threading.Event()
    lane = Thread("tier", news.set)
    done = lambda *_: None  # noqa: E731
    lane.submit(Job(Urgency.STORE, gate.wait, done))
    for urgency in (Urgency.STORE, Urgency.SWAP, Urgency.LOAD):
        lane.submit(Job(urgency, lambda u=urgency: ran.append(u), done))  # type: ignore[misc]
    gate.set()
    lane.close()
    assert ran == [Urgency.LOAD, Urgency.SWAP, Urgency.STORE]
    assert len(lane.take()) == 4
    assert news.is_set()
