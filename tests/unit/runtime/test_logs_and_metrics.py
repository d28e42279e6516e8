from __future__ import annotations

import errno
import io
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest
import structlog

from runtime import logs
from runtime.config import Config
from runtime.errors import InvalidRequest
from runtime.metrics import Metrics

SECRET = "the user's own words"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def values(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def entry(config: Config = Config(), /, **values: Any) -> dict[str, Any]:
    out = io.StringIO()
    logs.setup(config, stream=out, worker="w1")
    structlog.get_logger("t").warning("happened", **values)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_an_entry_is_json_with_level_time_and_what_was_bound() -> None:
    found = entry(count=3)
    assert (found["event"], found["level"], found["worker"], found["count"]) == ("happened", "warning", "w1", 3)
    assert found["timestamp"].endswith("Z")


@pytest.mark.parametrize("name", sorted(logs.SENSITIVE))
def test_content_and_secrets_are_described_not_repeated(name: str) -> None:
    assert SECRET not in json.dumps(entry(**values(name, SECRET)))
    assert SECRET not in json.dumps(entry(request={"deep": [{name.upper(): SECRET}]}))
    assert SECRET not in json.dumps(entry(**values(name, [SECRET])))


class FullDisk(io.StringIO):
    full = True
    at_flush = False

    def write(self, text: str) -> int:
        if self.full and not self.at_flush:
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().write(text)

    def flush(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize("at_flush", [False, True])
def test_a_line_that_cannot_be_written_is_lost_and_nobody_fails_over_it(*, at_flush: bool) -> None:
    out = FullDisk()
    out.at_flush = at_flush
    logs.setup(Config(), stream=out)
    log = structlog.get_logger("t")
    log.warning("first")
    log.error("second")
    out.full = False
    log.warning("third")
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert said[-1]["event"] == "third"
    assert {"event": "log_lines_lost", "lines": 2} in said


def test_counts_of_tokens_are_not_content() -> None:
    assert entry(tokens=12)["tokens"] == 12


def test_prompts_can_be_switched_on_but_secrets_cannot() -> None:
    found = entry(Config.load({"log_prompts": True}), prompt=SECRET, api_key="sk-1")
    assert found["prompt"] == SECRET
    assert "sk-1" not in json.dumps(found)


def test_a_traceback_has_no_local_variables() -> None:
    out = io.StringIO()
    logs.setup(Config(), stream=out)
    secret_prompt = SECRET + "!"
    try:
        raise ValueError(len(secret_prompt))
    except ValueError as exc:
        structlog.get_logger("t").error("failed", exc_info=exc)
    assert "ValueError" in out.getvalue()
    assert SECRET not in out.getvalue()


def test_the_level_holds() -> None:
    out = io.StringIO()
    logs.setup(Config.load({"log_level": "error"}), stream=out)
    structlog.get_logger("t").warning("quiet")
    assert out.getvalue() == ""


def test_metrics_of_two_parts_do_not_mix_and_the_same_name_is_the_same_metric() -> None:
    one, other = Metrics(), Metrics()
    one.counter("pdserve_things", "Things", ["kind"]).labels("a").inc(2)
    one.counter("pdserve_things", "Things", ["kind"]).labels("a").inc()
    assert one.value("pdserve_things_total", {"kind": "a"}) == 3
    assert other.value("pdserve_things_total", {"kind": "a"}) == 0


def test_the_exposition_has_help_type_and_values() -> None:
    metrics = Metrics()
    metrics.gauge("pdserve_level", "How high").set(4)
    metrics.histogram("pdserve_wait_seconds", "How long").observe(0.02)
    text = metrics.render().decode()
    assert "# HELP pdserve_level How high\n# TYPE pdserve_level gauge\npdserve_level 4.0" in text
    assert 'pdserve_wait_seconds_bucket{le="0.025"} 1.0' in text


def test_a_histogram_counts_up_to_each_bound_as_prometheus_own_does_by_labels() -> None:
    ours = Metrics()
    theirs = prometheus_client.Histogram(
        "pdserve_wait_seconds", "How long", ["stage"], registry=None, buckets=(0.1, 1.0, 10.0)
    )
    mine = ours.histogram("pdserve_wait_seconds", "How long", ["stage"], (0.1, 1.0, 10.0))
    for seconds in (0.0, 0.1, 0.10001, 1.0, 7.5, 10.0, 11.0):
        theirs.labels("decode").observe(seconds)
        mine.labels("decode").observe(seconds)
    for family in theirs.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                assert ours.value(sample.name, sample.labels) == pytest.approx(sample.value)
    assert ours.value("pdserve_wait_seconds_count", {"stage": "decode"}) == 7


def test_a_process_answers_scrapes_at_an_address_of_its_own_and_refuses_one_it_cannot_have() -> None:
    metrics = Metrics()
    metrics.gauge("pdserve_level", "How high").set(4)
    address = metrics.serve("127.0.0.1:0")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        assert b"pdserve_level 4.0" in answer.read()
    for bad in (address, "127.0.0.1", "127.0.0.1:70000"):
        with pytest.raises(InvalidRequest) as refused:
            metrics.serve(bad)
        assert refused.value.field == "metrics_listen"


def test_a_foreign_name_or_another_kind_under_a_name_is_a_bug() -> None:
    metrics = Metrics()
    metrics.counter("pdserve_a", "A")
    with pytest.raises(AssertionError):
        metrics.gauge("pdserve_a", "A")
    with pytest.raises(AssertionError):
        metrics.counter("pdserve_a", "A", ["label"])
    with pytest.raises(AssertionError):
        metrics.counter("a", "A")
