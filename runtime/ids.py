"""Identifiers. Random parts come from the operating system, so they need no coordination and cannot be guessed."""

from __future__ import annotations

import os
import re
import threading
import time

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_epoch_lock = threading.Lock()
_epoch_last = [0]


def new_request_id() -> str:
    """128 random bits as 32 hex digits."""
    return os.urandom(16).hex()  # what secrets.token_hex() comes to after four more calls: every request has two


def new_worker_id(role: str) -> str:
    """`<role>-<8 hex digits>`, e.g. "prefill-1f0c9a2b"."""
    return f"{role}-{os.urandom(4).hex()}"


def new_epoch() -> int:
    """A uint64 that grows with every start of a worker on one machine: microseconds since 1970.

    Strictly growing inside a process too, even when the wall clock is set back meanwhile.
    """
    with _epoch_lock:
        _epoch_last[0] = max(time.time_ns() // 1000, _epoch_last[0] + 1)
        return _epoch_last[0]


def new_traceparent() -> str:
    """A fresh W3C trace context, sampled: `00-<trace id>-<span id>-01`."""
    digits = os.urandom(24).hex()
    trace, span = digits[:32], digits[32:]
    if trace == _NO_TRACE or span == _NO_SPAN:
        return new_traceparent()
    return f"00-{trace}-{span}-01"


def child_traceparent(parent: str) -> str:
    """The same trace with a new span id; a new trace where `parent` is empty or malformed (as W3C asks)."""
    if not parent or not is_traceparent(parent):
        return new_traceparent()
    version, trace_id, _, flags = parent.split("-")
    span = os.urandom(8).hex()
    while span == _NO_SPAN:
        span = os.urandom(8).hex()
    return f"{version}-{trace_id}-{span}-{flags}"


def is_traceparent(value: str) -> bool:
    return _TRACEPARENT.fullmatch(value) is not None


def trace_id(traceparent: str) -> str:
    """The 32 hex digits that name the trace, or "" for a malformed value."""
    return traceparent.split("-")[1] if is_traceparent(traceparent) else ""
