"""Hints for cache entries: what a client may ask for, and what a worker is told."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import Retention as EngineRetention
from engine.face import MAX_RETENTION_MS, MAX_RETENTION_PRIORITY, retention_of
from protos.v1 import common_pb2
from router.params import IN_MEMORY_TTL_MS, MAX_TTL_MS, Retention, wire_retention
from router.params import MAX_RETENTION_PRIORITY as ROUTERS_PRIORITY
from runtime.errors import InvalidRequest
from tests.unit.router.test_requests import chat, completion


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({}, Retention()),
        ({"prompt_cache_key": "talk"}, Retention(session="talk")),
        ({"prompt_cache_retention": "in_memory"}, Retention(ttl_ms=IN_MEMORY_TTL_MS)),
        ({"prompt_cache_retention": "in-memory"}, Retention(ttl_ms=IN_MEMORY_TTL_MS)),
        ({"prompt_cache_retention": "24h"}, Retention(ttl_ms=24 * 3600 * 1000)),
        ({"cache_retention": {"session": "s", "priority": -10, "ttl_ms": 5}}, Retention("s", -10, 5)),
        ({"prompt_cache_key": "k", "cache_retention": {"priority": 10}}, Retention("k", 10)),
        ({"prompt_cache_retention": "24h", "cache_retention": {"session": "s"}}, Retention("s", 0, MAX_TTL_MS)),
    ],
)
@pytest.mark.parametrize("kind", [chat, completion])
def test_openais_fields_and_ours_say_the_same(kind: Any, fields: dict[str, Any], hint: Retention) -> None:
    assert kind(**fields).retention == hint


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt_cache_key": "k" * 257}, "prompt_cache_key"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({"cache_retention": {"priority": 11}}, "cache_retention.priority"),
        ({"cache_retention": {"priority": -11}}, "cache_retention.priority"),
        ({"cache_retention": {"priority": 1.5}}, "cache_retention.priority"),
        ({"cache_retention": {"ttl_ms": -1}}, "cache_retention.ttl_ms"),
        ({"cache_retention": {"ttl_ms": MAX_TTL_MS + 1}}, "cache_retention.ttl_ms"),
        ({"cache_retention": {"session": "s" * 257}}, "cache_retention.session"),
        ({"cache_retention": {"forever": True}}, "cache_retention.forever"),
        ({"cache_retention": {"session": "a"}, "prompt_cache_key": "b"}, "prompt_cache_key"),
        ({"cache_retention": {"ttl_ms": 1}, "prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ],
)
def test_what_is_out_of_bounds_or_said_twice_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.field == name


def test_two_tenants_sessions_of_one_name_are_two_and_a_worker_reads_no_name() -> None:
    one, other = (wire_retention(Retention("talk"), salt) for salt in (b"a", b"b"))
    assert one.session != other.session
    assert "talk" not in one.session
    assert one == wire_retention(Retention("talk"), b"a")
    assert wire_retention(Retention(), b"a") == common_pb2.Retention()


@pytest.mark.parametrize(("hint", "ttl_ms"), [((3, 0), IN_MEMORY_TTL_MS), ((3, 7), 7), ((-3, 0), 0), ((0, 0), 0)])
def test_a_raised_priority_ends(hint: tuple[int, int], ttl_ms: int) -> None:
    assert wire_retention(Retention("", *hint), b"a").ttl_ms == ttl_ms


def test_a_worker_takes_what_a_router_lets_through_and_no_more() -> None:
    assert (MAX_RETENTION_MS, MAX_RETENTION_PRIORITY) == (MAX_TTL_MS, ROUTERS_PRIORITY)
    wire = wire_retention(Retention("talk", 10, MAX_TTL_MS), b"a")
    assert retention_of(wire) == EngineRetention(wire.session.encode(), 10, 24 * 3600.0)
    assert retention_of(common_pb2.Retention()).plain
    for wrong in ({"priority": 11}, {"priority": -11}, {"ttl_ms": MAX_TTL_MS + 1}, {"session": "s" * 257}):
        with pytest.raises(InvalidRequest):
            retention_of(common_pb2.Retention(**wrong))
