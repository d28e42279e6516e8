"""An engine that stands still while the process around it answers: it is not alive, says so, and is replaced."""

from __future__ import annotations

import pytest

from pdserve import worker as composed
from protos.v1 import decode_pb2
from runtime import faults
from tests.integration.pd.inprocess import LocalWorker, config
from tests.integration.pd.router_client import SHORT, Link, request


async def test_a_worker_whose_engine_stands_still_ends_its_requests_and_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public report T065 (vllm-project/vllm#39863; vllm-project/vllm#36960), with a patience of half a second."""
    monkeypatch.setattr(composed, "ENGINE_STALL_S", 0.5)
    monkeypatch.setenv(faults.ENV, "")  # lets the step have its fail-point
    with faults.armed("engine.step=delay:5"):
        worker = await LocalWorker("decode", config("oracle")).start()
        link = Link(worker, "decode", "r")
        await link.open()
        work = request(SHORT)
        await link.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
        event = await link.next(work.ref, seconds=30)
        assert event.failed.error.reason == "worker_lost"
        assert await worker.stop() == composed.EXIT_FAULT
