"""Page keys are the same everywhere, and different for different owners."""

from __future__ import annotations

import hashlib
import itertools
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.hashing import LINK_TOKENS, PageHasher, page_keys, root

TOKENS = tuple((i * 2654435761) % 50000 for i in range(600))

GOLDEN = {
    "root": "831c277ecc197ba6ffed671efa1676178888a62e34cd6cfab2e843f052c6c28f",
    "page 1": "42c98d9cea4a375dbac55ac1ec92927b9e65df844709279a824d85bbbb92a28c",
    "page 16": "2d3dbc921f32f7a9cf80d7fa4748fec1a1da1ae173f6f93eb25b17ff727ee7a7",
    "page 17": "87fab2684387cabae296ecb896c65f5040a3bdb576f6d3a5784841a0800ee948",
    "page 37": "ad4d5e6c14e0f0a9d43b5844df7fdbffe2deba67d5148a4a8046110d2944a1d8",
    "with an item": "baa55381c0981517a650d03b44f5b9f7e3bb02e5681faa96f0ba7501693178cb",
}


def _golden() -> dict[str, str]:
    base = root(b"salt", "smollm2", "rev")
    keys = page_keys(base, TOKENS)
    item = page_keys(base, TOKENS[:32], [(20, b"\x07" * 32)])
    named = {
        "root": base,
        "page 1": keys[0],
        "page 16": keys[15],
        "page 17": keys[16],
        "page 37": keys[36],
        "with an item": item[1],
    }
    return {name: key.hex() for name, key in named.items()}


def test_keys_have_their_golden_values() -> None:
    assert _golden() == GOLDEN


def test_keys_are_the_same_in_another_process_with_another_hash_seed() -> None:
    """Public report T085 (LMCache/LMCache#2136; vllm-project/vllm#51875)."""
    code = "from tests.unit.engine_core.test_hashing import _golden; print(_golden())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "77"},
        cwd=Path(__file__).parents[3],
    )
    assert run.stdout.strip() == str(GOLDEN)


def test_a_key_is_what_the_design_says() -> None:
    """SHA-256(previous link, the link's first 16 k tokens), the sixteenth being the next link."""
    base = root(b"s", "m", "r")
    keys = page_keys(base, TOKENS)
    packed = struct.pack(f"<{len(TOKENS)}I", *TOKENS)
    assert keys[4] == hashlib.sha256(base + packed[: 5 * 64]).digest()
    link = hashlib.sha256(base + packed[: LINK_TOKENS * 4]).digest()
    assert keys[15] == link
    assert keys[18] == hashlib.sha256(link + packed[1024 : 1024 + 3 * 64]).digest()
    assert PageHasher(base).links(TOKENS) == [keys[15], keys[31]]


def test_only_full_pages_have_keys() -> None:
    base = root(b"", "m", "r")
    assert page_keys(base, TOKENS[:15]) == []
    assert len(page_keys(base, TOKENS[:16])) == 1
    assert len(page_keys(base, TOKENS[:33])) == 2


def test_moving_bytes_between_fields_changes_the_root() -> None:
    """Public report T100 (vllm-project/vllm#44701; sgl-project/sglang#24638)."""
    fields = [
        (b"ab", "", "", "", ""),
        (b"a", "b", "", "", ""),
        (b"", "ab", "", "", ""),
        (b"", "a", "b", "", ""),
        (b"", "", "ab", "", ""),
        (b"", "", "", "ab", ""),
        (b"", "", "", "a", "b"),
        (b"", "", "", "", "ab"),
        (b"X", "m", "r", "", ""),
        (b"", "m", "r", "X", ""),
        (b"org_1", "2345", "", "", ""),
        (b"org_12345", "", "", "", ""),
    ]
    assert len({root(*f) for f in fields}) == len(fields)


def test_the_same_salt_hits_and_another_does_not() -> None:
    """Public report T100 (vllm-project/vllm#44701; sgl-project/sglang#24638); T026 (sgl-project/sglang#24579)."""
    one, same, other = (page_keys(root(s, "m", "r"), TOKENS[:64]) for s in (b"t1", b"t1", b"t2"))
    assert one == same
    assert not set(one) & set(other)


@given(st.lists(st.integers(0, 2**32 - 2), max_size=700), st.lists(st.integers(0, 700), max_size=5))
def test_growing_step_by_step_gives_the_keys_of_all_at_once(tokens: list[int], cuts: list[int]) -> None:
    base = root(b"s", "m", "r")
    hasher = PageHasher(base)
    for cut in sorted(cuts):
        hasher.page_keys(tokens[:cut])
    assert hasher.page_keys(tokens) == page_keys(base, tokens)


def test_a_fork_goes_its_own_way() -> None:
    base = root(b"s", "m", "r")
    hasher = PageHasher(base)
    hasher.page_keys(TOKENS[:100])
    other = hasher.fork()
    changed = (*TOKENS[:100], *reversed(TOKENS[100:200]))
    assert other.page_keys(changed) == page_keys(base, changed)
    assert hasher.page_keys(TOKENS) == page_keys(base, TOKENS)


def test_an_item_changes_its_own_page_and_all_after_it() -> None:
    base = root(b"s", "m", "r")
    plain = page_keys(base, TOKENS)
    item = page_keys(base, TOKENS, [(40, b"a" * 32)])
    assert item[:2] == plain[:2]
    assert all(a != b for a, b in zip(item[2:], plain[2:], strict=True))


def test_items_differ_by_position_content_and_split() -> None:
    base = root(b"s", "m", "r")
    variants = [
        [(3, b"a" * 32)],
        [(4, b"a" * 32)],
        [(3, b"b" * 32)],
        [(3, b"a" * 16), (3, b"a" * 16)],
        [(3, b"a" * 32), (4, b"a" * 32)],
    ]
    keys = [page_keys(base, TOKENS[:16], extras)[0] for extras in variants]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert page_keys(base, TOKENS[:16], [(4, b"x"), (3, b"y")]) == page_keys(base, TOKENS[:16], [(3, b"y"), (4, b"x")])


def test_a_hasher_refuses_the_tokens_of_another_sequence() -> None:
    hasher = PageHasher(root(b"s", "m", "r"))
    hasher.page_keys(TOKENS[:32])
    with pytest.raises(AssertionError):
        hasher.page_keys((*TOKENS[:20], *range(28)))
