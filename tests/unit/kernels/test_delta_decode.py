"""Decode, verify and commit against float64 recurrences and against each other."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.delta_chunk import delta_chunk
from engine.kernels.delta_chunk_plan import ChunkPlan
from engine.kernels.delta_decode import delta_commit, delta_decode, delta_verify

from .naive import joined, make_case, naive, pool, relative

KINDS: dict[str, dict[str, int]] = {
    "kda": {},
    "bounded": {},
    "extreme": {},
    "gdn": {"group": 2},
    "mamba2": {"group": 2, "K": 32, "V": 16},
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_after_a_prefill_equals_a_longer_prefill(kind: str, seed: int) -> None:
    case = make_case(seed, 60, kind, **KINDS[kind])
    want, states = naive(case)
    whole, state = pool(4, *states[0].shape)
    head = delta_chunk(*case.part(0, 41).tensors, state, ChunkPlan.build([41], [0], [3]), **case.flags)
    slots = torch.tensor([3])
    tail = [delta_decode(*case.row(t), state, slots, **case.flags) for t in range(41, 60)]
    assert relative(torch.cat((head, *tail)), want) <= 1e-5
    assert relative(state[3], states[-1]) <= 1e-5
    assert (whole[:, :, 2] == pool(4, *states[0].shape)[0][:, :, 2]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch_and_padding_touches_nothing(kind: str) -> None:
    case = make_case(7, 4, kind, **KINDS[kind])
    shape = naive(case)[1][0].shape
    whole, state = pool(6, *shape)
    whole[1:] = torch.randn(whole[1:].shape, generator=torch.Generator().manual_seed(2))
    before = whole.clone()
    out = delta_decode(*case.tensors, state, torch.tensor([5, 0, 2, 0]), **case.flags)
    assert torch.isfinite(out).all()
    for row, slot in ((0, 5), (2, 2)):
        alone = before.clone().select(2, 1)
        single = delta_decode(*case.part(row, row + 1).tensors, alone, torch.tensor([slot]), **case.flags)
        assert torch.equal(out[row : row + 1], single)
        assert torch.equal(state[slot], alone[slot])
    changed = (whole != before).flatten(1).any(1)
    assert changed.tolist() == [False, False, True, False, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_verified_rows_equal_decoded_ones_and_commits_fold_them(kind: str) -> None:
    rows = 4
    cases = [make_case(i, rows, kind, **KINDS[kind]) for i in range(2)]
    cases[1].skip = cases[0].skip
    shape = naive(cases[0])[1][0].shape
    _, state = pool(6, *shape)
    state[1:3] = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3)) * 0.1
    start = state.clone()
    slots = torch.tensor([2, 1])
    packed = joined(cases, stack=True)
    out, kept = delta_verify(*packed, state, slots, **cases[0].flags)
    assert torch.equal(state, start), "verify only reads"
    for counts in ([0, rows], [1, 3], [2, 2]):
        trial = start.clone()
        delta_commit(kept, torch.tensor(counts), trial, slots, torch.tensor([4, 1]))
        assert torch.equal(trial[2], start[2]), "a commit to another slot leaves its source"
        for b, target in ((0, 4), (1, 1)):
            plain = start.clone()
            for t in range(counts[b]):
                single = delta_decode(*cases[b].row(t), plain, slots[b : b + 1], **cases[b].flags)
                assert torch.equal(out[b, t], single[0])
            assert torch.equal(trial[target], plain[slots[b]])
