"""In which order idle items of a pool are evicted: by rank, the lowest first, then the longest unused first."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator


class IdleOrder:
    """Items are pages or slots that nobody holds. An item keeps its rank while it is not idle, until it is forgotten;
    0 unless somebody says otherwise."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[int, None]] = {0: OrderedDict()}
        self._ranks = [0]  # of all queues there are, sorted
        self._rank_of: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, item: int) -> bool:
        return item in self._queues[self._rank_of.get(item, 0)]

    def __iter__(self) -> Iterator[int]:
        """The first to go first."""
        for rank in self._ranks:
            yield from self._queues[rank]

    def add(self, item: int) -> None:
        """It has become idle: the most recently used of its rank."""
        self._queues[self._rank_of.get(item, 0)][item] = None
        self._count += 1

    def remove(self, item: int) -> None:
        """It is not idle any more. Raises KeyError."""
        del self._queues[self._rank_of.get(item, 0)][item]
        self._count -= 1

    def to_front(self, item: int) -> None:
        """Of its rank: the longest unused."""
        self._queues[self._rank_of.get(item, 0)].move_to_end(item, last=False)

    def to_back(self, item: int) -> None:
        """Of its rank: the most recently used."""
        self._queues[self._rank_of.get(item, 0)].move_to_end(item)

    def rank(self, item: int, rank: int) -> None:
        """From now on. An idle item becomes the most recently used of its new rank."""
        if rank == self._rank_of.get(item, 0):
            return
        idle = item in self
        if idle:
            self.remove(item)
        if rank not in self._queues:
            self._queues[rank] = OrderedDict()
            bisect.insort(self._ranks, rank)
        if rank:
            self._rank_of[item] = rank
        else:
            del self._rank_of[item]
        if idle:
            self.add(item)

    def forget(self, item: int) -> None:
        """Its content is gone, and what was said of it."""
        self.rank(item, 0)
