"""Reads that wait together become few tables: nothing lost, nothing reordered, nobody told somebody else's bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.batches import BATCH_BYTES, batches
from kvtransfer.mapping import Moves
from kvtransfer.transport import Flight, ReadStats

Ask = tuple[str, str, list[int]]  # peer, its kind of memory, bytes of each range

ASKS = st.lists(
    st.tuples(
        st.sampled_from("pq"),
        st.sampled_from(("DRAM", "VRAM")),
        st.lists(st.integers(1, BATCH_BYTES // 2), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=12,
)


def flight(index: int, ask: Ask) -> Flight:
    """Addresses tell which read a row belongs to."""
    peer, memory, lengths = ask
    local = np.array([[index << 40 | row, length, 0] for row, length in enumerate(lengths)], np.uint64)
    remote = local + np.array([1 << 60, 0, 0], np.uint64)
    return Flight(peer, Moves(local, remote, "DRAM", memory), 0.0)


@settings(deadline=None)
@given(ASKS)
async def test_every_range_is_in_one_table_in_the_order_asked_for(asks: list[Ask]) -> None:
    flights = [flight(i, ask) for i, ask in enumerate(asks)]
    made = batches(flights)
    assert [f for b in made for f in b.flights] == flights
    for side in ("local", "remote"):
        asked = np.concatenate([getattr(f.moves, side) for f in flights])
        assert (np.concatenate([getattr(b, side) for b in made]) == asked).all()
    for b in made:
        assert len({(f.peer, f.moves.remote_memory) for f in b.flights}) == 1
        assert b.sizes == tuple(f.moves.nbytes for f in b.flights)
        assert sum(b.sizes[:-1]) < BATCH_BYTES


@settings(deadline=None)
@given(ASKS)
async def test_neighbours_that_fit_are_together(asks: list[Ask]) -> None:
    made = batches([flight(i, ask) for i, ask in enumerate(asks)])
    for one, two in pairwise(made):
        places = {(f.peer, f.moves.remote_memory) for b in (one, two) for f in b.flights}
        assert one.nbytes >= BATCH_BYTES or len(places) == 2


async def test_each_read_is_told_its_own_bytes_and_its_share_of_the_time() -> None:
    (batch,) = batches([flight(0, ("p", "DRAM", [100, 200])), flight(1, ("p", "DRAM", [300]))])
    batch.succeed(ReadStats(600, 3, 6.0))
    assert [f.result.result() for f in batch.flights] == [ReadStats(300, 2, 3.0), ReadStats(300, 1, 3.0)]
    assert all(f.quiet.done() for f in batch.flights)


async def test_a_read_alone_is_told_what_the_transport_counted_even_if_that_is_not_what_was_asked() -> None:
    (batch,) = batches([flight(0, ("p", "DRAM", [100]))])
    batch.succeed(ReadStats(99, 1, 1.0))
    assert batch.flights[0].result.result() == ReadStats(99, 1, 1.0)
