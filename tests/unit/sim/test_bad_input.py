"""What operators get wrong in traces, profiles and options: a sentence and status 2, before anything is simulated."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from bench.replay import SHIPPED, main
from bench.sim.profile import Profile, find
from bench.sim.trace import load
from runtime.errors import InvalidRequest

ROW = {"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1]}
SMALL = ["--prefill", "1", "--decode", "1", "--policies", "round_robin"]
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def rows(**changed: Any) -> bytes:
    return (json.dumps(ROW) + "\n" + json.dumps(ROW | changed) + "\n").encode()


def damaged() -> bytes:
    packed = bytearray(SHIPPED.read_bytes())
    packed[1000:1100] = bytes(byte ^ 0xFF for byte in packed[1000:1100])
    return bytes(packed)


TRACES = {
    "packed and cut off": SHIPPED.read_bytes()[:5000],
    "packed and damaged": damaged(),
    "a head of gzip alone": b"\x1f\x8b",
    "no text": b"\xff\xfe\x00\x80",
    "a negative hash": rows(hash_ids=[-1]),
    "half a hash": rows(hash_ids=[1.5]),
    "a negative length": rows(input_length=-3),
    "an endless length": rows(input_length=float("inf")),
    "a negative answer": rows(output_length=-5),
    "a length as text": rows(input_length="100"),
    "no time": rows(timestamp=float("nan")),
    "the end of time": rows(timestamp=float("inf")),
    "no timestamp": rows(timestamp=None),
    "a list": rows() + b"[1, 2]\n",
    "half a row": rows() + b'{"timestamp": 0',
    "a CSV without numbers": f"{HEAD}2023-11-16 18:17:03.9799600,abc,44\n".encode(),
    "a CSV with a negative length": f"{HEAD}2023-11-16 18:17:03.9799600,-5,44\n".encode(),
    "a CSV without a date": f"{HEAD}yesterday,5,44\n".encode(),
    "a CSV with a short row": f"{HEAD}2023-11-16 18:17:03.9799600\n".encode(),
}


@pytest.mark.parametrize("content", TRACES.values(), ids=TRACES)
def test_a_trace_that_cannot_be_meant_is_refused_and_never_bent_into_shape(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest) as caught:
        load(file)
    assert caught.value.field == "trace"


def profile(section: str, key: str, value: Any) -> dict[str, Any]:
    content: dict[str, Any] = copy.deepcopy(yaml.safe_load(find("sim-hybrid-48b").read_text()))
    (content[section] if section else content)[key] = value
    return content


NUMBERS = [(section, key) for section, terms in profile("", "name", 0).items() if section != "name" for key in terms]


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "fast", None, True, [1]], ids=str)
@pytest.mark.parametrize("name", [name for name in NUMBERS if name != ("model", "kind")], ids=".".join)
def test_every_number_of_a_profile_is_checked_and_named(name: tuple[str, str], value: Any) -> None:
    with pytest.raises(InvalidRequest, match=".".join(name)) as caught:
        Profile.parse("p", profile(*name, value))
    assert caught.value.field == "sim"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("prefill", "chunk_tokens", 0),  # a prompt of chunks without tokens never ends
        ("pool", "max_batch", 0),
        ("pool", "max_batch", 1.5),
        ("pool", "max_batch", 1e30),
        ("pool", "kv_tokens", 0),
        ("transfer", "bandwidth_Bps", 0),
        ("transfer", "shared_nic_workers", 0),
        ("tiers", "host_Bps", 0),
        ("tiers", "disk_Bps", 0),
        ("model", "layers", 0),
        ("model", "kv_bytes_per_token", 0),
        ("noise", "stall_probability", 1.1),
        ("noise", "stall_factor", 0),
        ("noise", "clock_drift_ppm", 1e6),
        ("pool", "host_state_slots", 0),  # a page comes up from host memory for a state only
        ("pool", "host_kv_tokens", 0),  # and what is below it
        ("pool", "unknown", 1),
        ("", "unknown", 1),
    ],
)
def test_a_profile_that_nothing_could_be_served_with_is_refused(section: str, key: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=key):
        Profile.parse("p", profile(section, key, value))


def test_a_term_that_is_missing_is_named() -> None:
    content = profile("", "pool", {"kv_tokens": 1, "state_slots": 1, "max_batch": 1})
    with pytest.raises(InvalidRequest, match="pool needs host_kv_tokens"):
        Profile.parse("p", content)


@pytest.mark.parametrize("option", ["--load", "--rate", "--speedup"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "x", "1e300"])
def test_no_rate_that_is_none_is_taken(option: str, value: str) -> None:
    done = CliRunner().invoke(main, ["--requests", "5", option, value])
    assert done.exit_code == 2
    assert option in done.output


@pytest.mark.parametrize(
    "given",
    [
        ["--rate", "1", "--speedup", "2"],
        ["--rate", "1", "--load", "0.8"],
        ["--speedup", "1", "--load", "0.8"],
        ["--seed", "-1"],
        ["--prefill", "0"],
        ["--requests", "-1"],
        ["--skip", "-1"],
        ["--cache-dir", "/dev/null/x"],
    ],
)
def test_no_option_is_ignored_for_another(given: list[str]) -> None:
    done = CliRunner().invoke(main, ["--requests", "5", *given])
    assert done.exit_code == 2
    assert given[0] in done.output


def test_a_picture_that_cannot_be_written_is_an_error_in_words() -> None:
    done = CliRunner().invoke(main, [*SMALL, "--requests", "5", "--rate", "1", "--plot", "/dev/null/p.png"])
    assert isinstance(done.exception, InvalidRequest)
    assert "/dev/null/p.png" in done.exception.message


def test_a_capacity_that_cannot_be_remembered_is_still_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    done = CliRunner().invoke(main, [*SMALL, "--requests", "60", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["config"]["capacity_requests_per_s"] > 0


def test_a_packed_trace_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    packed = gzip.compress(rows())
    for end in range(len(packed) - 1, 0, -7):
        file = tmp_path / "t.gz"
        file.write_bytes(packed[:end])
        with pytest.raises(InvalidRequest):
            load(file)
