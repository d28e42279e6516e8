"""From what workers and the router report to two pressures."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from deploy.pressure import (
    FIRST_SPEED,
    STALE_S,
    Goals,
    Hearing,
    Measured,
    Sample,
    Totals,
    Window,
    look,
    parsed,
    scrape,
    together,
)
from protos.v1 import common_pb2, registry_pb2
from router.stats import Stats
from runtime.metrics import Metrics

GOALS = Goals(ttft_s=2.0, ttft_s_per_1k=0.5, tpot_s=0.05, max_batch=10)
ROLES = {"p": common_pb2.ROLE_PREFILL, "d": common_pb2.ROLE_DECODE, "b": common_pb2.ROLE_BOTH}


def record(name: str, **load: Any) -> registry_pb2.WorkerRecord:
    """Named by its role: "p0" is a prefill worker."""
    said = common_pb2.Load(**({"pages_total": 100, "pages_free": 100, "sequence": 1} | load))
    return registry_pb2.WorkerRecord(worker_id=name, epoch=1, role=ROLES[name[0]], ready=True, load=said)


def pressures(*records: registry_pb2.WorkerRecord, **measured: float) -> tuple[float, float]:
    view = look(records, Hearing(), Measured(**measured), GOALS, 0.0)
    return round(view.prefill, 3), round(view.decode, 3)


def test_prompts_that_wait_are_seconds_of_each_worker_against_the_objective() -> None:
    waiting = record("p0", queued_prefill_tokens=8000)
    assert pressures(waiting, record("d0"), speed=4000.0) == (1.0, 0.0)
    assert pressures(waiting, record("p1"), record("d0"), speed=4000.0) == (0.5, 0.0)
    assert pressures(waiting, record("b1"), record("d0"), speed=4000.0) == (0.5, 0.0), "one that does both helps"
    assert pressures(waiting, record("d0"), speed=4000.0, prompt_tokens=4000.0) == (0.5, 0.0), "long prompts may wait"
    assert pressures(waiting, record("d0")) == (round(8000 / FIRST_SPEED / 2, 3), 0.0)


def test_a_slow_first_token_counts_only_while_prompts_wait() -> None:
    assert pressures(record("p0", queued_prefill_tokens=1), record("d0"), ttft_s=3.0) == (1.5, 0.0)
    assert pressures(record("p0"), record("d0"), ttft_s=3.0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("load", "pressure"),
    [
        ({"running": 4, "waiting": 2}, 0.6),
        ({"pages_free": 25}, 0.75),
        ({"slots_total": 10, "slots_free": 1}, 0.9),
        ({"swapped": 1}, 1.0),
    ],
)
def test_whatever_runs_out_first_presses_on_decode(load: dict[str, int], pressure: float) -> None:
    assert pressures(record("p0"), record("d0", **load)) == (0.0, pressure)


def test_places_kept_for_prompts_that_wait_are_no_pressure_on_decode() -> None:
    waiting = record("p0", queued_prefill_tokens=30 * 16, waiting=3)
    full = record("d0", pages_free=40, slots_total=10, slots_free=5)
    assert pressures(full)[1] == 0.6
    assert pressures(waiting, full)[1] == 0.3, "30 of 60 pages, 3 of 5 slots"
    assert pressures(record("p0", queued_prefill_tokens=99999), full)[1] == 0.5


def test_slow_tokens_count_only_where_requests_share_a_worker() -> None:
    assert pressures(record("d0", running=2), tpot_s=0.04) == (0.0, 0.8)
    assert pressures(record("d0", running=1), tpot_s=0.04) == (0.0, 0.1)


def test_a_line_at_the_router_is_the_fuller_pools() -> None:
    assert pressures(record("p0"), record("d0", running=9), line=3.0) == (0.0, 1.0)
    assert pressures(record("p0", queued_prefill_tokens=3000), record("d0"), line=3.0)[0] == 1.0


def test_workers_that_cannot_be_chosen_or_are_silent_do_not_count() -> None:
    hearing = Hearing()
    full, idle = record("d0", pages_free=0), record("d1")
    assert look([full, idle], hearing, Measured(), GOALS, 0.0).decode == 0.5
    idle.load.sequence = 2
    view = look([full, idle], hearing, Measured(), GOALS, STALE_S + 1)
    assert view.decode == 0.0
    assert [one.fresh for one in view.members] == [False, True]
    full.load.sequence = 2
    full.draining = True
    view = look([full, idle], hearing, Measured(), GOALS, STALE_S + 2)
    assert view.decode == 0.0
    assert [one.usable for one in view.members] == [False, True]


def test_the_routers_own_metrics_are_understood() -> None:
    metrics = Metrics()
    Stats(metrics)
    metrics.gauge("pdserve_router_queue", "waiting").set(3)
    metrics.histogram("pdserve_ttft_seconds", "").observe(0.5)
    metrics.histogram("pdserve_itl_seconds", "").observe(0.02)
    stage = metrics.histogram("pdserve_stage_seconds", "", ["stage"])
    stage.labels("queue").observe(0.1)
    stage.labels("prefill").observe(0.25)
    prompt = metrics.counter("pdserve_prompt_tokens", "", ["source"])
    prompt.labels("computed").inc(700)
    prompt.labels("cached").inc(300)
    metrics.gauge("pdserve_router_workers_usable", "", ["role"]).labels("both").set(2)
    sample = parsed(metrics.render().decode())
    assert sample == Sample(3, 0.5, 1, 0.1, 0.25, 0.02, 1, 700, 300, {"both": 2})


def test_of_several_routers_the_counts_add_up_and_a_worker_is_there_when_all_see_it() -> None:
    one = Sample(3, 0.5, 1, 0.1, 0.25, 0.02, 1, 700, 300, {"both": 2, "prefill": 1})
    two = Sample(1, 1.5, 2, 0.2, 0.25, 0.02, 2, 100, 0, {"both": 1, "prefill": 2})
    whole = together([one, two])
    assert (whole.line, whole.ttft_s, whole.requests, whole.computed) == (4, 2.0, 3, 800)
    assert whole.usable == {"both": 1, "prefill": 1}
    assert together([one]) == one


def sample(requests: float, ttft_s: float = 0.0, queue_s: float = 0.0, **fields: Any) -> Sample:
    return Sample(requests=requests, answers=requests, ttft_s=ttft_s, queue_s=queue_s, **fields)


def test_means_are_of_the_last_while_and_waiting_at_the_router_is_nobodys_prefill() -> None:
    window = Window(10.0)
    window.add(0.0, sample(10, 100.0, 0.0, itl_s=9.0, computed=50_000, prefill_s=50.0))
    assert window.measured() == Measured(prompt_tokens=5000, speed=1000)
    window.add(5.0, sample(12, 106.0, 4.0, itl_s=9.5, computed=52_000, cached=1000, prefill_s=51.0))
    assert window.measured() == Measured(0.0, 1.0, 0.25, 1500, 2000)
    window.add(16.0, sample(12, 106.0, 4.0, itl_s=9.5, computed=52_000, cached=1000, prefill_s=51.0))
    assert window.measured() == Measured(0.0, None, None, 1500, 2000), "what was learned stays"


def test_a_router_that_starts_again_counts_from_nothing() -> None:
    totals, window = Totals(), Window(10.0)
    window.add(0.0, totals.add([sample(10, 100.0)]))
    window.add(1.0, totals.add([sample(0)]))
    window.add(2.0, totals.add([sample(1, 0.5)]))
    assert window.measured().ttft_s == 0.5


def test_of_several_routers_one_that_starts_again_takes_nothing_from_what_the_others_count() -> None:
    totals, window = Totals(), Window(10.0)
    window.add(0.0, totals.add([Sample(requests=10, ttft_s=100.0, line=4), sample(100, 50.0)]))
    window.add(1.0, totals.add([sample(2, 1.0), sample(120, 60.0)]))
    window.add(2.0, totals.add([sample(4, 2.0), sample(140, 70.0)]))
    measured = window.measured()
    assert measured.ttft_s == (2.0 + 20.0) / (4 + 40)
    assert measured.line == 0, "who waited at the first life of one waits no more"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npdserve_router_queue 1\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\npds",
        b"HTTP/1.1 200 OK\r\n\r\n\xff",
        b"HTTP/1.1 200 OK\r\n\r\npdserve_router_queue{\n",
    ],
)
def test_half_an_answer_of_a_router_that_dies_is_one_of_the_errors_that_are_expected(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def once() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        with pytest.raises((OSError, ValueError)):
            scrape(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()


def test_a_gauge_without_its_label_is_nobodys() -> None:
    assert parsed("pdserve_router_workers_usable 3\n").usable == {"": 3.0}
