"""ReplaySSM against plain decode: equal outputs, the exact state on demand, bit for bit at ring length 1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.delta_decode import delta_decode
from engine.kernels.replay import Ring, advance, flush_due, pre_decay_fits, replay_decode, replay_materialise

from .naive import Case, make_case, naive, pool, relative

KINDS: dict[str, dict[str, int]] = {
    "kda": {},
    "bounded": {},
    "extreme": {},
    "gdn": {"group": 2},
    "mamba2": {"group": 2, "K": 32, "V": 16},
}
STEPS = 40


def make_ring(slots: int, shape: torch.Size, length: int, scalar: bool, pre_decayed: bool) -> Ring:
    """Views of record components laid out [slot, unit, layer, L, width], holding stale records everywhere."""
    heads, V, K = shape
    k, u, g = (torch.full((slots, heads, 2, length, n), 3.0).select(2, 1) for n in (K, V, 1 if scalar else K))
    return Ring(k, u, g, pre_decayed)


def run(case: Case, length: int, pre_decayed: bool, rows: int = 2) -> tuple[list[Tensor], Tensor, Ring, Tensor]:
    """Both rows decode the same tokens from slots 1 and 2, flushing at different steps."""
    shape = naive(case.part(0, 1))[1][0].shape
    _, state = pool(5, *shape)
    state[1:3] = 0
    ring = make_ring(5, shape, length, case.g.dim() == 2, pre_decayed)
    slots = torch.tensor([1, 2])[:rows]
    cursor = torch.zeros(rows, dtype=torch.long)
    outs = []
    for t in range(len(case.q)):
        flush = flush_due(cursor, slots, torch.full((rows,), t), length)
        outs.append(replay_decode(*case.row(t, rows), state, ring, slots, cursor, flush, **case.flags))
        cursor = advance(cursor, flush, slots)
    return outs, state, ring, cursor


@pytest.mark.parametrize("length", [1, 2, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_decode_equals_the_recurrence_and_materialises_any_length(kind: str, length: int) -> None:
    case = make_case(5, STEPS, kind, **KINDS[kind])
    want, states = naive(case)
    outs, state, ring, cursor = run(case, length, pre_decay_fits(length, -5.0 if kind == "bounded" else None))
    for row in range(2):
        assert relative(torch.stack([o[row] for o in outs]), want) <= 1e-5
        held = int(cursor[row])
        before = state.clone()
        for count in range(held + 1):
            source, target = torch.tensor([1 + row]), torch.tensor([4])
            replay_materialise(state, ring, source, torch.tensor([count]), target)
            assert relative(state[4], states[STEPS - held + count]) <= 1e-5
        assert torch.equal(state[1 + row], before[1 + row]), "materialising changes nothing but its target"


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_of_one_record_is_plain_decode_bit_for_bit(kind: str) -> None:
    case = make_case(6, STEPS, kind, **KINDS[kind])
    outs, state, _, _ = run(case, 1, pre_decay_fits(1, -5.0))
    _, plain = pool(5, *state.shape[1:])
    plain[1] = 0
    for t in range(STEPS):
        single = delta_decode(*case.row(t), plain, torch.tensor([1]), **case.flags)
        assert torch.equal(outs[t][:1], single)
    assert torch.equal(state[1], plain[1])


def test_flushes_are_staggered_and_padding_writes_nothing() -> None:
    slots = torch.tensor([1, 2, 3, 0])
    cursor = torch.zeros(4, dtype=torch.long)
    flushes = []
    for t in range(24):
        flush = flush_due(cursor, slots, torch.full((4,), t), 8)
        flushes.append(flush[:3])
        cursor = advance(cursor, flush, slots)
        assert int(cursor.max()) <= 7
        assert int(cursor[3]) == 0
    later = torch.stack(flushes[8:])
    assert (later.sum(0) == 2).all(), "every request flushes once per ring"
    assert (later.sum(1) <= 1).all(), "no two requests flush in the same step"


def test_padding_rows_write_neither_state_nor_ring() -> None:
    case = make_case(1, 2, "kda")
    shape = naive(case)[1][0].shape
    whole, state = pool(3, *shape)
    ring = make_ring(3, shape, 4, False, False)
    zero = torch.zeros(2, dtype=torch.long)
    before = whole.clone()
    out = replay_decode(*case.tensors, state, ring, zero, zero, torch.tensor([True, False]), **case.flags)
    assert torch.isfinite(out).all()
    assert torch.equal(whole, before)
    assert all((t == 3.0).all() for t in (ring.k, ring.u, ring.g))


def test_only_a_bounded_gate_with_a_short_ring_is_pre_decayed() -> None:
    assert pre_decay_fits(16, -5.0)
    assert pre_decay_fits(17, -5.0)
    assert not pre_decay_fits(18, -5.0)
    assert not pre_decay_fits(2, None)
