"""An answer as it comes: contiguous, ended once, and counted up to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.v1 import common_pb2
from router.params import Params
from router.text.progress import GOES_ON, LENGTH, STOP, Progress
from runtime.errors import WorkerLost

END = 300


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens if token < 256)


def progress(**fields: Any) -> Progress:
    return Progress.of(Params(**fields), letters, [], frozenset({END, ord("!")}))


def feed(
    state: Progress, text: str, finish: int = GOES_ON, sequence: int | None = None, choice: int = 0
) -> tuple[str, Any]:
    tokens = [ord(char) for char in text]
    scores = [common_pb2.TokenLogprob(token=token, logprob=-1.0) for token in tokens]
    at = state.choices[choice].next_sequence if sequence is None else sequence
    delta, ended = state.accept(choice, at, tokens, scores if state.params.logprobs is not None else [], finish)
    return (delta.text if delta else ""), ended


def test_a_run_of_tokens_that_holds_a_stop_ends_there() -> None:
    """Public report T018 (vllm-project/vllm#57052); T041 (vllm-project/vllm#47616)."""
    state = progress(stop=(" ha",), logprobs=0)

    delta, ended = state.accept(
        0, 0, list(b"ha ha ha"), [common_pb2.TokenLogprob(token=token) for token in b"ha ha ha"], LENGTH
    )

    assert delta is not None
    assert ended is not None
    assert (delta.text, len(delta.tokens), len(delta.logprobs)) == ("ha", 5, 5)
    assert (ended.reason, ended.stop) == (STOP, " ha")
    assert state.completion_tokens == 5


def test_the_stop_can_stay_in_the_text() -> None:
    assert feed(progress(stop=("cd",), include_stop=True), "abcdef")[0] == "abcd"


def test_stops_do_not_count_before_min_tokens() -> None:
    state = progress(stop=("b",), min_tokens=3)

    text, ended = feed(state, "abab")

    assert (text, state.completion_tokens) == ("aba", 4)
    assert ended.stop == "b"


def test_what_might_have_become_a_stop_comes_out_at_the_end() -> None:
    state = progress(stop=("xyz",))

    first, _ = feed(state, "ax")
    rest, ended = feed(state, "y", LENGTH)

    assert (first, rest, ended.reason) == ("a", "xy", LENGTH)


def test_a_stop_token_is_counted_and_shown_only_on_request() -> None:
    hidden, shown, longer = progress(), progress(include_stop=True), progress()

    assert feed(hidden, "ab!", STOP)[0] == "ab"
    assert feed(shown, "ab!", STOP)[0] == "ab!"
    assert feed(longer, "ab!", LENGTH)[0] == "ab!"  # it ended for another reason
    assert hidden.completion_tokens == shown.completion_tokens == 3


def test_repeats_are_dropped_gaps_and_strangers_are_errors() -> None:
    state = progress()
    feed(state, "abc")

    assert feed(state, "bcd", sequence=1)[0] == "d"
    assert feed(state, "ab", sequence=0)[0] == ""
    with pytest.raises(WorkerLost) as gap:
        feed(state, "z", sequence=9)
    with pytest.raises(WorkerLost) as stranger:
        state.accept(1, 0, [97], [], GOES_ON)

    assert (gap.value.reason, stranger.value.reason) == ("sequence_gap", "bad_choice")


def test_log_probabilities_must_be_whole() -> None:
    with pytest.raises(WorkerLost):
        progress(logprobs=0).accept(0, 0, [97, 98], [common_pb2.TokenLogprob(token=97)], GOES_ON)


def test_nothing_comes_after_the_end_of_a_choice() -> None:
    state = progress(n=2)
    feed(state, "a", LENGTH)

    assert state.accept(0, 1, [98], [], LENGTH) == (None, None)
    half_way = state.finished
    feed(state, "b", LENGTH, choice=1)
    assert (half_way, state.finished) == (False, True)
    assert state.completion_tokens == 2


@given(
    text=st.text(alphabet="abc", min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=2),
    sizes=st.lists(st.integers(1, 6), min_size=40, max_size=40),
    overlap=st.integers(0, 3),
)
def test_how_tokens_are_grouped_and_repeated_does_not_matter(
    text: str, stops: list[str], sizes: list[int], overlap: int
) -> None:
    state, whole = progress(stop=tuple(stops)), progress(stop=tuple(stops))
    expected, expected_end = feed(whole, text, LENGTH)

    got, at = "", 0
    end: Any = None
    for size in sizes:
        if at >= len(text) or end is not None:
            break
        start = max(0, at - overlap)
        at = min(at + size, len(text))
        piece, end = feed(state, text[start:at], LENGTH if at == len(text) else GOES_ON, sequence=start)
        got += piece

    assert (got, end) == (expected, expected_end)
    assert state.completion_tokens == whole.completion_tokens
