"""Simulated workers offer and fetch prefixes as real ones do: it is their engine, leases and wire."""

from __future__ import annotations

import asyncio

from bench.sim.live import configured
from bench.sim.profile import Profile
from protos.v1 import common_pb2
from runtime.config import Config
from tests.integration.pd.inprocess import LocalWorker
from tests.integration.pd.router_client import Router, request
from tests.integration.pd.workers import baseline


async def test_a_simulated_worker_fetches_a_prefix_in_the_time_its_network_takes() -> None:
    own = Config(model="oracle", sim="sim-hybrid-48b", metrics_listen="", worker_id="one")
    made = configured(own, Profile.load("sim-hybrid-48b"))
    workers = [LocalWorker(role, made.model_copy(update={"worker_id": f"{role}-{n}"}))
               for n, role in enumerate(("prefill", "prefill", "decode"))]  # fmt: skip
    for worker in workers:
        await worker.start()
    p, q, d = workers
    one, two = await Router(p, d).open(), await Router(q, d).open()
    tokens = [4 + i % 90 for i in range(3000)]
    await one.disaggregated(request(tokens, max_tokens=3))
    named = common_pb2.PrefixSource(
        worker_id="prefill-0", epoch=p.epoch, address=p.address, tokens=2992, budget_ms=10_000
    )
    answer = await two.disaggregated(request(tokens, max_tokens=3, prefix_source=named))
    assert answer.prefill is not None
    assert answer.prefill.cached_tokens == answer.prefill.fetched_tokens == 2992
    assert answer.prefill.transfer_s > 0
    await baseline(p, q, d, seconds=5)
    await one.close()
    await two.close()
    await asyncio.gather(*(worker.stop() for worker in workers))
