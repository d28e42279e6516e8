"""What goes down from the device to the host, and when: ahead of need while it is quiet, and before eviction.

Engine thread only. A source is held until its copy is done, then it is the next to be evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from engine.pages import PagePool
from engine.prefix_cache import PrefixCache
from engine.tiers.index import Entry, TierIndex
from engine.tiers.policy import Sightings
from engine.tiers.pool import Mover, Sums
from engine.tiers.stats import Counts

LOOK_AHEAD = 256
"""Idle device pages, longest unused first, that are kept ready to be dropped."""

QUIET_SHARE = 8
"""While nobody waits for room, at most one device page in so many is on its way down: they cannot be used meanwhile."""

Named = tuple[int, bytes, bytes | None]
"""(device page, key, parent)"""

Submit = Callable[[Callable[[], list[Sums]], Callable[[list[Sums], Exception | None, float], None]], None]
"""(what to run on the tier's thread, what to do with its result, error and seconds)"""


class Stores:
    """queue_pages: on their way down at most. submit: see Submit. published: told entries whose bytes are on the host,
    parents first, and the seconds their copy took."""

    def __init__(
        self,
        pages: PagePool,
        cache: PrefixCache,
        host: TierIndex,
        sightings: Sightings,
        mover: Mover,
        counts: Counts,
        queue_pages: int,
        submit: Submit,
        published: Callable[[list[Entry], float], None],
    ) -> None:
        self._pages, self._cache, self._host = pages, cache, host
        self._sightings, self._mover, self._counts = sightings, mover, counts
        self._queue_pages = queue_pages
        self._submit, self._published = submit, published
        self._storing: set[bytes] = set()
        self._refused: set[bytes] = set()  # their store failed; tried again after one that did not
        self._ahead: set[bytes] = set()  # device pages stored before anybody needed their room
        self._tried: set[bytes] = set()  # stores started for the room that is being made

    @property
    def under_way(self) -> bool:
        return bool(self._storing)

    def ahead(self) -> None:
        """Start copies of idle device pages that would be evicted soon and are wanted below."""
        if self._pages.free * 2 <= self._pages.total:
            quiet = max(1, self._pages.total // QUIET_SHARE)
            soon = self._cache.oldest(LOOK_AHEAD)
            self._start(soon, min(self._queue_pages, quiet), self._ahead, in_no_hurry=True)

    def make_room(self, count: int, keep: Collection[int]) -> bool:
        """Start copies of the `count` idle pages that are about to be evicted (none of `keep`), where their bytes are
        wanted below. Whether something was left for later."""
        soon = [named for named in self._cache.oldest(count + len(keep)) if named[0] not in keep]
        return self._start(soon, self._queue_pages, self._tried)

    def copy(self, going: Iterable[Named]) -> None:
        """Start copies of these."""
        self._start(going, self._queue_pages, self._tried)

    def made_room(self) -> None:
        self._tried.clear()

    def forget(self, keys: Sequence[bytes]) -> None:
        """These have left the device."""
        self._ahead.difference_update(keys)

    def _start(self, going: Iterable[Named], limit: int, tried: set[bytes], *, in_no_hurry: bool = False) -> bool:
        """Store what is wanted of these, as long as no more than `limit` pages are on their way. tried: keys this is
        not done for again, or a small host would push them out in turn for ever. Whether something was left."""
        known = (self._host, self._storing, self._refused, tried)
        batch: list[Entry] = []
        sources: list[int] = []
        left = False
        for page, key, parent in going:
            if any(key in there for there in known) or not self._sightings.wanted(key):
                continue
            if len(self._storing) + len(batch) >= limit:
                left = True
                break
            target = self._host.pool.allocate(1)
            if target is None:
                self._counts.dropped += 1
                break
            batch.append(Entry(key, target[0], parent, self._cache.depth(key) - 1, ()))
            sources.append(page)
        if batch:
            self._store(batch, sources, in_no_hurry)
        tried.update(entry.key for entry in batch)
        return left

    def _store(self, batch: list[Entry], sources: list[int], in_no_hurry: bool) -> None:
        self._pages.share(sources)
        self._storing.update(entry.key for entry in batch)
        pairs = list(zip(sources, (entry.page for entry in batch), strict=True))

        def done(sums: list[Sums], error: Exception | None, seconds: float) -> None:
            self._storing.difference_update(entry.key for entry in batch)
            self._pages.release_oldest(sources)
            if error is None:
                for entry, found in zip(batch, sums, strict=True):
                    entry.sums = found
                self._published(sorted(batch, key=lambda entry: entry.depth), seconds)
                self._refused.clear()
            else:
                self._counts.failed += 1
                self._refused.update(entry.key for entry in batch)
            self._host.pool.release([entry.page for entry in batch])

        self._submit(lambda: self._mover.save(True, pairs, in_no_hurry=in_no_hurry), done)

    def check_empty(self) -> None:
        """Raises AssertionError."""
        assert not self._storing, "stores are left"
