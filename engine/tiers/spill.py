"""What goes on from the host to the disk: every page and state that comes to the host. Engine thread only; the writes
run on the disk's lane.

No more than a bounded part is on its way at a time. What comes beyond that waits on the host, as long as the host keeps
it. A state's pages go before it as far as they wait, or a kill in between would leave it without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.pages import PageHold
from engine.tiers.disk import Disk, HostItem
from engine.tiers.disk_states import DiskStates
from engine.tiers.index import Entry, TierIndex
from engine.tiers.journal import Hint, Put, StatePut
from engine.tiers.notes import Notebook
from engine.tiers.states import HostStates, TierState
from engine.tiers.stats import Counts

Submit = Callable[[Callable[[], None], Callable[[None, Exception | None, float], None]], None]
"""(what to run on the disk's thread, what to do with its result, error and seconds)"""


class Spill:
    """queue_pages: on their way at most, and as many bytes of states. published: told a page that is on disk now. has:
    whether a page is in any tier. moved: told bytes and seconds."""

    def __init__(
        self,
        disk: Disk,
        index: TierIndex,
        states: DiskStates,
        host: TierIndex,
        host_states: HostStates,
        notes: Notebook,
        counts: Counts,
        page_bytes: int,
        queue_pages: int,
        submit: Submit,
        has: Callable[[bytes], bool],
        published: Callable[[bytes], None],
        moved: Callable[[int, float], None],
    ) -> None:
        self._disk, self._index, self._states = disk, index, states
        self._host, self._host_states = host, host_states
        self._notes, self._counts = notes, counts
        self._page_bytes, self._queue_pages = page_bytes, queue_pages
        self._queue_states = max(1, queue_pages * page_bytes // disk.place_bytes)
        self._submit, self._has, self._published, self._moved = submit, has, published, moved
        self._writing: set[bytes] = set()
        self._writing_states: set[bytes] = set()
        self._later: dict[bytes, None] = {}
        self._states_later: dict[bytes, TierState] = {}
        self._drops: list[bytes] = []

    def left(self, names: Sequence[bytes]) -> None:
        """These keys or states are on disk no more: said there before their place is written again."""
        self._drops += names

    def pages(self, entries: Sequence[Entry]) -> None:
        """Pages that have come to the host, parents first."""
        self._later.update((entry.key, None) for entry in entries if not self._known(entry.key))
        self._more_pages()
        self._more_states()

    def state(self, state: TierState) -> None:
        """One that has come to the host."""
        if self._disk.states and not self._known_state(state):
            self._states_later[state.name] = state
            self._more_states()

    def note(self, *, now: bool = False) -> None:
        """Write down notes that have waited long enough, or all that is to be written down."""
        if self._notes.pressing or (now and (self._drops or self._notes.waiting)):
            drops, self._drops = self._drops, []
            hints = self._notes.take()

            def done(_: None, error: Exception | None, seconds: float) -> None:
                if error is not None:
                    self._failed(drops, hints)

            self._submit(lambda: self._disk.note(drops, hints), done)

    def end(self) -> None:
        """Write down what is to be, and begin nothing any more: what waits is on the host alone and goes with it."""
        self.note(now=True)
        self._queue_pages = self._queue_states = 0

    def rest(self) -> tuple[list[bytes], list[tuple[bytes, Hint]]]:
        """What is left to be written down after that, of what was on its way: (drops, hints)."""
        return self._drops, self._notes.take()

    # --- pages ----------------------------------------------------------------------------------------------------

    def _known(self, key: bytes) -> bool:
        return key in self._index or key in self._writing

    def _more_pages(self) -> None:
        batch: list[Entry] = []
        slots: list[int] = []
        while self._later and len(self._writing) < self._queue_pages:
            key = next(iter(self._later))
            del self._later[key]
            entry = self._host.get(key)
            slot = self._index.pool.allocate(1) if entry is not None and not self._known(key) else None
            if entry is None or slot is None:
                self._counts.dropped += not self._known(key)
                continue
            batch.append(entry)
            slots += slot
            self._writing.add(key)
        while len(self._later) > self._host.pool.total:  # all that is beyond has left the host
            del self._later[next(iter(self._later))]
        if batch:
            self._write(batch, slots)

    def _write(self, batch: list[Entry], slots: list[int]) -> None:
        hosts = [entry.page for entry in batch]
        self._host.pool.share(hosts)
        puts = [Put(e.key, e.parent, s, e.depth, e.sums) for e, s in zip(batch, slots, strict=True)]
        pairs = list(zip(slots, hosts, strict=True))
        drops, self._drops = self._drops, []
        hints = self._notes.take(put.key for put in puts)

        def done(_: None, error: Exception | None, seconds: float) -> None:
            self._writing.difference_update(put.key for put in puts)
            self._host.pool.release(hosts)
            if error is None:
                self._moved(len(puts) * self._page_bytes, seconds)
                for put in puts:
                    self._publish(put)
            else:
                self._failed(drops, hints)
            self._index.pool.release(slots)
            self._more_pages()
            self._more_states()

        self._submit(lambda: self._disk.write(pairs, puts, drops, hints), done)

    def _publish(self, put: Put) -> None:
        """Unless its parent is nowhere any more."""
        if put.parent is not None and not self._has(put.parent):
            self._drops.append(put.key)
            self._notes.hints.forget([put.key])
            return
        self._index.add(Entry(put.key, put.slot, put.parent, put.depth, put.sums))
        self._notes.hints.changed(put.key)  # while it was written
        self._counts.spilled += 1
        self._published(put.key)

    # --- states ---------------------------------------------------------------------------------------------------

    def _known_state(self, state: TierState) -> bool:
        return state.name in self._writing_states or self._states.has(state.key, state.tail)

    def _more_states(self) -> None:
        for name, asked in list(self._states_later.items()):
            if len(self._writing_states) >= self._queue_states:
                break
            state = self._host_states.get(asked.key, asked.tail)
            known = self._known_state(asked)
            if state is not None and not known and not self._host_states.spent(name) and not self._pages_first(state):
                continue
            del self._states_later[name]
            if known or self._host_states.spent(name):
                continue
            slots = self._states.slots.allocate(1) if state is not None else None
            if state is None or slots is None:
                self._counts.dropped += 1
                continue
            self._writing_states.add(name)
            self._write_state(state, slots[0])
        while len(self._states_later) > self._host_states.slots.total:
            del self._states_later[next(iter(self._states_later))]

    def _pages_first(self, state: TierState) -> bool:
        """Whether it is its turn. Of its pages, those that wait are the next to be written; for those that have not
        come down yet it waits as long as the host has room."""
        waiting: list[bytes] = []
        key: bytes | None = state.key
        while key is not None:
            entry = self._host.get(key) or self._index.get(key)
            if entry is None:
                break
            if key in self._later:
                waiting.append(key)
            key = entry.parent
        if waiting:
            self._later = {**dict.fromkeys(reversed(waiting)), **self._later}
            self._more_pages()
        if any(known in self._later for known in waiting):
            return False
        return key is None or not self._host_states.slots.free

    def _write_state(self, state: TierState, slot: int) -> None:
        hold: PageHold = self._host_states.held(state)
        sums = state.slot_sums, state.page_sums
        put = StatePut(state.name, state.key, state.length, state.tail, slot, state.saving, *sums)
        source = HostItem(state.slot, state.page)
        drops, self._drops = self._drops, []

        def done(_: None, error: Exception | None, seconds: float) -> None:
            self._writing_states.discard(put.name)
            hold.release()
            if error is not None:
                self._failed(drops, ())
            else:
                self._moved(self._disk.state_bytes(partial=bool(put.tail)), seconds)
                self._publish_state(put)
            self._states.slots.release([slot])
            self._more_states()

        self._submit(lambda: self._disk.write_state(source, put, drops), done)

    def _publish_state(self, put: StatePut) -> None:
        """Unless its pages have gone meanwhile."""
        made = TierState(put.key, put.length, put.tail, put.slot, 0, put.slot_sums, put.page_sums, put.saving)
        if not self._has(put.key) or not self._states.add(made):
            self._drops.append(put.name)
            self._notes.lines.forget([put.name])
            return
        self._notes.lines.changed(put.name)
        self._counts.spilled_states += 1

    def _failed(self, drops: list[bytes], hints: Sequence[tuple[bytes, Hint]]) -> None:
        self._counts.failed += 1
        self._drops += drops  # dropped twice does no harm, not at all would
        self._notes.failed(hints)

    def check_empty(self) -> None:
        """Raises AssertionError."""
        assert not self._writing, "spills are left"
        assert not self._writing_states, "spills of states are left"
        self._notes.check_empty()
