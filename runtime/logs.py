"""Structured logs that do not repeat what users said.

Values under the names in SENSITIVE become a short description (their kind and length) wherever they stand in an
entry, nested ones too, unless prompts are switched on, which keys and secrets never are. Tracebacks have no local
variables, since those hold prompts. A line that cannot be written costs nobody their request, and a storm of failures
is a few lines and a count (`log_bound`).
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO, cast

import orjson
import structlog

from runtime.config import Config
from runtime.log_bound import KIND, Bounded

CONTENT = frozenset({
    "prompt", "prompts", "messages", "content", "text", "tokens", "token_ids", "prompt_tokens_ids", "input", "body",
    "output", "completion", "delta", "stop",
})  # fmt: skip
SECRETS = frozenset({
    "key", "api_key", "api_keys", "authorization", "secret", "password", "cache_salt", "cache_salt_secret", "salt",
    "ticket", "mac", "cookie", "tls_key",
})  # fmt: skip
SENSITIVE = CONTENT | SECRETS
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_LEVEL_OF = {"warn": "warning", "exception": "error"}
_MAX_DEPTH = 6
_HARMLESS = frozenset({bool, int, float, type(None)})
"""Shown whatever their name: looked at first, since most values are such."""


def setup(config: Config, *, stream: TextIO | None = None, **bound: Any) -> None:
    """Configure structlog for this process: lines for a terminal, JSON otherwise. `bound` goes into every entry
    (worker=..., role=...)."""
    out = stream or sys.stderr
    sink = _Sink(out)
    shaped: list[structlog.typing.Processor] = [_Standing(bound), Redact(prompts=config.log_prompts), *_renderers(out)]

    def tell(entry: Any) -> None:
        for processor in shaped:
            entry = processor(None, "warning", entry)
        sink.write(f"{entry}\n")

    structlog.reset_defaults()
    structlog.configure(
        processors=[Bounded(tell), *shaped],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.log_level]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", sink)),
        cache_logger_on_first_use=False,
    )
    _take_over(logging.getLogger())
    atexit.register(finish)


def finish() -> None:
    """Tell what was left out so far: at the end of the process. Idempotent."""
    for processor in structlog.get_config()["processors"]:
        if isinstance(processor, Bounded):
            processor.finish()


def _take_over(root: logging.Logger) -> None:
    """What goes through the standard library's logging (the engine, the transfers, asyncio) is written as everything
    else is, with the same care about contents and storms."""
    for handler in list(root.handlers):
        if isinstance(handler, _FromLogging):
            root.removeHandler(handler)
    root.addHandler(_FromLogging(logging.WARNING))


class _FromLogging(logging.Handler):
    """A line that its author got wrong is written as it is: what is logged fails nobody who logs."""

    def emit(self, record: logging.LogRecord) -> None:
        given = {name: value for name, value in vars(record).items() if name not in _RECORD}
        log = structlog.get_logger(record.name)
        level = min(record.levelno // 10 * 10, logging.CRITICAL)  # some libraries have levels of their own
        log.log(level, _said(record), logger=record.name, exc_info=record.exc_info, **{KIND: str(record.msg)}, **given)


def _said(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):  # values that do not fit its text
        return str(record.msg)


_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "event", "logger", "level"}


class _Sink:
    """Where lines go. One that cannot be written (the disk is full, the reader is gone) is lost: what a process does
    must not depend on whether it can be told."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lost = 0

    def write(self, line: str) -> None:
        try:
            if self._lost:
                self._out.write(f'{{"event": "log_lines_lost", "lines": {self._lost}}}\n')
                self._out.flush()
                self._lost = 0
            self._out.write(line)
            self._out.flush()
        except OSError:
            self._lost += 1

    def flush(self) -> None:
        """Each line was flushed as it was written."""


class Redact:
    """A structlog processor."""

    def __init__(self, *, prompts: bool) -> None:
        self._names = SECRETS if prompts else SENSITIVE

    def __call__(self, logger: Any, method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        sensitive = self._names
        for name, value in entry.items():  # values are replaced, names stay
            kind = type(value)
            if kind in _HARMLESS or name == "event" or (kind is str and name.lower() not in sensitive):
                continue
            entry[name] = self._value(name, value, 0)
        return entry

    def _value(self, name: str, value: Any, depth: int) -> Any:
        if name.lower() in self._names and not isinstance(value, bool | int | float | None):
            return _described(value)
        if depth >= _MAX_DEPTH:
            return _described(value)
        if type(value) is str:
            return value
        if isinstance(value, Mapping):
            sensitive, shown = self._names, depth + 1 < _MAX_DEPTH
            return {
                key: inner
                if (kind := type(inner)) in _HARMLESS
                or (kind is str and shown and type(key) is str and key.lower() not in sensitive)
                else self._value(str(key), inner, depth + 1)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._value("", inner, depth + 1) for inner in value]
        return value


class _Standing:
    """What every entry has: what is bound for the process, its level and its time. One processor for structlog's own
    two and ours: a busy router's every request has a line."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __call__(self, logger: Any, method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for name, value in self._values.items():
            entry.setdefault(name, value)
        entry["level"] = _LEVEL_OF.get(method, method)
        entry["timestamp"] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return entry


def _described(value: Any) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"<{type(value).__name__}{size}>"


def _renderers(out: TextIO) -> list[structlog.typing.Processor]:
    if out.isatty():
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [_json]


def _json(logger: Any, method: str, entry: MutableMapping[str, Any]) -> str:
    """A tenth of json.dumps' time, which counts where every request has its line."""
    if "exc_info" in entry:
        entry = structlog.processors.format_exc_info(logger, method, entry)
    return orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
