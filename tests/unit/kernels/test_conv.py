"""The causal convolution against a token-by-token one, over slots laid out as in a worker."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.conv import conv_commit, conv_decode, conv_prefill, conv_verify
from engine.kernels.delta_chunk_plan import Checkpoint, ChunkPlan

from .naive import relative

UNITS, CHANNELS, WIDTH, DRAFT = 3, 4, 4, 2
C = UNITS * CHANNELS


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def conv_pool(slots: int = 6) -> tuple[Tensor, Tensor]:
    whole = torch.full((slots, UNITS, 3, CHANNELS, WIDTH - 1 + DRAFT), 7.0)
    whole[0] = 0
    return whole, whole.select(2, 1)


def naive_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, C] with zeros before it, float64."""
    padded = torch.cat((x.new_zeros(WIDTH - 1, C), x)).double()
    rows = [(padded[t : t + WIDTH].t() * weight.double()).sum(-1) for t in range(len(x))]
    y = torch.stack(rows) if rows else x.double()
    y = y if bias is None else y + bias.double()
    return y * torch.sigmoid(y)


def window(state: Tensor, slot: int) -> Tensor:
    return state[slot, :, :, : WIDTH - 1].reshape(C, WIDTH - 1).t()


@pytest.mark.parametrize("bias", [None, draw(C, seed=9)])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 17, 40])
def test_a_prefill_equals_the_naive_convolution_and_keeps_the_last_inputs(length: int, bias: Tensor | None) -> None:
    x, weight = draw(length, C), draw(C, WIDTH, seed=1) * 5
    whole, state = conv_pool()
    y = conv_prefill(x, weight, bias, state, ChunkPlan.build([length], [0], [2]))
    assert relative(y, naive_conv(x, weight, bias)) <= 1e-5
    if length:
        assert torch.equal(window(state, 2), torch.cat((torch.zeros(3, C), x))[-3:])
    assert (whole[:, :, 0] == conv_pool()[0][:, :, 0]).all()
    assert (whole[0] == 0).all()


@pytest.mark.parametrize("split", [1, 2, 3, 4, 15, 16, 17])
def test_a_split_prefill_and_decode_equal_one_prefill(split: int) -> None:
    x, weight = draw(30, C), draw(C, WIDTH, seed=1) * 5
    want = naive_conv(x, weight, None)
    _, state = conv_pool()
    head = conv_prefill(x[:split], weight, None, state, ChunkPlan.build([split], [0], [1]))
    tail = conv_prefill(x[split:26], weight, None, state, ChunkPlan.build([26 - split], [1], [1], [split]))
    rest = [conv_decode(x[t : t + 1], weight, None, state, torch.tensor([1])) for t in range(26, 30)]
    assert relative(torch.cat((head, tail, *rest)), want) <= 1e-5
    assert torch.equal(window(state, 1), x[27:])


def test_a_batch_with_empty_sequences_checkpoints_and_padding() -> None:
    lengths = [20, 0, 2]
    x, weight = draw(25, C), draw(C, WIDTH, seed=1) * 5
    _, state = conv_pool()
    state[4] = draw(UNITS, CHANNELS, WIDTH - 1 + DRAFT, seed=3)
    kept = state[4].clone()
    plan = ChunkPlan.build(lengths, [0, 4, 4], [1, 4, 2], checkpoints=[Checkpoint(0, 16, 3)])
    y = conv_prefill(x, weight, None, state, plan)
    assert relative(y[:20], naive_conv(x[:20], weight, None)) <= 1e-5
    before = kept[:, :, : WIDTH - 1].reshape(C, -1).t()
    joined = torch.cat((before, x[20:22]))
    assert relative(y[20:22], naive_conv(joined, weight, None)[3:]) <= 1e-5
    assert (y[22:] == 0).all()
    assert torch.equal(window(state, 3), x[13:16])
    assert torch.equal(window(state, 2), joined[-3:])
    assert torch.equal(state[4], kept)


def test_padding_rows_of_a_decode_leave_the_null_slot_zero() -> None:
    whole, state = conv_pool()
    before = whole.clone()
    conv_decode(draw(3, C), draw(C, WIDTH), None, state, torch.tensor([2, 0, 0]))
    assert (whole[0] == 0).all()
    changed = (whole != before).flatten(1).any(1)
    assert changed.tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_commit_of_verified_rows_equals_decoding_them(count: int) -> None:
    x, weight = draw(2, 3, C), draw(C, WIDTH, seed=1) * 5
    _, state = conv_pool()
    state[1:3] = draw(2, UNITS, CHANNELS, WIDTH - 1 + DRAFT, seed=5)
    _, plain = conv_pool()
    plain[1:3] = state[1:3]
    slots = torch.tensor([2, 1])
    y = conv_verify(x, weight, None, state, slots)
    conv_commit(state, slots, torch.tensor([count, count]), width=WIDTH)
    for t in range(3):
        want = conv_decode(x[:, t], weight, None, plain, slots) if t < count else None
        if want is not None:
            assert relative(y[:, t], want) <= 1e-6
    for slot in (1, 2):
        assert torch.equal(window(state, slot), window(plain, slot))
