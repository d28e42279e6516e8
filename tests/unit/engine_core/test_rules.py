"""The rules that need no engine: chunk grid, usable hits, finish, what a sampler is told."""

from __future__ import annotations

import dataclasses
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan import SamplingParams, StepPlan, StepResult
from engine.reservations import needed_pages
from engine.sequence import LENGTH, STOP, accept, chunk_end, sample_spec, usable_hit

STOPPER = 9
SAMPLING = SamplingParams(max_tokens=5, stop_token_ids=(STOPPER,))


@pytest.mark.parametrize(("start", "end", "expected"), [
    (0, 2000, 512),
    (512, 2000, 1024),
    (1536, 2000, 2000),
    (0, 10, 10),
    (16, 2000, 512),
    (500, 2000, 512),
    (501, 503, 503),
    (17, 2000, 32),
    (1023, 1024, 1024),
])  # fmt: skip
def test_chunks_end_on_the_absolute_grid_and_a_start_off_the_page_grid_first_meets_it(
    start: int, end: int, expected: int
) -> None:
    assert chunk_end(start, end, 512) == expected


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_a_prompt_is_run_in_the_same_chunks_wherever_it_resumes_on_the_grid(start: int, length: int) -> None:
    """Two runs that meet at a chunk border share every later one."""
    end = start + length

    def borders(at: int) -> list[int]:
        made = []
        while at < end:
            at = chunk_end(at, end, 256)
            made.append(at)
        return made

    assert borders(start)[-1] == end
    assert {b for b in borders(0) if b >= start + 272} <= set(borders(start))


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (49, 3)])
def test_at_least_one_token_of_a_fully_cached_prompt_is_left_to_run(length: int, pages: int) -> None:
    """Public report T142 (ai-dynamo/dynamo#13312)."""
    assert usable_hit(length) == pages
    assert length - 16 * pages >= 1


def test_a_stop_before_the_length_limit_wins() -> None:
    """Public report T070 (sgl-project/sglang#31599)."""
    assert accept([10, 11, STOPPER, 20, 21, 22], 7, 7, SAMPLING, 1000) == ((10, 11, STOPPER), STOP)


def test_a_stop_after_the_length_limit_does_not() -> None:
    """Public report T070 (sgl-project/sglang#31599)."""
    assert accept([10, 11, 12, 13, 14, STOPPER], 7, 7, SAMPLING, 1000) == ((10, 11, 12, 13, 14), LENGTH)


def test_a_stop_at_the_length_limit_is_a_stop() -> None:
    assert accept([10, 11, 12, 13, STOPPER], 7, 7, SAMPLING, 1000) == ((10, 11, 12, 13, STOPPER), STOP)


def test_max_tokens_counts_from_the_prompt_also_in_a_continuation() -> None:
    assert accept([10, 11, 12], known=10, prompt_len=7, sampling=SAMPLING, limit=1000) == ((10, 11), LENGTH)


def test_the_context_ends_a_choice_by_length() -> None:
    assert accept([10, 11, 12], 7, 7, SAMPLING, limit=9) == ((10, 11), LENGTH)


def test_a_stop_token_is_banned_below_min_tokens_and_means_nothing_there() -> None:
    sampling = SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=(STOPPER,))
    assert [sample_spec([1] * n, 3, sampling, 0).banned for n in (3, 4, 5)] == [(STOPPER,), (STOPPER,), ()]
    assert accept([STOPPER, STOPPER, STOPPER, 1], 3, 3, sampling, 1000) == ((STOPPER,) * 3, STOP)


def test_history_travels_only_when_a_penalty_looks_at_it() -> None:
    tokens = [1, 2, 3, 4, 5]
    plain = sample_spec(tokens, 3, SamplingParams(), 0)
    assert (plain.prompt, plain.output, plain.position) == ((), (), 5)
    counted = sample_spec(tokens, 3, SamplingParams(presence_penalty=1.0), 0)
    assert (counted.prompt, counted.output) == ((), (4, 5))
    repeated = sample_spec(tokens, 3, SamplingParams(repetition_penalty=1.2), 0)
    assert (repeated.prompt, repeated.output) == ((1, 2, 3), (4, 5))


@pytest.mark.parametrize(("tokens", "headroom", "choices", "pages"), [
    (16, 0, 1, 1),
    (17, 0, 1, 2),
    (20, 16, 1, 3),
    (20, 16, 3, 3 + 2 * 2),
    (32, 16, 2, 3 + 1),
    (32, 0, 4, 2),
])  # fmt: skip
def test_choices_share_full_pages_and_own_the_rest(tokens: int, headroom: int, choices: int, pages: int) -> None:
    assert needed_pages(tokens, headroom, choices) == pages


def plain(kind: Any) -> bool:
    """Whether values of a type are numbers, text, None, and tuples and frozen dataclasses of such."""
    if get_origin(kind) in (tuple, UnionType):
        return all(part is Ellipsis or plain(part) for part in get_args(kind))
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return vars(kind)["__dataclass_params__"].frozen and all(plain(hints[f.name]) for f in dataclasses.fields(kind))
    return kind in (bool, int, float, str, bytes, type(None))


@pytest.mark.parametrize("kind", [StepPlan, StepResult])
def test_what_crosses_the_step_contract_is_plain_and_could_go_to_another_process(kind: type) -> None:
    assert plain(kind)
    assert not plain(tuple[list[int], ...])
