"""Keys, salts, permits and the line."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from router.line import Line
from router.tenants import Keys, Permits, Salts, Tenant
from runtime.config import Config
from runtime.errors import InvalidRequest, QuotaExceeded, Saturated, Unauthenticated


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys(tmp_path: Path, text: str) -> Keys:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    return Keys.load(Config(api_keys_file=str(file)))


def test_a_key_names_its_tenant(tmp_path: Path) -> None:
    found = keys(tmp_path, f"{digest('k1')}: {{tenant: acme, max_inflight: 3}}\n{digest('k2')}: {{tenant: other}}\n")

    assert found.tenant("Bearer k1") == Tenant("acme", 3)
    assert found.tenant("bearer k2") == Tenant("other")


@pytest.mark.parametrize(
    "header", ["", "k1", "Bearer", "Bearer ", "Bearer wrong", "Basic k1", "Bearer k1 k1", "Bearer \ud800"]
)
def test_anything_but_a_configured_key_is_refused(tmp_path: Path, header: str) -> None:
    found = keys(tmp_path, f"{digest('k1')}: {{tenant: acme}}\n")

    with pytest.raises(Unauthenticated):
        found.tenant(header)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "k1: {tenant: a}",
        f"{hashlib.sha256(b'').hexdigest()}: {{tenant: a}}",
        f"{hashlib.sha256(b'k').hexdigest()}: {{tenant: ''}}",
        f"{hashlib.sha256(b'k').hexdigest()}: a",
        f"{hashlib.sha256(b'k').hexdigest()}: {{tenant: a, admin: true}}",
        f"{hashlib.sha256(b'k').hexdigest()}: {{tenant: a, max_inflight: -1}}",
        "a: [",
    ],
)
def test_a_file_that_would_let_somebody_in_by_mistake_stops_the_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        keys(tmp_path, text)

    assert refused.value.field == "api_keys_file"


def test_a_missing_file_of_keys_is_not_an_open_door(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        Keys.load(Config(api_keys_file=str(tmp_path / "none.yaml")))


def test_salts_never_meet() -> None:
    salts = Salts("secret")

    values = {
        salts.of(Tenant("org_1"), "2345"),
        salts.of(Tenant("org_12345"), ""),
        salts.of(Tenant("org_1"), ""),
        salts.of(Tenant(""), "org_12345"),
        Salts("other").of(Tenant("org_1"), ""),
    }

    assert len(values) == 5
    assert salts.of(Tenant("org_1"), "x") == Salts("secret").of(Tenant("org_1"), "x")
    assert Salts("").of(Tenant("a"), "") != Salts("").of(Tenant("a"), "")


def test_a_tenant_over_its_limit_is_told_so_and_others_are_not_touched() -> None:
    permits = Permits(10)
    small, other = Tenant("small", 2), Tenant("other")

    with permits.hold(small, 2), permits.hold(other, 1):
        with pytest.raises(QuotaExceeded), permits.hold(small, 1):
            pass
        with pytest.raises(Saturated), permits.hold(other, 8):
            pass
        assert permits.inflight == 3

    assert permits.inflight == 0


def test_a_permit_comes_back_when_its_request_fails() -> None:
    permits = Permits(1)

    with pytest.raises(ZeroDivisionError), permits.hold(Tenant("a"), 1):
        raise ZeroDivisionError

    assert permits.inflight == 0


async def test_the_line_is_first_in_first_out_and_a_leaver_does_not_hold_it_up() -> None:
    line, order = Line(5), list[int]()
    gates = [asyncio.Event() for _ in range(4)]

    async def wait(number: int) -> None:
        async with line.place():
            order.append(number)
            await gates[number].wait()

    tasks = [asyncio.create_task(wait(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    for gate in gates:
        gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert order == [0, 2, 3]
    assert len(line) == 0


async def test_a_full_line_takes_nobody() -> None:
    line = Line(1)
    async with line.place():
        with pytest.raises(Saturated) as refused:
            async with line.place():
                pass

    assert (refused.value.reason, refused.value.retry_after_ms > 0) == ("queue_full", True)
