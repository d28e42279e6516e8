"""What comes up from the disk to the host for who waits for it. Engine thread only; the reads run on the disk's lane.

A request is never admitted because of what is on disk: it is staged first, while it waits and owns nothing, and
requests behind it do not wait for that. Pages come one by one, as far as they are good; a state comes whole or not at
all, after the pages below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.pages import PageHold, hold_both
from engine.tiers.disk import Disk, HostItem
from engine.tiers.disk_states import DiskStates
from engine.tiers.index import Entry, TierIndex
from engine.tiers.states import HostStates, TierState
from engine.tiers.stats import Counts

Submit = Callable[[Callable[[], int], Callable[[int | None, Exception | None, float], None]], None]
"""(what to run on the disk's thread, what to do with its result, error and seconds)"""


@dataclass(frozen=True, slots=True)
class _Room:
    """Host pages to read into, where the state goes, and the counts on all of it."""

    pages: list[int]
    item: HostItem
    hold: PageHold


@dataclass(frozen=True, slots=True, eq=False)
class _Coming:
    """hold: counts on both sides."""

    seq: int
    entries: Sequence[Entry]
    targets: Sequence[int]
    state: TierState | None
    item: HostItem
    hold: PageHold


class Staging:
    """has: whether a page is in any tier. came: told keys that are on the host now. moved: told bytes and seconds."""

    def __init__(
        self,
        disk: Disk,
        index: TierIndex,
        states: DiskStates,
        host: TierIndex,
        host_states: HostStates,
        counts: Counts,
        page_bytes: int,
        submit: Submit,
        has: Callable[[bytes], bool],
        came: Callable[[Sequence[bytes]], None],
        moved: Callable[[int, float], None],
    ) -> None:
        self._disk, self._index, self._states = disk, index, states
        self._host, self._host_states = host, host_states
        self._counts, self._page_bytes = counts, page_bytes
        self._submit, self._has, self._came, self._moved = submit, has, came, moved
        self._known: dict[int, bool] = {}  # sequences that were decided about; True while something comes for them
        self._ended = False

    def known(self, seq: int) -> bool | None:
        """Whether something is on its way for this sequence; None: that was not decided yet. It is decided once."""
        return self._known.get(seq)

    def decline(self, seq: int) -> None:
        """Nothing is worth fetching."""
        self._known[seq] = False

    def start(self, seq: int, entries: Sequence[Entry], state: TierState | None) -> None:
        """Bring these pages up, then this state, if the host has room for them."""
        slots = [state.slot] if state is not None else []
        # Held first: room on the host may be that of a page these hang on.
        source = hold_both(self._index.pool, [entry.page for entry in entries], self._states.slots, slots)
        room = self._room(len(entries), state)
        self._known[seq] = room is not None
        if room is None:
            source.release()
            return
        coming = _Coming(seq, entries, room.pages, state, room.item, PageHold.joined(source, room.hold))
        if entries:
            self._read(coming)
        else:
            self._read_state(coming)

    def forget(self, seq: int) -> None:
        self._known.pop(seq, None)

    def end(self) -> None:
        """Begin no read any more: nobody waits for what follows one that is under way."""
        self._ended = True

    def _room(self, count: int, state: TierState | None) -> _Room | None:
        partial = int(state is not None and bool(state.tail))
        pages = self._host.pool.allocate(count + partial)
        slots = self._host_states.slots.allocate(int(state is not None)) if pages is not None else None
        if pages is None or slots is None:
            self._host.pool.release(pages or [])
            return None
        hold = PageHold(((self._host.pool, tuple(pages)), (self._host_states.slots, tuple(slots))))
        return _Room(pages[:count], HostItem(slots[0] if slots else 0, pages[count] if partial else 0), hold)

    def _read(self, coming: _Coming) -> None:
        entries = coming.entries
        pairs = [(entry.page, target) for entry, target in zip(entries, coming.targets, strict=True)]
        sums = [entry.sums for entry in entries]

        def done(good: int | None, error: Exception | None, seconds: float) -> None:
            count = good or 0
            self._moved(count * self._page_bytes, seconds)
            self._came([key for key in map(self._add, entries[:count], coming.targets) if key is not None])
            self._counts.disk_pages += count
            if count == len(entries) and coming.state is not None and not self._ended:
                self._read_state(coming)
                return
            coming.hold.release()
            if count < len(entries):
                self._spoilt(error)
                self._index.drop(entries[count].key)
            self._over(coming.seq)

        self._submit(lambda: self._disk.read(pairs, sums), done)

    def _add(self, entry: Entry, target: int) -> bytes | None:
        """Publish it on the host, unless it is there or its parent has gone meanwhile. Its key, if it was."""
        known = entry.parent is None or self._has(entry.parent)
        made = Entry(entry.key, target, entry.parent, entry.depth, entry.sums)
        return entry.key if known and self._host.add(made) else None

    def _read_state(self, coming: _Coming) -> None:
        state, item = coming.state, coming.item
        assert state is not None
        self._states.used(state)
        sums = state.slot_sums, state.page_sums

        def done(good: int | None, error: Exception | None, seconds: float) -> None:
            if good:
                self._moved(self._disk.state_bytes(partial=bool(state.tail)), seconds)
                here = TierState(state.key, state.length, state.tail, item.slot, item.page, *sums, state.saving)
                if self._has(state.key) and self._host_states.add(here):
                    self._host_states.used(here)
                    self._counts.disk_states += 1
            coming.hold.release()
            if not good:
                self._spoilt(error)
                self._states.drop(state)
            self._over(coming.seq)

        self._submit(lambda: int(self._disk.read_state(state.slot, item, *sums)), done)

    def _spoilt(self, error: Exception | None) -> None:
        self._counts.failed += error is not None
        self._counts.corrupt += error is None

    def _over(self, seq: int) -> None:
        if seq in self._known:
            self._known[seq] = False

    def check_empty(self) -> None:
        """Raises AssertionError."""
        assert not self._known, "staged sequences are left"
