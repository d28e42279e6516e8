"""A thousand failures a second are a few lines and a count, whoever writes them and however."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from router.stats import Stats
from runtime import logs
from runtime.config import Config
from runtime.errors import Cancelled, PdserveError, Saturated, WorkerLost
from runtime.log_bound import KINDS, LINES, SECONDS, Bounded
from runtime.logs import _FromLogging
from runtime.metrics import Metrics

STORM = 1000


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    handlers = list(logging.getLogger().handlers)
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers


class Log:
    """A process's log, and its time."""

    def __init__(self) -> None:
        self.now = 100.0
        self._out = io.StringIO()
        logs.setup(Config(), stream=self._out)
        (bounded,) = [one for one in structlog.get_config()["processors"] if isinstance(one, Bounded)]
        bounded._clock = lambda: self.now

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._out.getvalue().splitlines()]

    def left_out(self) -> dict[tuple[str, str], int]:
        said = [one for one in self.lines() if one["event"] == "lines_left_out"]
        return {(one["of"], one.get("reason", "")): one["lines"] for one in said}


def refused(error: PdserveError) -> Callable[[int], None]:
    stats = Stats(Metrics())

    def fail(number: int) -> None:
        with pytest.raises(type(error)), stats.request("acme", f"r{number}"):
            raise error

    return fail


def crashed(number: int) -> None:
    try:
        raise ValueError(f"no {number}")
    except ValueError as error:
        structlog.get_logger("t").error("handler_failed", exc_info=error)


def crashed_by_name(number: int) -> None:
    try:
        raise ValueError(f"no {number}")
    except ValueError:
        logging.getLogger("engine.loop").exception("step %d has failed", number)


def warned(number: int) -> None:
    logging.getLogger("kvtransfer").warning("reads failed", extra={"peer": f"w{number}", "error": "Lost"})


FAILURES: dict[str, tuple[Callable[[], Callable[[int], None]], tuple[str, str]]] = {
    "a refusal": (lambda: refused(Saturated("full")), ("request", "saturated")),
    "a failure": (lambda: refused(WorkerLost("gone")), ("request", "worker_lost")),
    "a client that left": (lambda: refused(Cancelled("left")), ("request", "cancelled")),
    "a crash": (lambda: crashed, ("handler_failed", "ValueError")),
    "a crash of the engine": (lambda: crashed_by_name, ("step %d has failed", "ValueError")),
    "a warning of the transfer": (lambda: warned, ("reads failed", "Lost")),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_storm_is_a_few_lines_and_then_a_count(name: str) -> None:
    log = Log()
    make, kind = FAILURES[name]
    fail = make()
    for number in range(STORM):
        fail(number)
    assert len(log.lines()) == LINES
    log.now += SECONDS
    fail(STORM)
    assert log.left_out() == {kind: STORM - LINES}
    assert len(log.lines()) == LINES + 2, "the next interval begins anew"


def test_the_count_comes_with_the_next_line_of_any_kind_and_at_the_end() -> None:
    log = Log()
    for number in range(STORM):
        warned(number)
    log.now += SECONDS
    structlog.get_logger("t").info("listening")
    assert log.left_out() == {("reads failed", "Lost"): STORM - LINES}
    for number in range(LINES + 3):
        crashed(number)
    logs.finish()
    logs.finish()
    assert log.left_out()["handler_failed", "ValueError"] == 3


def test_what_went_well_is_never_left_out_and_one_kind_costs_another_nothing() -> None:
    log = Log()
    said = structlog.get_logger("t")
    for number in range(STORM):
        warned(number)
        said.info("request", outcome="completed")
    said.info("request", outcome="rejected", reason="overloaded")
    said.info("request", outcome="rejected", reason="draining")
    assert Counter(one.get("outcome", "failed") for one in log.lines()) == {
        "failed": LINES, "completed": STORM, "rejected": 2,
    }  # fmt: skip


def test_reasons_that_a_peer_makes_up_are_bounded_together() -> None:
    log = Log()
    for number in range(10 * STORM):
        structlog.get_logger("t").warning("worker_refused", reason=f"made_up_{number}")
    assert len(log.lines()) <= KINDS + LINES


def test_threads_count_together() -> None:
    log = Log()
    threads = [threading.Thread(target=lambda: list(map(warned, range(200)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logs.finish()
    assert log.left_out() == {("reads failed", "Lost"): 8 * 200 - LINES}


def test_a_process_tells_its_count_when_it_ends() -> None:
    code = (
        "import structlog\nfrom runtime import logs\nfrom runtime.config import Config\n"
        "logs.setup(Config())\nfor _ in range(100): structlog.get_logger('t').warning('no', reason='x')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    last = json.loads(done.stderr.splitlines()[-1])
    assert (last["event"], last["lines"]) == ("lines_left_out", 100 - LINES)


def test_what_the_library_logs_has_its_contents_described_like_everything() -> None:
    log = Log()
    logging.getLogger("x").warning("odd", extra={"prompt": "the user's words"})
    (line,) = log.lines()
    assert (line["logger"], line["prompt"], "_kind" in line) == ("x", "<str of 16>", False)


@pytest.mark.parametrize(
    ("level", "text", "values", "said"),
    [
        (35, "odd %s", ("level",), ("odd level", "warning")),
        (99, "worse", (), ("worse", "critical")),
        (40, "%d steps", ("no number",), ("%d steps", "error")),
        (40, "100% of %s", ("all",), ("100% of %s", "error")),
        (40, "%(name)s", ({"other": 1},), ("%(name)s", "error")),
    ],
)
def test_a_line_that_its_author_got_wrong_is_written_and_fails_nobody(
    level: int, text: str, values: tuple[object, ...], said: tuple[str, str]
) -> None:
    log = Log()
    ours = next(one for one in logging.getLogger().handlers if isinstance(one, _FromLogging))  # pytest's own would fail
    ours.handle(logging.LogRecord("x", level, "", 0, text, values, None))
    (line,) = log.lines()
    assert (line["event"], line["level"]) == said
