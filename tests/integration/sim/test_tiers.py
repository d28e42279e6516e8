"""A whole simulated worker, its own threads and sockets: what it reports of the memory below its device."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml

from bench.sim.clock import DriftingClock
from bench.sim.live import configured
from bench.sim.profile import Profile, find
from protos.v1 import common_pb2, worker_pb2
from runtime.config import Config
from tests.integration.pd.inprocess import LocalWorker
from tests.integration.pd.router_client import Router, prompt, request
from tests.integration.router.scripted import until


async def test_a_simulated_worker_serves_from_host_and_disk_and_says_so(tmp_path: Path) -> None:
    content = yaml.safe_load(find("sim-h100-8b").read_text())
    content["pool"].update(kv_tokens=1024, host_kv_tokens=1024, disk_kv_tokens=16_384)
    content["tiers"] = {"host_Bps": 1e11, "disk_Bps": 1e11, "setup_s": 0.0002}
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(content))
    config = Config(model="oracle", sim=str(file), metrics_listen="", worker_id="one", role="both")
    worker = await LocalWorker("both", configured(config, Profile.load(file))).start()
    router = await Router(worker, worker).open()
    engine = worker.parts.engine
    assert isinstance(engine._clock, DriftingClock)
    tiers = engine.tiers
    assert tiers is not None
    host = disk = common_pb2.TierLoad()
    async with asyncio.timeout(60):
        while not (host.hit_pages and disk.hit_pages):  # once is enough, unless this machine stood still meanwhile
            for seed in range(6):
                tiers.costs.rates.clear()  # nor does it learn from that
                await router.local(request(prompt(600, seed % 5), max_tokens=2))
                await until(lambda: tiers.idle)
            host, disk = (await worker.admin.Describe(worker_pb2.DescribeRequest())).load.tiers
    assert (host.tier, host.pages_total, disk.tier, disk.pages_total) == ("host", 64, "disk", 1024)
    for tier in (host, disk):
        assert tier.seconds_up >= tier.bytes_up * 131072 / 1e11 * 0.3, "with noise"
    await router.close()
    assert await worker.stop() == 0
