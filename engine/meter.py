"""What a worker has done and holds, for its /metrics: counts by leg, and gauges from its reports of load."""

from __future__ import annotations

from protos.v1 import common_pb2
from runtime.metrics import Metrics

_STAGES = ("queue", "prefill", "handoff_wait", "transfer", "checksum", "decode")
_GAUGES = (
    "running", "waiting", "queued_prefill_tokens", "pages_total", "pages_free", "pages_cached", "pages_reserved",
    "slots_total", "slots_free", "leases", "quarantined_pages",
)  # fmt: skip


class Meter:
    """Every prompt token of a leg that got its KV is counted once, by where that came from: computed here, found in
    the prefix cache here, or transferred from another worker. So the three add up to the prompts."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.metrics = metrics or Metrics()
        make = self.metrics
        self._prompts = make.counter(
            "pdserve_worker_prompt_tokens", "Prompt tokens by where their KV came from", ["leg", "source"]
        )
        self._generated = make.counter("pdserve_worker_generated_tokens", "Tokens sampled", ["leg"])
        self._bytes = make.counter("pdserve_worker_transfer_bytes", "Bytes read from other workers")
        self._failed = make.counter("pdserve_worker_failed_legs", "Legs that ended with an error", ["leg", "reason"])
        self._stages = make.histogram("pdserve_worker_stage_seconds", "Time of finished legs", ["leg", "stage"])
        self._load = {
            name: make.gauge(f"pdserve_worker_{name}", name.replace("_", " ").capitalize()) for name in _GAUGES
        }

    def prompt(self, leg: str, tokens: int, times: common_pb2.StageTimes, *, remote: bool = False) -> None:
        """The KV of a prompt (and of what a continuation brought with it) is there, whole."""
        computed = not remote or times.recomputed_tokens > 0
        self._prompts.labels(leg, "cached").inc(times.cached_tokens)
        self._prompts.labels(leg, "computed" if computed else "transferred").inc(tokens - times.cached_tokens)
        self._bytes.inc(times.transfer_bytes)

    def generated(self, leg: str, tokens: int) -> None:
        self._generated.labels(leg).inc(tokens)

    def finished(self, leg: str, times: common_pb2.StageTimes) -> None:
        """A leg's stages; one that took no time was not part of it."""
        for stage in _STAGES:
            seconds = getattr(times, f"{stage}_s")
            if seconds:
                self._stages.labels(leg, stage).observe(seconds)

    def failed(self, leg: str, reason: str) -> None:
        self._failed.labels(leg, reason).inc()

    def load(self, load: common_pb2.Load) -> None:
        for name, gauge in self._load.items():
            gauge.set(getattr(load, name))
