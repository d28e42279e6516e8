"""What the command line asks for, and what it is refused for: by option and limit, before anything is sent."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

from bench.load.asked import SHIPPED, Target, Work, plan_of, warm_plan
from bench.load.loader import Job
from bench.load.plan import Plan, sessions
from bench.load.report import Objective
from bench.load.target import Card, chosen
from bench.serve import Run, described, main
from deploy.ports import free_ports
from runtime.errors import InvalidRequest

CARD = Card("m", 8192, 259, True)
AZURE = SHIPPED.parent / "AzureLLMInferenceTrace_conv.csv.gz"


def work(*words: str) -> Work:
    context = main.make_context("serve", list(words))
    return Work.of(context.params, context)


def plan(*words: str, card: Card = CARD, loaders: int = 1) -> Plan:
    return plan_of(work(*words), card, loaders)


def target(*words: str, here: str = "") -> Target:
    return Target.of(main.make_context("serve", list(words)).params, lambda state_dir: here)


def test_without_a_word_a_closed_loop_of_random_prompts_is_sent() -> None:
    made = plan()
    assert (made.dataset, made.arrival, made.concurrency, made.requests) == ("random", "closed", 16, 100)
    assert made.vocab == 259
    assert len(list(sessions(made))) == 100


@pytest.mark.parametrize(
    ("words", "arrival", "rate", "concurrency"),
    [
        (["--rate=5"], "poisson", 5.0, 0),
        (["--rate=5", "--concurrency=9"], "poisson", 5.0, 9),
        (["--rate=inf"], "burst", 0.0, 0),
        (["--concurrency=9"], "closed", 0.0, 9),
    ],
)
def test_a_rate_is_an_open_loop_and_a_concurrency_its_cap_or_a_closed_one(
    words: list[str], arrival: str, rate: float, concurrency: int
) -> None:
    made = plan(*words)
    assert (made.arrival, made.rate, made.concurrency) == (arrival, rate, concurrency)


def test_a_trace_has_its_own_times_and_a_rate_or_a_speed_changes_them_as_in_a_replay() -> None:
    own = plan("--dataset=trace", "--longest=8192", "--requests=200")
    assert (own.arrival, own.speed, own.rows[0].at) == ("times", 1.0, 0.0)
    fast = plan("--dataset=trace", "--longest=8192", "--requests=200", "--speedup=3")
    paced = plan("--dataset=trace", "--longest=8192", "--requests=200", f"--rate={3 * own.rate}")
    assert fast.speed == 3
    assert paced.speed == pytest.approx(3)
    assert [row.prompt for row in fast.rows] == [row.prompt for row in own.rows]
    at = [session.at for session in sessions(paced)]
    assert len(at) / at[-1] == pytest.approx(3 * own.rate)
    assert plan("--dataset=trace", "--longest=8192", "--concurrency=3").arrival == "closed"


def test_a_trace_of_one_moment_has_no_rate(tmp_path: Path) -> None:
    line = '{"timestamp": 5, "input_length": 20, "output_length": 3, "hash_ids": [1]}\n'
    (tmp_path / "one").write_text(line)
    (tmp_path / "two").write_text(2 * line)
    for name, requests in (("one", 1), ("two", 2)):
        made = plan(f"--trace={tmp_path / name}")
        assert (made.arrival, made.rate, len(list(sessions(made)))) == ("burst", 0.0, requests)
    assert plan(f"--trace={tmp_path / 'one'}", "--rate=5").arrival == "burst"
    with pytest.raises(InvalidRequest) as refused:
        plan(f"--trace={tmp_path / 'two'}", "--rate=5")
    assert refused.value.field == "rate"


def test_both_kinds_of_traces_are_read_and_what_is_skipped_is_behind() -> None:
    azure = plan(f"--trace={AZURE}", "--longest=8192", "--requests=50")
    behind = plan(f"--trace={AZURE}", "--longest=8192", "--requests=40", "--skip=10")
    assert [row.prompt for row in behind.rows] == [row.prompt for row in azure.rows[10:]]
    assert plan("--dataset=trace", "--longest=8192").rows[0].blocks[0] == 0, "Mooncake's, which comes along"


def test_prompts_are_read_from_json_lines_packed_or_not(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "Grüße\u2028", "output_tokens": 7}), "", json.dumps("bare text")]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "p.gz").write_bytes(gzip.compress(file.read_bytes()))
    for name in ("p.jsonl", "p.gz"):
        made = plan(f"--prompts={tmp_path / name}", "--output=9")
        assert [(row.text, row.output) for row in made.rows] == [("Grüße\u2028", 7), ("bare text", 9)]
        assert made.requests == 2, "no more than there are"


@pytest.mark.parametrize(
    ("words", "field", "limit"),
    [
        (["--input=8129", "--output=64"], "input", "8192"),
        (["--dataset=shared-prefix", "--prefix=9000"], "prefix", "8192"),
        (["--dataset=conversations", "--turns=30"], "turns", "8192"),
        (["--dataset=trace"], "trace", ""),
        (["--dataset=trace", "--longest=10"], "longest", "10 tokens"),
        (["--dataset=trace", "--longest=8192", "--requests=1000000"], "requests", "6461"),
        (["--dataset=prompts"], "prompts", ""),
        (["--trace=nowhere"], "trace", ""),
        (["--prompts=nowhere"], "prompts", ""),
        (["--prompts=a", "--trace=b"], "prompts", ""),
        (["--dataset=random", "--trace=b"], "trace", ""),
        (["--rate=1", "--dataset=trace", "--speedup=2"], "speedup", ""),
        (["--rate=inf", "--duration=3"], "requests", ""),
        (["--groups=3"], "groups", ""),
        (["--turns=3"], "turns", ""),
        (["--speedup=3"], "speedup", ""),
        (["--dataset=trace", "--input=3"], "input", ""),
        (["--chat"], "chat", ""),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_option(words: list[str], field: str, limit: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(*words)
    assert refused.value.field == field
    assert limit in refused.value.limit


def test_a_load_generator_without_a_place_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan("--concurrency=2", loaders=3)
    assert (refused.value.field, refused.value.limit) == ("concurrency", "at least 3")


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"prompt": ""}', '{"text": "x"}', '{"prompt": "x", "output_tokens": 0}', "3", "\udcff", '"\\ud800"'],
)
def test_a_damaged_file_of_prompts_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n' + line.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidRequest) as refused:
        plan(f"--prompts={file}")
    assert refused.value.field == "prompts"
    assert "line 2" in refused.value.message or "cannot be read" in refused.value.message


@pytest.mark.parametrize("damage", [b"\x1f\x8b broken", b"", b'{"timestamp": 1}', b"a,b\n1,2\n"])
def test_a_damaged_trace_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "t").write_bytes(damage)
    with pytest.raises(InvalidRequest) as refused:
        plan(f"--trace={tmp_path / 't'}")
    assert refused.value.field == "trace"


def test_a_number_that_is_none_is_refused_by_its_option() -> None:
    wrong = "rate=0 rate=-1 rate=nan rate=x input=0 input=5:2 output=1:x loaders=0 timeout=0 dataset=other duration=-1"
    numbers = [
        option
        for option in main.params
        if isinstance(option, click.Option) and isinstance(option.type, click.FloatRange)
    ]
    assert len(numbers) >= 7
    for word in [*wrong.split(), *(f"{option.opts[0].removeprefix('--')}=nan" for option in numbers)]:
        with pytest.raises(click.BadParameter) as refused:
            plan(f"--{word}")
        assert f"--{word.partition('=')[0]}" in refused.value.format_message()


def test_the_target_is_the_one_named_or_the_cluster_that_runs_here() -> None:
    assert target(here="127.0.0.1:8000").address().address == "http://127.0.0.1:8000"
    grpc = target("--grpc=[::1]:9000", "--api-key=k").address()
    assert (grpc.kind, grpc.address, grpc.api_key) == ("grpc", "[::1]:9000", "k")
    for words, field in (
        ([], "url"),
        (["--url=http://x", "--grpc=x:1"], "grpc"),
        (["--grpc=x"], "grpc"),
        (["--grpc=x:0"], "grpc"),
        (["--grpc=x:1", "--api-key=a\nb"], "api_key"),
        (["--url=http://x", "--api-key=\u00fc"], "api_key"),
        (["--grpc=x:1", "--tls-cert=/nowhere"], "tls_cert, tls_key and tls_ca go together"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            target(*words).address()
        assert refused.value.field == field or field in refused.value.message


def test_what_was_asked_for_is_reported_with_the_figures() -> None:
    words = ["--dataset=trace", "--longest=8192", "--skip=7", "--requests=20", "--speedup=2", "--timeout=9"]
    asked, address = work(*words), target("--url=http://h:1", *words).address()
    run = Run((Job(address, plan_of(asked, CARD, 1)),), None, Objective())
    said = described(run, asked)
    assert json.loads(json.dumps(said)) == {**said, "input": [512, 512], "output": [64, 64]}
    names = ("file", "skip", "longest", "requests", "speed", "timeout_s", "arrival", "chat", "ignore_eos")
    assert tuple(said[name] for name in names) == (SHIPPED.name, 7, 8192, 20, 2.0, 9.0, "times", False, False)


def test_a_model_is_the_only_one_or_named() -> None:
    other = replace(CARD, model="n")
    assert chosen([CARD], "") == CARD
    assert chosen([CARD, other], "n") == other
    for cards, name in (([], ""), ([CARD, other], ""), ([CARD], "x")):
        with pytest.raises(InvalidRequest) as refused:
            chosen(cards, name)
        assert refused.value.field == "model"


def test_a_warm_up_is_as_long_and_shares_nothing_with_the_run() -> None:
    made = plan("--dataset=shared-prefix", "--prefix=100", "--input=50", "--output=7")
    warm = warm_plan(made, 5, 1)
    assert warm is not None
    turns = [session.turns[0] for session in sessions(warm)]
    assert [(len(turn.tokens(259)), turn.output) for turn in turns] == [(150, 7)] * 5
    begin = {tuple(session.turns[0].tokens(259)[:16].tolist()) for session in sessions(made)}
    assert not begin & {tuple(turn.tokens(259)[:16].tolist()) for turn in turns}
    assert warm_plan(made, 0, 1) is None
    trace = warm_plan(plan("--dataset=trace", "--longest=8192"), 3, 1)
    assert trace is not None
    assert trace.longest() <= 8192


def test_by_itself_it_reaches_no_ray_and_says_so_in_one_line() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    for words, said in (
        (["--url=http://127.0.0.1:1", "--address=127.0.0.1:2"], "pdserve: address: needs the command"),
        ([f"--url=http://127.0.0.1:{port}", "--json"], f"pdserve: no server answers at http://127.0.0.1:{port}/v1\n"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "bench.serve", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode in (1, 2)
        assert done.stdout == ""
        assert done.stderr.startswith(said)
        assert done.stderr.count("\n") == 1
