"""Reads that wait at the same moment share a post. Pure functions over tables.

Why: between two posts lie some 16 microseconds of descriptor lists, handles and queues, run with caches that the copy
before has emptied. For a hand-off of 1 MiB, which is copied in 70, that is a fifth of the bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

import numpy as np

from kvtransfer.mapping import U64
from kvtransfer.transport import Flight, ReadStats

BATCH_BYTES = 8 << 20
"""A batch takes no further read from here on: its reads are answered together, so that none should wait for long, and
verifying what has arrived should overlap with what comes next. Over shared memory this is under a millisecond."""


@dataclass(slots=True, eq=False)
class Batch:
    """Reads from one peer between one pair of memory kinds, as one table. sizes: bytes of each."""

    flights: tuple[Flight, ...]
    sizes: tuple[int, ...]
    local: U64
    remote: U64

    @classmethod
    def of(cls, flight: Flight) -> Batch:
        """One read by itself."""
        moves = flight.moves
        return cls((flight,), (moves.nbytes,), moves.local, moves.remote)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def succeed(self, total: ReadStats) -> None:
        """total: as the transport counted, the same bytes as ours where there are several reads. Each is told its own
        bytes and ranges, and its share of the time."""
        if len(self.flights) == 1:
            self.flights[0].succeed(total)
            return
        per_byte = total.seconds / self.nbytes
        for flight, size in zip(self.flights, self.sizes, strict=True):
            flight.succeed(ReadStats(size, len(flight.moves), per_byte * size))


def batches(flights: Sequence[Flight]) -> list[Batch]:
    """In the order asked for: neighbours that go between the same places, up to BATCH_BYTES each."""
    found: list[Batch] = []
    first = 0
    for i in range(1, len(flights) + 1):
        if i == len(flights) or _places(flights[i]) != _places(flights[first]):
            found += _cut(flights[first:i])
            first = i
    return found


_places = attrgetter("peer", "moves.local_memory", "moves.remote_memory")


def _cut(flights: Sequence[Flight]) -> list[Batch]:
    """All rows in one table, which the batches are slices of."""
    tables = [flight.moves.local for flight in flights]
    if len(tables) == 1:
        return [Batch.of(flights[0])]
    local, remote = np.concatenate(tables), np.concatenate([flight.moves.remote for flight in flights])
    rows = [0, *accumulate(map(len, tables))]
    sizes = tuple(flight.moves.nbytes for flight in flights)
    found, first, filled = [], 0, 0
    for i, size in enumerate(sizes, 1):
        filled += size
        if filled >= BATCH_BYTES or i == len(sizes):
            table = slice(rows[first], rows[i])
            found.append(Batch(tuple(flights[first:i]), sizes[first:i], local[table], remote[table]))
            first, filled = i, 0
    return found
