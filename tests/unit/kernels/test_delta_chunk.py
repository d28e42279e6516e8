"""Chunk prefill against float64 recurrences, and its exactness promises."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.delta_chunk import delta_chunk
from engine.kernels.delta_chunk_plan import Checkpoint, ChunkPlan

from .naive import joined, make_case, naive, pool, relative

KINDS = ["kda", "bounded", "extreme", "gdn", "mamba2"]
SPLITS = [1, 15, 16, 17, 63, 64, 100, 255]


def shape_of(kind: str) -> dict[str, int]:
    """GDN with two value heads a q/k head, Mamba2 with two groups of two heads and K != V."""
    return {"gdn": {"group": 2}, "mamba2": {"group": 2, "K": 32, "V": 16}}.get(kind, {})


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_equals_the_recurrence(kind: str, seed: int) -> None:
    case = make_case(seed, 70, kind, **shape_of(kind))
    want, states = naive(case)
    whole, state = pool(3, *states[0].shape)
    out = delta_chunk(*case.tensors, state, ChunkPlan.build([70], [0], [2]), **case.flags)
    assert relative(out, want) <= 1e-5
    assert relative(state[2], states[-1]) <= 1e-5
    assert (whole[:, :, 0] == pool(3, *states[0].shape)[0][:, :, 0]).all(), "another layer was written"
    assert (whole[0] == 0).all()
    assert (state[1] == 7.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prefill_with_slabs_equals_the_recurrence(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.delta_chunk.SLAB_ROWS", 96)
    case = make_case(4, 300, kind, **shape_of(kind))
    want, states = naive(case)
    _, state = pool(2, *states[0].shape)
    out = delta_chunk(*case.tensors, state, ChunkPlan.build([300], [0], [1]), **case.flags)
    assert relative(out, want) <= 1e-5
    assert relative(state[1], states[-1]) <= 1e-5


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["kda", "gdn", "mamba2"])
def test_a_split_prefill_equals_the_recurrence(kind: str, split: int) -> None:
    case = make_case(split, 270, kind, **shape_of(kind))
    want, states = naive(case)
    _, state = pool(2, *states[0].shape)
    head = delta_chunk(*case.part(0, split).tensors, state, ChunkPlan.build([split], [0], [1]), **case.flags)
    rest = ChunkPlan.build([270 - split], [1], [1], starts=[split])
    tail = delta_chunk(*case.part(split, 270).tensors, state, rest, **case.flags)
    assert relative(torch.cat((head, tail)), want) <= 1e-5
    assert relative(state[1], states[-1]) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_one_batch_do_not_see_each_other(kind: str) -> None:
    """Given sequences of many lengths, two of them resumed off the grid, in one batch with padding tokens behind,
    when each also runs alone, then outputs and states are equal bit for bit; padding returns zeros."""
    lengths, starts = [37, 1, 0, 64, 16, 5], [0, 3, 0, 9, 0, 0]
    cases = [make_case(i, n, kind, **shape_of(kind)) for i, n in enumerate(lengths)]
    for case in cases:
        case.skip = cases[0].skip
    shape = naive(cases[0])[1][0].shape
    whole, state = pool(14, *shape)
    state[7:13] = torch.randn(6, *shape, generator=torch.Generator().manual_seed(1))
    initial = [7, 8, 9, 10, 11, 0]
    before = whole.clone()
    pad = make_case(99, 4, kind, **shape_of(kind))
    packed = joined([*cases, pad])
    out = delta_chunk(*packed, state, ChunkPlan.build(lengths, initial, [1, 2, 3, 4, 5, 6], starts), **cases[0].flags)
    assert (out[sum(lengths) :] == 0).all()
    at = 0
    for i, case in enumerate(cases):
        alone = before.clone().select(2, 1)
        plan = ChunkPlan.build([lengths[i]], [initial[i]], [1 + i], [starts[i]])
        single = delta_chunk(*case.tensors, alone, plan, **case.flags)
        assert torch.equal(out[at : at + lengths[i]], single)
        assert torch.equal(state[1 + i], alone[1 + i])
        want, _ = naive(case, alone[initial[i]] if initial[i] else None)
        assert relative(single, want) <= 1e-5
        at += lengths[i]
    assert torch.equal(whole[7:], before[7:])
    assert torch.equal(whole[0], before[0])


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("kind", ["kda", "gdn", "mamba2"])
def test_batch_and_slab_sizes_leave_every_bit_alone_at_real_head_sizes(
    kind: str, K: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [130, 16, 49]
    cases = [make_case(i, n, kind, heads=heads, K=K, V=K) for i, n in enumerate(lengths)]
    for case in cases:
        case.skip = cases[0].skip
    _, state = pool(4, *naive(cases[0].part(0, 1))[1][0].shape)
    out = delta_chunk(*joined(cases), state, ChunkPlan.build(lengths, [0, 0, 0], [1, 2, 3]), **cases[0].flags)
    at = 0
    for i, case in enumerate(cases):
        for slab in (16, 2048):
            monkeypatch.setattr("engine.kernels.delta_chunk.SLAB_ROWS", slab)
            _, alone = pool(2, *state.shape[1:])
            single = delta_chunk(*case.tensors, alone, ChunkPlan.build([lengths[i]], [0], [1]), **case.flags)
            assert torch.equal(out[at : at + lengths[i]], single)
            assert torch.equal(state[1 + i], alone[1])
        at += lengths[i]


@pytest.mark.parametrize("kind", KINDS)
def test_an_interior_checkpoint_is_the_state_of_a_prefill_stopped_there(kind: str) -> None:
    case = make_case(3, 150, kind, **shape_of(kind))
    shape = naive(case.part(0, 1))[1][0].shape
    _, state = pool(8, *shape)
    points = [Checkpoint(0, 16, 2), Checkpoint(0, 128, 3), Checkpoint(0, 144, 4)]
    delta_chunk(*case.tensors, state, ChunkPlan.build([150], [0], [1], checkpoints=points), **case.flags)
    for point in points:
        _, stopped = pool(8, *shape)
        short = case.part(0, point.offset)
        delta_chunk(*short.tensors, stopped, ChunkPlan.build([point.offset], [0], [1]), **case.flags)
        assert torch.equal(state[point.slot], stopped[1])


def test_a_checkpoint_after_a_resume_lies_on_the_absolute_grid() -> None:
    case = make_case(3, 40, "kda")
    _, states = naive(case)
    _, state = pool(4, *states[0].shape)
    plan = ChunkPlan.build([35], [0], [1], starts=[5], checkpoints=[Checkpoint(0, 11, 2), Checkpoint(0, 27, 3)])
    delta_chunk(*case.part(5, 40).tensors, state, plan, **case.flags)
    _, want = naive(case.part(5, 40))
    assert relative(state[2], want[11]) <= 1e-5
    assert relative(state[3], want[27]) <= 1e-5
    with pytest.raises(AssertionError, match="grid"):
        ChunkPlan.build([35], [0], [1], starts=[5], checkpoints=[Checkpoint(0, 16, 2)])


def test_equal_keys_without_decay_stay_exact() -> None:
    """The case in which inverting I + L by powers of L loses four digits."""
    case = make_case(0, 64, "kda")
    case.k[:] = case.k[0]
    case.g.zero_()
    case.beta.fill_(1.0)
    want, states = naive(case)
    _, state = pool(2, *states[0].shape)
    out = delta_chunk(*case.tensors, state, ChunkPlan.build([64], [0], [1]), **case.flags)
    assert relative(out, want) <= 1e-5
    assert relative(state[1], states[-1]) <= 1e-5


def test_bf16_inputs_are_computed_in_fp32() -> None:
    case = make_case(0, 40, "kda")
    case.q, case.k, case.v = (x.bfloat16() for x in (case.q, case.k, case.v))
    want, states = naive(case)
    _, state = pool(2, *states[0].shape)
    out = delta_chunk(*case.tensors, state, ChunkPlan.build([40], [0], [1]), **case.flags)
    assert out.dtype == torch.bfloat16
    assert relative(out, want) <= 1e-2
    assert relative(state[1], states[-1]) <= 1e-5
