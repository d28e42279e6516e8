"""What a worker has done and holds, for its /metrics: counts by leg, and gauges from its reports of load."""

from __future__ import annotations

from prometheus_client import Counter

from protos.v1 import common_pb2
from runtime.metrics import Metrics

_STAGES = ("queue", "fetch", "prefill", "handoff_wait", "transfer", "checksum", "decode")
_GAUGES = (
    "running", "waiting", "queued_prefill_tokens", "pages_total", "pages_free", "pages_cached", "pages_reserved",
    "slots_total", "slots_free", "leases", "quarantined_pages", "swapped",
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
        self._fetches = make.counter("pdserve_worker_prefix_fetches", "Prefixes sought elsewhere", ["outcome"])
        self._fetched = make.counter("pdserve_worker_prefix_fetched_tokens", "Prompt tokens that came with them")
        self._fetch_s = make.counter("pdserve_worker_prefix_fetch_seconds", "Seconds they took", ["outcome"])
        self._fetch_bytes = make.counter("pdserve_worker_prefix_fetch_bytes", "Bytes read for them")
        self._offers = make.counter("pdserve_worker_prefix_offers", "Prefixes offered to others", ["tier"])
        tier = ["tier", "direction"]
        self._tier_bytes = make.counter("pdserve_worker_tier_bytes", "Bytes copied between tiers", tier)
        self._tier_seconds = make.counter("pdserve_worker_tier_seconds", "Seconds those copies took", tier)
        self._tier_hits = make.counter("pdserve_worker_tier_hit_pages", "Pages fetched for a prompt", ["tier"])
        self._tier_states = make.gauge("pdserve_worker_tier_states", "Recurrent states kept below the device", ["tier"])
        self._states_lost = make.counter("pdserve_worker_states_lost", "States that left the device without a copy")
        self._state_hits = make.counter("pdserve_worker_tier_hit_states", "States fetched for a prompt", ["tier"])
        self._tier_pages = make.gauge("pdserve_worker_tier_pages", "Pages by owner", ["tier", "owner"])
        self._tier_faults = make.counter("pdserve_worker_tier_faults", "Copies that failed or were found damaged")
        self._swaps = make.counter("pdserve_worker_swaps", "Running requests put aside and taken back", ["direction"])
        self._totals: dict[Counter, float] = {}
        self._load = {
            name: make.gauge(f"pdserve_worker_{name}", name.replace("_", " ").capitalize()) for name in _GAUGES
        }

    def prompt(self, leg: str, tokens: int, times: common_pb2.StageTimes, *, remote: bool = False) -> None:
        """The KV of a prompt (and of what a continuation brought with it) is there, whole."""
        computed = not remote or times.recomputed_tokens > 0
        self._prompts.labels(leg, "cached").inc(times.cached_tokens)
        self._prompts.labels(leg, "computed" if computed else "transferred").inc(tokens - times.cached_tokens)
        self._bytes.inc(times.transfer_bytes)

    def fetched(self, outcome: str, seconds: float, tokens: int, nbytes: int) -> None:
        """A prefix was sought at another worker."""
        self._fetches.labels(outcome).inc()
        self._fetch_s.labels(outcome).inc(seconds)
        self._fetched.inc(tokens)
        self._fetch_bytes.inc(nbytes)

    def offered(self, tier: str) -> None:
        """A prefix was sought here. tier: where it lies, "" = not here."""
        self._offers.labels(tier or "none").inc()

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
        for tier in load.tiers:
            self._tier(tier)

    def _tier(self, tier: common_pb2.TierLoad) -> None:
        free = tier.pages_total - tier.pages_published - tier.pages_held
        for owner, pages in (("cache", tier.pages_published), ("held", tier.pages_held), ("free", max(free, 0))):
            self._tier_pages.labels(tier.tier, owner).set(pages)
        for direction in ("down", "up"):
            self._grown(self._tier_bytes.labels(tier.tier, direction), getattr(tier, f"bytes_{direction}"))
            self._grown(self._tier_seconds.labels(tier.tier, direction), getattr(tier, f"seconds_{direction}"))
        self._grown(self._tier_hits.labels(tier.tier), tier.hit_pages)
        if tier.states_total:
            self._tier_states.labels(tier.tier).set(tier.states_published)
            self._grown(self._state_hits.labels(tier.tier), tier.hit_states)
        if tier.tier == "host":
            self._grown(self._states_lost, tier.lost_states)
            self._grown(self._swaps.labels("out"), tier.swapped_out)
            self._grown(self._swaps.labels("in"), tier.swapped_in)
            self._grown(self._tier_faults, tier.faults)

    def _grown(self, counter: Counter, total: float) -> None:
        """Bring a counter to a total that somebody else counts."""
        counter.inc(total - self._totals.get(counter, 0))
        self._totals[counter] = total
