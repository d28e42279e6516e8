"""The disk tier's books: what goes on from the host to the disk, and comes back to the host for who waits for it.

Engine thread only; reads and writes run on a lane of their own. A request is never admitted because of what is on disk:
it is staged first (disk to host, while it waits and owns nothing), and requests behind it do not wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.prefix_cache import PrefixCache
from engine.tiers.cost import Costs
from engine.tiers.disk import Disk
from engine.tiers.index import Entry, TierIndex
from engine.tiers.journal import Put
from engine.tiers.policy import Order
from engine.tiers.stats import Counts
from engine.tiers.work import Job, Lane, Urgency
from kvtransfer.types import PAGE_TOKENS

STAGED_SHARE = 2
"""Of the host pool at most one page in so many for what one request is staged."""


class DiskTier:
    """queue_pages: on their way to the disk at most; what comes beyond that is not spilled. gone: told keys that have
    left the disk (tail first). rank: see engine.retention."""

    def __init__(
        self,
        disk: Disk,
        host: TierIndex,
        cache: PrefixCache,
        lane: Lane,
        costs: Costs,
        counts: Counts,
        page_bytes: int,
        queue_pages: int,
        order: Order,
        gone: Callable[[Sequence[bytes]], None],
        rank: Callable[[bytes], int],
    ) -> None:
        self.index = TierIndex(disk.count + 1, order, self._left, host.pool.lock, rank)
        self.lane = lane
        self.jobs = 0
        self._disk, self._host, self._cache = disk, host, cache
        self._costs, self._counts = costs, counts
        self._page_bytes, self._queue_pages = page_bytes, queue_pages
        self._gone = gone
        self._spilling: set[bytes] = set()
        self._drops: list[bytes] = []
        self._staging: dict[int, bool] = {}  # sequences that were asked about; True while pages come for them
        self._restore(disk.puts)

    def _restore(self, puts: dict[bytes, Put]) -> None:
        """What an earlier process of this worker has left."""
        slots = self.index.pool.allocate(self._disk.count)
        assert slots is not None
        for put in puts.values():
            self.index.add(Entry(put.key, put.slot, put.parent, put.depth, put.sums))
        self.index.pool.release(slots)

    # --- down -----------------------------------------------------------------------------------------------------

    def spill(self, entries: Sequence[Entry]) -> None:
        """Copy pages that have come to the host on to the disk, as far as the queue takes them."""
        batch: list[Entry] = []
        slots: list[int] = []
        for entry in entries:
            if entry.key in self.index or entry.key in self._spilling:
                continue
            slot = self.index.pool.allocate(1) if len(self._spilling) < self._queue_pages else None
            if slot is None:
                self._counts.dropped += 1
                continue
            batch.append(entry)
            slots += slot
            self._spilling.add(entry.key)
        if batch:
            self._write(batch, slots)

    def _write(self, batch: list[Entry], slots: list[int]) -> None:
        hosts = [entry.page for entry in batch]
        self._host.pool.share(hosts)
        puts = [Put(e.key, e.parent, s, e.depth, e.sums) for e, s in zip(batch, slots, strict=True)]
        pairs = list(zip(slots, hosts, strict=True))
        drops, self._drops = self._drops, []

        def done(_: None, error: Exception | None, seconds: float) -> None:
            self._spilling.difference_update(put.key for put in puts)
            self._host.pool.release(hosts)
            if error is None:
                self._moved("down", len(puts), seconds)
                for put in puts:
                    self._published(put)
            else:
                self._counts.failed += 1
                self._drops += drops  # dropped twice does no harm, not at all would
            self.index.pool.release(slots)

        self._submit(Urgency.STORE, lambda: self._disk.write(pairs, puts, drops), done)

    def _published(self, put: Put) -> None:
        parent = put.parent
        known = parent is None or parent in self._cache or parent in self._host or parent in self.index
        if not known:
            self._drops.append(put.key)
            return
        self.index.add(Entry(put.key, put.slot, parent, put.depth, put.sums))
        self._counts.spilled += 1
        if put.key not in self._cache and put.key not in self._host:
            self._cache.record_lower([put.key], "disk")

    def _left(self, keys: Sequence[bytes]) -> None:
        self._drops += keys
        self._gone(keys)

    # --- up -------------------------------------------------------------------------------------------------------

    def stage(self, seq: int, keys: Sequence[bytes], held: int) -> bool:
        """Whether pages of `keys` past the first `held` (which are above) are on their way to the host for this
        sequence. Decided once per sequence."""
        known = self._staging.get(seq)
        if known is not None:
            return known
        entries = self.index.match(keys, held)[: self._host.pool.total // STAGED_SHARE]
        nbytes, tokens = len(entries) * self._page_bytes, len(entries) * PAGE_TOKENS
        copy_s = self._costs.copy_s("host", "up", nbytes) or 0.0
        targets = None
        if entries and self._costs.fetch_pays("disk", nbytes, tokens, copy_s):
            targets = self._host.pool.allocate(len(entries))
        self._staging[seq] = targets is not None
        if targets is not None:
            self._read(seq, entries, targets)
        return self._staging[seq]

    def _read(self, seq: int, entries: list[Entry], targets: list[int]) -> None:
        slots = [entry.page for entry in entries]
        self.index.pool.share(slots)
        pairs = list(zip(slots, targets, strict=True))
        sums = [entry.sums for entry in entries]

        def done(good: int | None, error: Exception | None, seconds: float) -> None:
            count = good or 0
            self._moved("up", count, seconds)
            for entry, target in zip(entries[:count], targets, strict=False):
                self._host.add(Entry(entry.key, target, entry.parent, entry.depth, entry.sums))
            self.index.pool.release(slots)
            self._host.pool.release(targets)
            self._counts.disk_pages += count
            if count < len(entries):
                self._counts.failed += error is not None
                self._counts.corrupt += error is None
                self.index.drop(entries[count].key)
            if seq in self._staging:
                self._staging[seq] = False

        self._submit(Urgency.LOAD, lambda: self._disk.read(pairs, sums), done)

    def forget(self, seq: int) -> None:
        self._staging.pop(seq, None)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _submit(
        self, urgency: Urgency, run: Callable[[], object], done: Callable[[None, Exception | None, float], None]
    ) -> None:
        self.jobs += 1
        self.lane.submit(Job(urgency, run, done))

    def _moved(self, direction: str, pages: int, seconds: float) -> None:
        self._costs.copied("disk", direction, pages * self._page_bytes, seconds)
        self._counts.moved("disk", direction, pages * self._page_bytes, seconds)

    def poll(self) -> None:
        for job in self.lane.take():
            self.jobs -= 1
            job.done(job.result, job.error, job.seconds)

    def close(self) -> None:
        self.lane.close()
        self.poll()
        self._disk.close()

    def check_empty(self) -> None:
        """Raises AssertionError."""
        self.index.check()
        assert not self._spilling, "spills are left"
        assert not self._staging, "staged sequences are left"
        assert self.index.pool.referenced == 0, "disk pages are still held"
