"""What each sampling field does, in the order it does it, and that the batch never shows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.plan import SampleSpec, SamplingParams
from engine.sampler import BLOCK, Sampled, highest, sample

VOCAB = 40


def spec(position: int = 5, choice: int = 0, *, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (),
         banned: tuple[int, ...] = (), **params: Any) -> SampleSpec:  # fmt: skip
    return SampleSpec(SamplingParams(**params), position, choice, prompt, output, banned)


def logits_of(seed: int = 0, vocab: int = VOCAB, rows: int = 1, spread: float = 2.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, spread, (rows, vocab)).astype(np.float32))


def one(logits: torch.Tensor, s: SampleSpec) -> Sampled:
    return sample(logits, [0], [s])[0]


def frequencies(logits: torch.Tensor, draws: int, **params: Any) -> torch.Tensor:
    """Counts of tokens over so many positions, drawn in batches of 500."""
    counts = torch.zeros(logits.shape[1], dtype=torch.float64)
    params = {"temperature": 1.0, **params}
    for begin in range(0, draws, 500):
        specs = [spec(p, **params) for p in range(begin, begin + 500)]
        tokens = torch.tensor([s.token for s in sample(logits, [0] * 500, specs)])
        counts += torch.bincount(tokens, minlength=logits.shape[1])
    return counts


def reference(logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
              seed: int = 0) -> torch.Tensor:  # fmt: skip
    """The distribution by definition: temperature, then min_p, then top_k, then top_p over what is left."""
    del seed
    p = torch.softmax(logits[0].double() / temperature, -1)
    p[p < min_p * p.max()] = 0
    if top_k:
        p[p < p.sort(descending=True).values[top_k - 1]] = 0
    p = p / p.sum()
    values, ids = p.sort(descending=True)
    cut = ids[(values.cumsum(-1) - values) >= top_p]
    p[cut] = 0
    return p / p.sum()


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 8, "top_p": 0.7},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    {"top_p": 0.5, "min_p": 0.02},
    {"top_p": 1e-6},
    {"top_k": 1},
]


@pytest.mark.parametrize("params", CASES)
def test_tokens_follow_the_distribution(params: dict[str, Any]) -> None:
    """Chi-square over the support at 10,000 draws of a fixed seed; what is cut is never drawn."""
    logits, draws = logits_of(1), 10_000
    expected = reference(logits, **params) * draws
    counts = frequencies(logits, draws, seed=77, **params)
    assert counts[expected == 0].sum() == 0
    support = expected > 0
    freedom = int(support.sum()) - 1
    chi = float(((counts - expected)[support] ** 2 / expected[support]).sum())
    assert chi <= freedom + 5 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("params", [{"top_p": 0.97}, {"top_k": 1500}, {"min_p": 0.2}, {"top_k": 3000, "top_p": 0.9}])
def test_a_support_larger_than_the_first_candidates_is_not_cut_short(params: dict[str, Any]) -> None:
    logits, draws = logits_of(2, vocab=4000, spread=0.3), 4_000
    expected = reference(logits, **params)
    counts = frequencies(logits, draws, seed=5, **params)
    assert counts[expected == 0].sum() == 0
    assert int((expected > 0).sum()) > 1024
    order = expected.sort(descending=True).indices
    drawn, wanted = counts[order].view(40, 100).sum(1), expected[order].view(40, 100).sum(1) * draws
    chi = float(((drawn - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum())
    freedom = int((wanted > 0).sum()) - 1
    assert chi <= freedom + 5 * math.sqrt(2 * freedom)


def test_a_token_depends_on_seed_choice_and_position_and_on_no_neighbour() -> None:
    logits = logits_of(3, rows=6, vocab=3000)
    specs = [
        spec(7, seed=1, temperature=1.0),
        spec(8, seed=1, temperature=0.9, top_p=0.9),
        spec(7, 1, seed=1, temperature=1.0, top_k=50),
        spec(9, seed=2, temperature=1.2, top_p=0.999),
        spec(9),
        spec(
            9, seed=3, temperature=1.0, min_p=0.01, logprobs=True, top_logprobs=3, repetition_penalty=1.2, output=(4, 5)
        ),
    ]
    together = sample(logits, range(6), specs)
    alone = [sample(logits[i : i + 1], [0], [s])[0] for i, s in enumerate(specs)]
    backwards = sample(logits.flip(0), range(6), specs[::-1])[::-1]
    assert together == alone == backwards
    varied = {
        one(logits, spec(p, c, seed=s, temperature=1.0)).token for p in range(3) for c in range(3) for s in range(3)
    }
    assert len(varied) > 20


def test_choices_of_one_row_share_its_logits() -> None:
    logits = logits_of(4, rows=2, vocab=3000)
    specs = [spec(3, c, seed=9, temperature=1.0) for c in range(4)]
    got = sample(logits, [1] * 4, specs)
    assert got == [sample(logits[1:], [0], [s])[0] for s in specs]
    assert len({s.token for s in got}) > 1


def test_greedy_takes_the_first_of_equals() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 7):
            logits = torch.zeros(rows, 4096, dtype=dtype)
            logits[:, [900, 70, 3000]] = 2.0
            assert [s.token for s in sample(logits, range(rows), [spec()] * rows)] == [70] * rows


def test_penalties_act_as_defined() -> None:
    logits = torch.zeros(1, 6)
    logits[0] = torch.tensor([3.0, 2.9, -1.0, 2.0, 0.0, 0.0])
    assert one(logits, spec(repetition_penalty=1.1, prompt=(0,))).token == 1
    assert one(logits, spec(frequency_penalty=0.05, output=(0,))).token == 0
    assert one(logits, spec(frequency_penalty=0.06, output=(0, 0))).token == 1
    assert one(logits, spec(presence_penalty=0.2, output=(0,))).token == 1
    assert one(logits, spec(presence_penalty=0.2, prompt=(0,))).token == 0, "prompt tokens do not count as output"
    flipped = torch.tensor([[-1.0, -1.05]])
    assert one(flipped, spec(repetition_penalty=1.1, output=(0,))).token == 1, "a negative logit is multiplied"


def test_bias_and_bans_act_before_penalties_and_temperature() -> None:
    logits = logits_of(5)
    best = int(logits.argmax())
    assert one(logits, spec(banned=(best,))).token != best
    assert one(logits, spec(logit_bias=((3, 100.0),))).token == 3
    assert one(logits, spec(logit_bias=((best, -100.0),), seed=4, temperature=0.01)).token != best
    drawn = {one(logits, spec(p, temperature=5.0, banned=(best, 1, 2))).token for p in range(300)}
    assert not drawn & {best, 1, 2}
    tied = torch.tensor([[1.0, 1.9]])  # bias, then penalty: (1 + 1) / 1.05 > 1.9
    assert one(tied, spec(logit_bias=((0, 1.0),), repetition_penalty=1.05, output=(0,))).token == 0
    assert one(tied, spec(logit_bias=((0, 1.0),), repetition_penalty=1.06, output=(0,))).token == 1


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = logits_of(6)
    got = one(logits, spec(temperature=0.5, top_k=2, seed=1, logprobs=True, top_logprobs=4, logit_bias=((9, 50.0),)))
    expected = torch.log_softmax(logits[0].double(), -1)
    assert got.token == 9
    assert got.logprob is not None
    assert got.logprob.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    assert got.logprob.rank == int((expected > expected[9]).sum()) + 1
    order = expected.sort(descending=True)
    assert [t for t, _ in got.logprob.top] == order.indices[:4].tolist()
    assert [v for _, v in got.logprob.top] == pytest.approx(order.values[:4].tolist(), abs=1e-5)
    chosen_only = one(logits, spec(logprobs=True)).logprob
    assert chosen_only is not None
    assert chosen_only.top == ()
    assert chosen_only.rank == 1


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "logprobs": True}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_numbers_is_named_and_its_neighbours_are_untouched(
    bad: float, params: dict[str, Any]
) -> None:
    logits = logits_of(7, rows=3)
    clean = sample(logits, range(3), [spec(**params)] * 3)
    logits[1, 5] = bad
    got = sample(logits, range(3), [spec(**params)] * 3)
    assert [s.finite for s in got] == [True, False, True]
    assert (got[0], got[2]) == (clean[0], clean[2])


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 17])
def test_the_best_and_its_index_are_those_of_a_scan_from_the_left(count: int) -> None:
    """Few distinct values, so that ties within and across blocks are everywhere; infinities and NaN among them."""
    rng = np.random.default_rng(count)
    for pool in ([0.0, 1.0], [-math.inf, 0.0, -1.0], [math.inf, 2.0], [-math.inf], [math.nan, 1.0, math.inf]):
        rows = rng.choice(np.array(pool, np.float32), (8, count), p=_rare_first(len(pool)))
        best, at = highest(torch.from_numpy(rows))
        wanted = rows.argmax(-1)  # numpy's: the first of equal ones, NaN above all
        assert at.tolist() == wanted.tolist()
        np.testing.assert_array_equal(best.numpy(), rows[np.arange(8), wanted])


def _rare_first(count: int) -> list[float]:
    """Shares: the first value is rare, so that it lies in some block or other."""
    return [1.0] if count == 1 else [0.01] + [0.99 / (count - 1)] * (count - 1)
