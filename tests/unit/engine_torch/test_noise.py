"""The noise is fixed for ever: golden values, and the statistics that make it noise."""

from __future__ import annotations

import math

import pytest
import torch

from engine.noise import bits, gumbel, keys

IDS = torch.tensor([[0, 1, 2, 49151]])
GOLDEN = {
    (0, 0, 0): ((956087953, 595752380), (1312594413, 4287870943, 997425085, 2600319291)),
    (0, 0, 1): ((2529590368, 791848836), (3673121786, 2245987218, 2885078031, 3200227091)),
    (0, 1, 0): ((13008816, 1155905921), (934578314, 3677358386, 2387588305, 2035307488)),
    (1, 0, 0): ((1837991619, 2978611956), (3008545725, 2296377934, 3252152659, 2923939757)),
    (2**64 - 1, 3, 131071): ((826163856, 323122998), (4275740491, 337003787, 2382984262, 2228575575)),
    (1234567890123, 2, 77): ((3850170502, 3073844466), (498636248, 1152375232, 516123154, 1811720764)),
}


@pytest.mark.parametrize("event", GOLDEN)
def test_keys_and_bits_have_their_golden_values(event: tuple[int, int, int]) -> None:
    expected_keys, expected_bits = GOLDEN[event]
    assert keys(*event) == expected_keys
    assert tuple(bits([expected_keys], IDS)[0].tolist()) == expected_bits


def test_gumbel_has_its_golden_values_to_the_bit() -> None:
    got = [float(x).hex() for x in gumbel([keys(0, 0, 0)], IDS)[0]]
    assert got == ["-0x1.5c63fc0000000p-3", "0x1.99e81c0000000p+2", "-0x1.8388d20000000p-2", "0x1.610aa40000000p-1"]


def test_device_arithmetic_equals_plain_integers() -> None:
    """The multiplier taken minus 2^32 keeps the low 32 bits of the textbook hash."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    k0, k1 = keys(7, 0, 9)
    ids = torch.cat((torch.arange(4096), torch.arange(2**32 - 64, 2**32)))[None]
    assert bits([(k0, k1)], ids)[0].tolist() == [mix((mix(v ^ k0) + k1) % 2**32) for v in ids[0].tolist()]


def test_a_vocabulary_shard_and_a_batch_draw_the_same_noise() -> None:
    events = [keys(5, c, p) for c in range(2) for p in range(3)]
    whole = gumbel(events, torch.arange(1000)[None])
    shard = gumbel(events, torch.arange(600, 1000)[None])
    alone = gumbel(events[4:5], torch.arange(1000)[None])
    assert torch.equal(whole[:, 600:], shard)
    assert torch.equal(whole[4:5], alone)


@pytest.mark.parametrize("axis", ["ids", "positions", "seeds"])
def test_each_coordinate_gives_uniform_bits(axis: str) -> None:
    """Chi-square over 256 bins, 65,536 draws: within five deviations of its mean."""
    n = 65536
    if axis == "ids":
        drawn = bits([keys(1, 0, 1)], torch.arange(n)[None]).flatten()
    else:
        events = [keys(1, 0, i) if axis == "positions" else keys(i, 0, 1) for i in range(n)]
        drawn = bits(events, torch.tensor([[11]])).flatten()
    counts = torch.bincount(drawn >> 24, minlength=256).double()
    chi = float(((counts - n / 256) ** 2 / (n / 256)).sum())
    assert abs(chi - 255) < 5 * math.sqrt(2 * 255)


def test_neighbours_are_not_correlated() -> None:
    grid = gumbel([keys(3, 0, p) for p in range(256)], torch.arange(256)[None]).double()
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(float(correlation)) < 5 / math.sqrt(a.numel())
    assert abs(float(grid.mean()) - 0.5772) < 0.03
    assert abs(float(grid.var()) - math.pi**2 / 6) < 0.06
