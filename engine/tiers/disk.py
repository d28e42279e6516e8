"""The disk tier's file and index, for the tier's own thread; and the folder that is one worker's.

Pages lie in one file, slot i at i times the size of a page, all components one behind the other. What may be read is
said by the journal. A file that has been cut, damaged or removed is a miss for the pages it lacks.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine.tiers.carriers import Pair
from engine.tiers.journal import Journal, Put
from engine.tiers.pool import Mover, Sums
from kvtransfer.files import BlockFile
from kvtransfer.types import Region
from runtime import faults
from runtime.errors import InvalidRequest

FOLDERS = 64
OpenFile = Callable[[Path, int, Sequence[Region]], BlockFile]


class Disk:
    """count: pages. layout: see Journal. Raises OSError, TransferFailed."""

    def __init__(self, folder: Folder, layout: str, count: int, mover: Mover, open_file: OpenFile) -> None:
        self._folder = folder
        self._mover = mover
        self._page_bytes = mover.item_bytes(True)
        self.count = count
        self._journal = Journal(folder.path / "index", layout, mover.units(True))
        self.puts = _closed({k: p for k, p in self._journal.puts.items() if 0 < p.slot <= count})
        self.torn = self._journal.torn
        lost = [key for key in self._journal.puts if key not in self.puts]
        if lost:
            self._journal.append((), lost)
        self._file = open_file(folder.path / "pages", (count + 1) * self._page_bytes, mover.host)

    def write(self, pairs: Sequence[Pair], puts: Sequence[Put], drops: Iterable[bytes]) -> None:
        """pairs: (file slot, host page). Dropped keys are forgotten first, the pages are published last."""
        self._journal.append((), drops)
        faults.strike("disk.write")
        self._file.write(self._ranges(pairs))
        faults.strike("disk.publish")
        self._journal.append(puts)

    def read(self, pairs: Sequence[Pair], sums: Sequence[Sums]) -> int:
        """How many leading pages are on the host now and are what was written. pairs: (file slot, host page)."""
        faults.strike("disk.read")
        self._file.read(self._ranges(pairs))
        found = self._mover.sums(True, [host for _, host in pairs])
        return next((i for i, (a, b) in enumerate(zip(found, sums, strict=True)) if a != b), len(pairs))

    def close(self) -> None:
        self._file.close()
        self._journal.close()
        self._folder.close()

    def _ranges(self, pairs: Sequence[Pair]) -> list[tuple[int, int, int]]:
        table = []
        for slot, host in pairs:
            offset = slot * self._page_bytes
            for address, size in self._mover.host_ranges(host):
                table.append((address, size, offset))
                offset += size
        return table


def _closed(puts: dict[bytes, Put]) -> dict[bytes, Put]:
    """Those whose parents are here up to the first page, each slot once: nothing else could ever be found."""
    kept: dict[bytes, Put] = {}
    slots: set[int] = set()
    for put in sorted(puts.values(), key=lambda p: p.depth):
        if (put.parent is None or put.parent in kept) and put.slot not in slots:
            kept[put.key] = put
            slots.add(put.slot)
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
