"""The oracle tells by its tokens whether every byte it reads is the right one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.models.oracle import OracleRunner, sample
from engine.plan import Copy, Row, SampleSpec, SamplingParams, StepPlan
from tests.unit.engine_core.lab import VOCAB, prompt, view


def step(runner: OracleRunner, *rows: Row, copies: tuple[Copy, ...] = ()) -> list[int]:
    result = runner.run(StepPlan(1, rows, copies))
    return [token for row in result.rows for token in row.tokens]


def row(tokens: tuple[int, ...], start: int = 0, pages: tuple[int, ...] = (1, 2, 3), slot: int = 0) -> Row:
    spec = SampleSpec(SamplingParams(), start + len(tokens), 0)
    return Row(7, tokens, start, pages, slot, (spec,))


def made(state: bool = False) -> OracleRunner:
    runner = OracleRunner(VOCAB, state=state)
    runner.allocate(8, 4 if state else 0)
    return runner


def test_chunks_and_pages_do_not_matter_and_content_does() -> None:
    tokens = prompt(40)
    whole = step(made(), row(tokens))
    parts = made()
    step(parts, row(tokens[:16], pages=(5,)))
    assert step(parts, row(tokens[16:], 16, pages=(5, 2, 7))) == whole
    assert step(made(), row((*tokens[:5], 1, *tokens[6:]))) != whole


@pytest.mark.parametrize("page", [1, 2, 3])
@pytest.mark.parametrize("byte", [0, 700, 2047])
def test_any_changed_byte_of_a_valid_token_changes_the_next_token(page: int, byte: int) -> None:
    tokens = prompt(48)
    runner = made()
    step(runner, row(tokens[:47]))
    view(runner.regions()[0])[page, byte] ^= 1
    if page == 3 and byte == 2047:  # of the token that is run only now
        assert step(runner, row(tokens[47:], 47)) == step(made(), row(tokens))
    else:
        assert step(runner, row(tokens[47:], 47)) != step(made(), row(tokens))


def test_the_state_counts_and_begins_from_nothing_whatever_the_slot_held() -> None:
    tokens = prompt(20)
    runner = made(state=True)
    clean = step(runner, row(tokens, slot=2))
    assert step(runner, row(tokens, slot=2)) == clean
    step(runner, row(tokens[:19], slot=3))
    view(runner.regions()[1])[3, 5] ^= 1
    assert step(runner, row(tokens[19:], 19, slot=3)) != clean


def test_copies_come_before_the_rows() -> None:
    tokens = prompt(20)
    runner = made()
    step(runner, row(tokens[:19], pages=(1, 2)))
    copy = Copy(True, 2, 4)
    assert step(runner, row(tokens[19:], 19, pages=(1, 4)), copies=(copy,)) == step(made(), row(tokens))


def test_a_page_is_laid_out_unit_by_unit() -> None:
    """[page, unit, layer, row, token, digest]: any share of units is one contiguous range."""
    runner = made()
    step(runner, row(prompt(16), pages=(1,)))
    region, component = runner.regions()[0], runner.spec().components[0]
    assert region.stride == component.item_bytes == runner.spec().page_bytes
    page = view(region)[1].reshape(component.units, component.layers, component.rows, component.tokens, -1)
    assert len({page[u, layer, 0, t].tobytes() for u in range(2) for layer in range(2) for t in range(16)}) == 64


LOGITS = np.linspace(0.0, 16.0, VOCAB)


def spec(position: int = 10, choice: int = 0, **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), position, choice)


def test_every_sampling_field_is_honoured() -> None:
    top = VOCAB - 1
    assert sample(LOGITS, spec())[0] == top
    assert sample(LOGITS, spec(logit_bias=((3, 100.0),)))[0] == 3
    assert sample(LOGITS, SampleSpec(SamplingParams(), 1, 0, banned=(top,)))[0] == top - 1
    heavy = SamplingParams(repetition_penalty=2.0)
    assert sample(LOGITS, SampleSpec(heavy, 1, 0, prompt=(top,)))[0] == top - 1
    assert sample(LOGITS, SampleSpec(SamplingParams(presence_penalty=2.0), 1, 0, output=(top,)))[0] == top - 1
    twice = SamplingParams(frequency_penalty=0.1)
    assert sample(LOGITS, SampleSpec(twice, 1, 0, output=(top, top)))[0] == top - 1

    def drawn(**params: Any) -> set[int]:
        return {sample(LOGITS, spec(p, temperature=2.0, **params))[0] for p in range(300)}

    assert len(drawn()) > 10
    assert drawn(top_k=2) == {top, top - 1}
    assert drawn(top_p=1e-6) == {top}
    assert drawn(min_p=0.99) == {top}


def test_noise_depends_on_seed_choice_and_position_only() -> None:
    def draw(**changes: int) -> list[int]:
        seed = changes.pop("seed", 1)
        return [sample(LOGITS, spec(p, seed=seed, temperature=5.0, **changes))[0] for p in range(30)]

    assert draw() == draw()
    assert draw() != draw(seed=2)
    assert draw() != draw(choice=1)


def test_log_probabilities_are_of_the_model_not_of_the_sampler() -> None:
    token, logprob = sample(LOGITS, spec(logit_bias=((3, 100.0),), logprobs=True, top_logprobs=2))
    assert logprob is not None
    assert (token, logprob.token, logprob.rank) == (3, 3, VOCAB - 3)
    exact = LOGITS - np.log(np.exp(LOGITS).sum())
    assert logprob.logprob == pytest.approx(exact[3])
    assert [t for t, _ in logprob.top] == [VOCAB - 1, VOCAB - 2]
    assert logprob.top[0][1] == pytest.approx(exact[-1])
