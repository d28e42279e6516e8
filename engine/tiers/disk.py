"""The disk tier's files and index, for the tier's own thread; and the folder that is one worker's.

Pages lie in one file, slot i at i times the size of a page, all components one behind the other; states in another, a
state's partial page behind it. What may be read is said by the journal. A file that has been cut, damaged or removed is
a miss for what it lacks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.tiers.carriers import Pair
from engine.tiers.journal import Found, Hint, Journal, Put, StatePut
from engine.tiers.pool import Mover, Sums
from kvtransfer.files import BlockFile
from kvtransfer.types import PAGE_TOKENS, Region
from runtime import faults
from runtime.errors import InvalidRequest

FOLDERS = 64
OpenFile = Callable[[Path, int, Sequence[Region]], BlockFile]


@dataclass(frozen=True, slots=True)
class HostItem:
    """A state on the host: its slot, and its partial page (0 = none)."""

    slot: int
    page: int


class Disk(Protocol):
    """What the disk tier's thread asks of what lies below the host. count, states: pages and states there is room for.
    found: what an earlier process of this worker has left."""

    count: int
    states: int
    found: Found

    @property
    def place_bytes(self) -> int:
        """Of a state's place: its partial page has one, too."""
        ...

    def state_bytes(self, *, partial: bool) -> int:
        """What is moved of a state."""
        ...

    def write(
        self,
        pairs: Sequence[Pair],
        puts: Sequence[Put],
        drops: Iterable[bytes],
        hints: Iterable[tuple[bytes, Hint]] = (),
    ) -> None:
        """pairs: (slot, host page). Dropped keys are forgotten first, the pages are published last."""
        ...

    def write_state(self, source: HostItem, put: StatePut, drops: Iterable[bytes]) -> None:
        """As write()."""
        ...

    def note(self, drops: Iterable[bytes], hints: Iterable[tuple[bytes, Hint]]) -> None:
        """What has left, and what is said of what is here."""
        ...

    def read(self, pairs: Sequence[Pair], sums: Sequence[Sums]) -> int:
        """How many leading pages are on the host now and are what was written. pairs: (slot, host page)."""
        ...

    def read_state(self, slot: int, target: HostItem, slot_sums: Sums, page_sums: Sums) -> bool:
        """Whether all of it is on the host now and is what was written."""
        ...

    def close(self) -> None: ...


class FolderDisk:
    """A Disk of files in a folder. layout: see Journal. Raises OSError, TransferFailed."""

    def __init__(
        self, folder: Folder, layout: str, count: int, mover: Mover, open_file: OpenFile, states: int = 0
    ) -> None:
        self._folder = folder
        self._mover = mover
        self._page_bytes, self._slot_bytes = mover.item_bytes(True), mover.item_bytes(False)
        self.count, self.states = count, states
        self._journal = Journal(folder.path / "index", layout, mover.units(True), mover.units(False))
        self.found = _usable(self._journal.found, count, states)
        self.torn = self._journal.torn
        before, after = self._journal.found, self.found
        lost = [key for key in (*before.puts, *before.states) if key not in after.puts and key not in after.states]
        if lost:
            with contextlib.suppress(OSError):  # no room: they are lost at the next start, too
                self._journal.append((), lost)
        self._file = open_file(folder.path / "pages", (count + 1) * self._page_bytes, mover.host)
        self._state_file = (
            open_file(folder.path / "states", (states + 1) * self.place_bytes, mover.host) if states else None
        )

    @property
    def place_bytes(self) -> int:
        return self._slot_bytes + self._page_bytes

    def state_bytes(self, *, partial: bool) -> int:
        return self._slot_bytes + partial * self._page_bytes

    def write(
        self,
        pairs: Sequence[Pair],
        puts: Sequence[Put],
        drops: Iterable[bytes],
        hints: Iterable[tuple[bytes, Hint]] = (),
    ) -> None:
        self._journal.append((), drops)
        faults.strike("disk.write")
        self._file.write(self._ranges(pairs))
        faults.strike("disk.publish")
        self._journal.append(puts, hints=hints)

    def write_state(self, source: HostItem, put: StatePut, drops: Iterable[bytes]) -> None:
        assert self._state_file is not None
        self._journal.append((), drops)
        faults.strike("disk.write")
        self._state_file.write(self._state_ranges(put.slot, source))
        faults.strike("disk.publish")
        self._journal.append(states=[put])

    def note(self, drops: Iterable[bytes], hints: Iterable[tuple[bytes, Hint]]) -> None:
        self._journal.append((), drops, hints=hints)

    def read(self, pairs: Sequence[Pair], sums: Sequence[Sums]) -> int:
        faults.strike("disk.read")
        self._file.read(self._ranges(pairs))
        found = self._mover.sums(True, [host for _, host in pairs])
        return next((i for i, (a, b) in enumerate(zip(found, sums, strict=True)) if a != b), len(pairs))

    def read_state(self, slot: int, target: HostItem, slot_sums: Sums, page_sums: Sums) -> bool:
        assert self._state_file is not None
        faults.strike("disk.read")
        self._state_file.read(self._state_ranges(slot, target))
        whole = self._mover.sums(False, [target.slot]) == [slot_sums]
        return whole and (not target.page or self._mover.sums(True, [target.page]) == [page_sums])

    def close(self) -> None:
        self._file.close()
        if self._state_file is not None:
            self._state_file.close()
        self._journal.close()
        self._folder.close()

    def _ranges(self, pairs: Sequence[Pair]) -> list[tuple[int, int, int]]:
        table = []
        for slot, host in pairs:
            table += _laid_out(self._mover.host_ranges(True, host), slot * self._page_bytes)
        return table

    def _state_ranges(self, slot: int, item: HostItem) -> list[tuple[int, int, int]]:
        partial = self._mover.host_ranges(True, item.page) if item.page else []
        return _laid_out([*self._mover.host_ranges(False, item.slot), *partial], slot * self.place_bytes)


def _laid_out(parts: Sequence[tuple[int, int]], offset: int) -> list[tuple[int, int, int]]:
    """One behind the other: (address, bytes, offset in the file)."""
    table = []
    for address, size in parts:
        table.append((address, size, offset))
        offset += size
    return table


def _usable(found: Found, count: int, states: int) -> Found:
    """Pages whose parents are here up to the first one, and states whose pages are; each slot once. Nothing else could
    ever be found."""
    kept, slots = Found(), set[int]()
    for put in sorted(found.puts.values(), key=lambda p: p.depth):
        known = put.parent is None or put.parent in kept.puts
        if known and 0 < put.slot <= count and put.slot not in slots:
            kept.puts[put.key] = put
            slots.add(put.slot)
    slots = set()
    for state in found.states.values():
        under = kept.puts.get(state.key)
        fits = under is not None and (under.depth + 1) * PAGE_TOKENS + len(state.tail) == state.length
        if fits and 0 < state.slot <= states and state.slot not in slots:
            kept.states[state.name] = state
            slots.add(state.slot)
    kept.hints = found.hints_of(kept.puts, kept.states)
    return kept


class Folder:
    """The first numbered folder under `base` that no running process has: a worker that starts again finds its own."""

    def __init__(self, base: Path) -> None:
        for number in range(FOLDERS):
            self.path = base / str(number)
            self.path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                os.close(self._fd)
        raise InvalidRequest("every folder of the disk tier is in use", field="disk_pool_dir", limit=str(FOLDERS))

    def close(self) -> None:
        os.close(self._fd)
