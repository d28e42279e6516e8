"""Tokens to text: nothing broken, nothing lost, nothing twice; stop strings wherever they begin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from router.text.detok import BROKEN, Detokenizer
from router.text.stops import StopMatcher
from runtime.modelfiles import ModelFiles


def decoder(tokenizer: Tokenizer) -> partial[str]:
    return partial(tokenizer.decode, skip_special_tokens=True)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return ModelFiles.open("oracle").tokenizer()


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """SentencePiece's way: words with a space marker, unknown characters as single-byte tokens."""
    words = ["▁A", "▁b", "a", "b", "▁", "世", "c"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def stream(decode: partial[str], pieces: Sequence[Sequence[int]], context: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(decode, context)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


def singly(tokens: Sequence[int]) -> list[list[int]]:
    return [[token] for token in tokens]


def test_characters_split_over_tokens_come_out_whole(byte_level: Tokenizer) -> None:
    """Public report T122 (ai-dynamo/dynamo#12630)."""
    text = "삼겹살 김치 👩‍👩‍👧 é"

    pieces = stream(decoder(byte_level), singly(list(text.encode())))

    assert "".join(pieces) == text
    assert not any(BROKEN in piece for piece in pieces)


def test_a_character_the_model_never_finished_is_shown_broken_once_at_the_end(byte_level: Tokenizer) -> None:
    pieces = stream(decoder(byte_level), singly([*b"ok ", *"世".encode()[:2]]))

    assert "".join(pieces[:-1]) == "ok "
    assert pieces[-1] == BROKEN


class States:
    """A decoder that changes its mind about the tail, as byte-fallback decoders do."""

    def __init__(self, *texts: str) -> None:
        self.texts = ["", *texts]

    def __call__(self, tokens: Sequence[int]) -> str:
        return self.texts[len(tokens)]


def test_a_character_is_never_sent_twice_when_the_decoder_moves_back() -> None:
    """Public report T005 (sgl-project/sglang#31598)."""
    detokenizer = Detokenizer(States("A 世" + BROKEN, "A 世a" + BROKEN, "A 世ab"))

    pieces = [detokenizer.push([0]), detokenizer.push([0]), detokenizer.push([0])]

    assert pieces == ["A 世", "a", "b"]


def test_text_that_turned_into_broken_bytes_is_not_taken_back(byte_fallback: Tokenizer) -> None:
    half = [*"世".encode(), *"界".encode()[:2]]

    pieces = stream(decoder(byte_fallback), singly([256, *half]))

    assert "".join(pieces) == "A世" + BROKEN


def test_the_first_word_keeps_its_space_after_a_prompt(byte_fallback: Tokenizer) -> None:
    prompt = [256]  # "▁A"

    assert "".join(stream(decoder(byte_fallback), [[257]], prompt)) == " b"
    assert "".join(stream(decoder(byte_fallback), [[257]])) == "b"


def test_endless_garbage_is_let_go_and_costs_no_more_per_token(byte_level: Tokenizer) -> None:
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return str(byte_level.decode(tokens))

    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push([0xFF]) for _ in range(500)) + detokenizer.flush()

    assert text == BROKEN * 500
    assert longest < 64


def test_steps_that_always_end_inside_a_character_lose_nothing(byte_level: Tokenizer) -> None:
    tokens = list(("砀" * 40).encode())
    chunks = [tokens[:2], *(tokens[at : at + 6] for at in range(2, len(tokens), 6))]

    assert "".join(stream(decoder(byte_level), chunks)) == "砀" * 40


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_pieces_are_the_decoded_text(data: st.DataObject, byte_level: Tokenizer) -> None:
    text = data.draw(st.text(max_size=80))
    tokens = list(text.encode())
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=len(tokens), max_size=len(tokens)))
    chunks, at = [], 0
    for size in sizes:
        chunks.append(tokens[at : at + size])
        at += size

    pieces = stream(decoder(byte_level), [chunk for chunk in chunks if chunk], list(b"prompt: "))

    assert "".join(pieces) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="ab世界é A", max_size=60))
def test_joined_pieces_are_the_decoded_text_with_byte_fallback(text: str, byte_fallback: Tokenizer) -> None:
    vocab = byte_fallback.get_vocab()
    tokens = [256]
    for char in text.replace(" ", "▁"):
        tokens.extend([vocab[char]] if char in vocab else char.encode())

    assert "".join(stream(decoder(byte_fallback), singly(tokens))) == byte_fallback.decode(tokens)


def test_real_words_stream_as_they_decode() -> None:
    files = ModelFiles.open("smollm2")
    text = "The quick brown fox — naïve café, 東京 — says: 'हैलो' 🙂.\n\n  def f(x):\n\treturn x\n" * 6
    tokens = files.encode(text, allow_special=False)

    assert "".join(stream(decoder(files.tokenizer()), singly(tokens))) == text


# --- stop strings


def run(stops: tuple[str, ...], pieces: Sequence[str], *, include: bool = False) -> tuple[str, str]:
    matcher = StopMatcher(stops, include=include)
    out = ""
    for piece in pieces:
        matched = matcher.push(piece)
        out += matched.text
        if matched.stop:
            return out, matched.stop
    return out + matcher.flush(), ""


def test_a_stop_over_a_piece_border_is_found_and_cut() -> None:
    assert run(("\n\n",), ["one\n", "\ntwo"]) == ("one", "\n\n")


def test_a_stop_may_be_kept() -> None:
    assert run(("\n\n",), ["one\n", "\ntwo"], include=True) == ("one\n\n", "\n\n")


def test_what_only_looked_like_a_stop_comes_out() -> None:
    assert run(("END!",), ["the EN", "D of it"]) == ("the END of it", "")
    assert run(("END!",), ["EN"]) == ("EN", "")


def test_the_stop_that_ends_first_wins() -> None:
    assert run(("abc", "b"), ["zabc"]) == ("za", "b")
    assert run(("b", "ab"), ["zab"]) == ("z", "ab")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_pieces_do_not_change_where_an_answer_stops(text: str, stops: list[str], cuts: list[int]) -> None:
    pieces, at = [], 0
    for size in cuts:
        pieces.append(text[at : at + size])
        at += size

    found = run(tuple(stops), pieces)

    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    expected = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, "")
    assert found == expected
