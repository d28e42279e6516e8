"""Pages are free, cached or referenced, never two of these and never lost; the cache is prefix-closed."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.pages import PageHold, PagePool, SlotPool, hold_both
from engine.prefix_cache import PrefixCache
from kvtransfer.hashing import page_keys, root
from kvtransfer.types import PAGE_TOKENS
from tests.unit.engine_core.lab import ROOT, prompt


def take(pool: PagePool, count: int) -> list[int]:
    pages = pool.allocate(count)
    assert pages is not None
    return pages


def store(pool: PagePool, cache: PrefixCache, tokens: tuple[int, ...]) -> list[int]:
    """A sequence that was computed and ended."""
    keys = page_keys(ROOT, tokens)
    pages = take(pool, len(keys))
    cache.publish(keys, pages, 0)
    pool.release(pages)
    return pages


def test_page_0_is_never_handed_out() -> None:
    assert sorted(take(PagePool(5), 4)) == [1, 2, 3, 4]


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(5)
    take(pool, 3)
    assert pool.allocate(2) is None
    assert pool.free == 1


def test_pages_that_were_never_handed_out_take_no_memory_and_come_before_used_ones() -> None:
    pool = PagePool(1 << 40)
    assert pool.total == pool.free == (1 << 40) - 1
    first = take(pool, 3)
    pool.release(first[:2])
    assert pool.free == (1 << 40) - 2
    assert take(pool, 2) == [4, 5]
    assert pool.refs(10**9) == 0
    small = PagePool(4)
    small.release(take(small, 2))
    assert take(small, 3) == [3, 2, 1], "then the longest unused"
    small.check()


def test_a_held_page_is_not_handed_out_again_until_the_last_count_is_gone() -> None:
    pool = PagePool(3)
    pages = take(pool, 2)
    hold = pool.hold(pages)
    pool.release(pages)
    assert pool.allocate(1) is None
    hold.release()
    assert pool.available == 2


def test_releasing_a_hold_twice_releases_it_once() -> None:
    pool, slots = PagePool(3), SlotPool(2)
    pages, slot = take(pool, 2), take(slots, 1)
    with hold_both(pool, pages, slots, slot) as hold:
        hold.release()
        hold.release()
    pool.check()
    assert [pool.refs(page) for page in pages] == [1, 1]
    assert slots.refs(slot[0]) == 1


def test_a_pool_without_slots_hands_out_none() -> None:
    slots = SlotPool(0)
    assert slots.total == 0
    assert slots.allocate(0) == []
    assert slots.allocate(1) is None
    slots.check()


def test_the_listener_hears_of_the_last_release_only() -> None:
    pool = PagePool(3)
    heard: list[int] = []
    pool.set_free_listener(lambda: heard.append(pool.available))
    pages = take(pool, 1)
    hold = pool.hold(pages)
    pool.release(pages)
    assert heard == []
    hold.release()
    assert heard == [2]


def test_holds_of_many_threads_leave_nothing_behind() -> None:
    pool = PagePool(40)

    def work(seed: int) -> None:
        for turn in range(200):
            pages = pool.allocate(1 + (seed + turn) % 4)
            if pages is not None:
                hold = pool.hold(pages)
                pool.release(pages)
                hold.release()
                hold.release()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.check()
    assert pool.free == 39


def test_a_prefix_is_found_as_far_as_it_is_known() -> None:
    pool = PagePool(64)
    cache = PrefixCache(pool)
    pages = store(pool, cache, prompt(40 * PAGE_TOKENS))
    longer = (*prompt(35 * PAGE_TOKENS), *[1] * 100)
    assert cache.match(page_keys(ROOT, longer)) == pages[:35]
    assert cache.match(page_keys(ROOT, prompt(40 * PAGE_TOKENS))) == pages


def test_another_salt_finds_nothing_and_the_same_one_does() -> None:
    pool = PagePool(64)
    cache = PrefixCache(pool)
    pages = store(pool, cache, prompt(64))
    assert cache.match(page_keys(root(b"other", "oracle", "1"), prompt(64))) == []
    assert cache.match(page_keys(ROOT, prompt(64))) == pages


def test_a_disabled_cache_keeps_nothing() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, enabled=False)
    store(pool, cache, prompt(64))
    assert cache.match(page_keys(ROOT, prompt(64))) == []
    assert pool.free == 7


def test_the_tail_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = PagePool(9)
    cache = PrefixCache(pool)
    old = store(pool, cache, prompt(64, seed=1))
    new = store(pool, cache, prompt(64, seed=2))
    pool.release(take(pool, 2))
    assert cache.match(page_keys(ROOT, prompt(64, seed=1))) == old[:2]
    assert cache.match(page_keys(ROOT, prompt(64, seed=2))) == new
    cache.check()


def test_a_hit_makes_a_prefix_recently_used() -> None:
    pool = PagePool(9)
    cache = PrefixCache(pool)
    old = store(pool, cache, prompt(64, seed=1))
    store(pool, cache, prompt(64, seed=2))
    pool.hold(old).release()
    pool.release(take(pool, 4))
    assert cache.match(page_keys(ROOT, prompt(64, seed=1))) == old
    assert cache.match(page_keys(ROOT, prompt(64, seed=2))) == []


def test_every_cached_page_can_be_had_even_where_only_its_tail_is_held() -> None:
    """Two sequences computed one prefix; the second one's tail hangs on the first one's pages."""
    pool = PagePool(6)
    cache = PrefixCache(pool)
    head = store(pool, cache, prompt(32))
    keys = page_keys(ROOT, prompt(48))
    mine = take(pool, 3)
    cache.publish(keys, mine, 0)
    pool.release(mine[:2])
    assert pool.cached == 2
    assert pool.free == 2
    taken = take(pool, 4)
    assert set(head) <= set(taken)
    assert cache.match(keys) == []
    cache.check()
    pool.release(taken)
    pool.release(mine[2:])
    pool.check()
    assert pool.free == 5


def test_changes_are_journalled_in_order_and_a_late_reader_takes_a_snapshot() -> None:
    pool = PagePool(9)
    cache = PrefixCache(pool, journal_length=3)
    one, two = page_keys(ROOT, prompt(64, seed=1)), page_keys(ROOT, prompt(64, seed=2))
    store(pool, cache, prompt(64, seed=1))
    store(pool, cache, prompt(64, seed=2))
    pool.release(take(pool, 1))
    changes = cache.changes_after(0)
    assert changes is not None
    assert [(c.sequence, c.stored, c.keys) for c in changes] == [
        (1, True, tuple(one)),
        (2, True, tuple(two)),
        (3, False, (one[3],)),
    ]
    pool.release(take(pool, 2))
    assert cache.changes_after(0) is None
    assert cache.changes_after(99) is None
    assert cache.changes_after(4) == []
    snapshot = cache.snapshot()
    assert snapshot.sequence == cache.sequence == 4
    assert snapshot.keys == (*one[:2], *two)


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share prefixes, publish, are held beyond their end and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(24)
        self.cache = PrefixCache(self.pool)
        self.live: list[tuple[list[bytes], list[int], int]] = []
        self.holds: list[PageHold] = []
        self.known: dict[bytes, None] = {}
        self.seen = 0

    @rule(length=st.integers(1, 8), seed=st.integers(0, 2), branch=st.integers(0, 8))
    def admit(self, length: int, seed: int, branch: int) -> None:
        tokens = prompt(length * 16, seed)
        tokens = (*tokens[: branch * 16], *(t ^ 1 for t in tokens[branch * 16 :]))
        keys = page_keys(ROOT, tokens)
        with self.pool.lock:
            hit = self.cache.match(keys[:-1])
            self.pool.share(hit)
            rest = self.pool.allocate(len(keys) - len(hit))
        if rest is None:
            self.pool.release(hit)
        else:
            self.live.append((keys, hit + rest, len(hit)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        keys, pages, first = self.live[index]
        upto = data.draw(st.integers(first, len(keys)))
        self.cache.publish(keys[:upto], pages, first)
        self.live[index] = (keys, pages, upto)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        _, pages, _ = self.live[data.draw(st.integers(0, len(self.live) - 1))]
        self.holds.append(self.pool.hold(data.draw(st.lists(st.sampled_from(pages), unique=True))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, pages, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.release(pages)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        hold.release()

    @rule(count=st.integers(0, 24))
    def use_and_return(self, count: int) -> None:
        available = self.pool.available
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > available), "every free or cached page can be had"
        self.pool.release(pages or [])

    @invariant()
    def sound(self) -> None:
        self.pool.check()
        self.cache.check()

    @invariant()
    def the_journal_tells_what_is_known(self) -> None:
        changes = self.cache.changes_after(self.seen)
        assert changes is not None
        for change in changes:
            for key in change.keys:
                if change.stored:
                    assert key not in self.known
                    self.known[key] = None
                else:
                    del self.known[key]
        self.seen = self.cache.sequence
        assert set(self.known) == set(self.cache.snapshot().keys)

    def teardown(self) -> None:
        for _, pages, _ in self.live:
            self.pool.release(pages)
        for hold in self.holds:
            hold.release()
        self.pool.check()
        assert self.pool.referenced == 0
        self.cache.clear()
        assert self.pool.free == self.pool.total


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_bug_in_a_count_is_caught() -> None:
    pool = PagePool(3)
    pages = take(pool, 1)
    pool.release(pages)
    with pytest.raises(AssertionError):
        pool.release(pages)
