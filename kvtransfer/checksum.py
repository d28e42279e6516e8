"""wsum64-v1: the value that tells a right page from a wrong, torn, stale or shuffled one.

Definition, for one unit of one item (layout [layers, rows, tokens, token_bytes], contiguous) with v valid tokens:
bytes of tokens >= v count as zero, the unit is padded with zeros to a multiple of 8 and read as little-endian 64-bit
words x[i]; the value is sum(x[i] * w[i]) mod 2**64 with w[i] = splitmix64(i) | 1.
Weights are odd, so any change within one word is seen; they are pseudo-random, so swapped words, rows, heads or pages
are seen too. It is a guard against faults, not against an adversary.

Runs on an executor thread: numpy releases the GIL in the loops.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvtransfer.types import Component, Region

GATHER_BYTES = 1 << 20
"""Scattered items are gathered into blocks of about this size: below it the cost per numpy call shows."""

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


@lru_cache(maxsize=32)
def weights(words: int) -> U64:
    """[words] uint64, odd: splitmix64 of the position."""
    with np.errstate(over="ignore"):
        z = (np.arange(words, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    z.flags.writeable = False
    return z


def memory(region: Region) -> U8:
    """[length] uint8 over the region's memory, no copy. Host memory of this process only."""
    assert region.memory == "DRAM"
    pointer = ctypes.cast(region.base, ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(pointer, (region.length,))


def wsum64(region: Region, component: Component, items: tuple[int, ...], valid: tuple[int, ...]) -> list[int]:
    """Checksums [item][unit], flattened. valid[i]: valid tokens of items[i] (component.tokens = all of them)."""
    assert len(items) == len(valid)
    assert all(0 < v <= component.tokens for v in valid)
    span = region.units * component.unit_bytes
    rows = np.lib.stride_tricks.as_strided(
        memory(region), (region.length // region.stride, span), (region.stride, 1), writeable=False
    )
    out = np.empty((len(items), region.units), np.uint64)
    full = [i for i, v in enumerate(valid) if v == component.tokens]
    for at, block in _blocks(rows, full, items, span):
        out[at] = _whole(block, component, region.units)
    for i in set(range(len(items))).difference(full):
        out[i] = _partial(rows[items[i]], component, region.units, valid[i])
    return [int(x) for x in out.ravel()]


def _blocks(rows: U8, wanted: Sequence[int], items: Sequence[int], span: int) -> Iterator[tuple[list[int], U8]]:
    """(positions in items, their bytes [n, span]): neighbours without a copy, scattered small items gathered."""
    runs = list(_neighbours(wanted, items))
    if span * len(wanted) >= len(runs) * (GATHER_BYTES // 8):
        for run in runs:
            first = items[run[0]]
            yield run, rows[first : first + len(run)]
        return
    step = max(1, GATHER_BYTES // span)
    for start in range(0, len(wanted), step):
        part = list(wanted[start : start + step])
        yield part, rows[[items[i] for i in part]]


def _neighbours(wanted: Iterable[int], items: Sequence[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for i in wanted:
        if run and items[i] != items[run[-1]] + 1:
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def _whole(block: U8, component: Component, units: int) -> U64:
    """[n, units] of items whose tokens are all valid."""
    size = component.unit_bytes
    if size % 8 or block.strides[0] % 8 or block.ctypes.data % 8:
        return _sum(_padded(block.reshape(len(block), units, size)))
    words = np.lib.stride_tricks.as_strided(
        block, (len(block), units, size), (block.strides[0], size, 1), writeable=False
    ).view(np.uint64)
    return _sum(words)


def _partial(item: U8, component: Component, units: int, valid: int) -> U64:
    """[units] of one item: a copy with the other tokens' bytes zeroed, at most one item per request."""
    shape = (units, component.layers * component.rows, component.tokens, component.token_bytes)
    kept = item.reshape(shape).copy()
    kept[:, :, valid:] = 0
    (sums,) = _sum(_padded(kept.reshape(1, units, component.unit_bytes)))
    return np.asarray(sums)


def _padded(units: U8) -> U64:
    """[n, units, bytes] as words [n, units, ceil(bytes / 8)], zeros at the end."""
    size = units.shape[-1]
    padded = np.zeros((*units.shape[:-1], -(-size // 8) * 8), np.uint8)
    padded[..., :size] = units
    return padded.view(np.uint64)


def _sum(words: U64) -> U64:
    result: U64 = np.einsum("nuw,w->nu", words, weights(words.shape[-1]))
    return result
