"""One of two processes. Rank r is source rank r (if r < tp_p) and destination rank r (if r < tp_d): its fake runner
fills the source's pools, the unit map says who sends which bytes to whom, and every rank confirms what it got.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from kvtransfer.mapping import Moves, moves, unit_reads
from kvtransfer.types import Component
from tests.integration.transfer.worker import KV, LATENT, STATE, Pool

SALT = 11
SOURCE_PAGES, READER_PAGES = [2, 3, 7], [5, 1, 4]
SHARED = Component("shared", True, 1, 2, 2, 16, 8, "bfloat16")
"""One KV head: fewer units than ranks, so it is replicated in a group."""


def main(port: int, rank: int) -> None:
    """Raises AssertionError when a byte is wrong, on the rank where it is."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for tp_p, tp_d in ((1, 2), (2, 1), (2, 2)):
        for component in (KV, STATE, LATENT, SHARED):
            hand_over(component, tp_p, tp_d, rank)
        confirmed = torch.ones(1)
        dist.all_reduce(confirmed)
        assert int(confirmed) == 2
        print(f"tp {tp_p} to {tp_d} confirmed by all", flush=True)
    dist.destroy_process_group()


def hand_over(component: Component, tp_p: int, tp_d: int, rank: int) -> None:
    """Every rank walks the same plan; those named in a read take part in it."""
    theirs, mine = (SOURCE_PAGES, READER_PAGES) if component.paged else ([1], [2])
    sources = [Pool.make(component, tp_p, r, 9, 1) for r in range(tp_p)]
    readers = [Pool.make(component, tp_d, r, 9, 1) for r in range(tp_d)]
    if rank < tp_p:
        for item in theirs:
            sources[rank].fill(SALT, item)
    for read in unit_reads(tp_p, tp_d, component):
        source, reader = sources[read.owner], readers[read.reader]
        table = moves(component, read, reader.region, mine, source.region, theirs)
        if rank == read.owner:
            packed = torch.from_numpy(np.concatenate(_views(source, table, remote=True)))
            if rank == read.reader:
                _scatter(reader, table, packed.numpy())
            else:
                dist.send(packed, read.reader)
        elif rank == read.reader:
            packed = torch.empty(table.nbytes, dtype=torch.uint8)
            dist.recv(packed, read.owner)
            _scatter(reader, table, packed.numpy())
    if rank < tp_d:
        for item, source_item in zip(mine, theirs, strict=True):
            expected = Pool.make(component, tp_d, rank, 9, 1)
            expected.fill(SALT, source_item)
            assert np.array_equal(readers[rank].array[item], expected.array[source_item]), component.name


def _views(pool: Pool, table: Moves, remote: bool) -> list[npt.NDArray[np.uint8]]:
    flat = pool.array.reshape(-1)
    rows = (table.remote if remote else table.local).tolist()
    return [flat[address - pool.region.base : address - pool.region.base + size] for address, size, _ in rows]


def _scatter(pool: Pool, table: Moves, packed: npt.NDArray[np.uint8]) -> None:
    at = 0
    for view in _views(pool, table, remote=False):
        view[:] = packed[at : at + len(view)]
        at += len(view)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
