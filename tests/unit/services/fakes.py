"""An engine that does only what a test tells it to, behind the real EnginePort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.api import EngineLoad, EngineRequest, Event, Free, Needs, Refused, Reserved, Sink
from engine.face import Limits, Worker, load_of
from kvtransfer.types import First, LegKey
from runtime.clock import FakeClock
from runtime.errors import PdserveError

EPOCH = 77


@dataclass(eq=False)
class Hold:
    released: int = 0

    def release(self) -> None:
        self.released += 1


@dataclass
class ScriptedEngine:
    """Records commands; emit() delivers events the way the loop does."""

    refuse: PdserveError | None = None
    submitted: dict[LegKey, EngineRequest] = field(default_factory=dict)
    sinks: dict[LegKey, Sink] = field(default_factory=dict)
    reserved: dict[LegKey, Needs] = field(default_factory=dict)
    started: dict[LegKey, tuple[First, ...]] = field(default_factory=dict)
    recomputed: list[LegKey] = field(default_factory=list)
    cancelled: list[LegKey] = field(default_factory=list)
    ended: list[tuple[LegKey, tuple[int, ...]]] = field(default_factory=list)
    given_away: list[tuple[LegKey, int]] = field(default_factory=list)

    def reserve(self, key: LegKey, needs: Needs) -> Reserved | Refused:
        free = Free(pages=9, slots=0, batch=4, queued_prefill_tokens=0)
        if self.refuse is not None:
            return Refused(self.refuse, free)
        self.reserved[key] = needs
        return Reserved(f"r-{len(self.reserved)}", 5.0, free)

    def cancel_reservation(self, reservation_id: str) -> bool:
        return reservation_id.startswith("r-")

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        if self.refuse is not None:
            raise self.refuse
        assert request.key not in self.submitted, "submitted twice"
        self.submitted[request.key] = request
        self.sinks[request.key] = sink

    def start(self, key: LegKey, first: Sequence[First]) -> None:
        self.started[key] = tuple(first)

    def recompute(self, key: LegKey) -> None:
        self.recomputed.append(key)

    def cancel(self, key: LegKey) -> None:
        self.cancelled.append(key)

    def end_choices(self, key: LegKey, choices: Sequence[int]) -> None:
        self.ended.append((key, tuple(choices)))

    def handover(self, key: LegKey, choice: int) -> None:
        self.given_away.append((key, choice))

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self.submitted), waiting=0, queued_prefill_tokens=0, pages_total=9, pages_free=9,
            pages_cached=0, pages_reserved=0, slots_total=0, slots_free=0, step=3, steps_alive_at=0.0,
        )  # fmt: skip

    def drain(self, on: bool) -> None:
        raise AssertionError("services do not drain the engine")

    def emit(self, *events: Event) -> None:
        """All events of one step, each sink called once with its own."""
        by_sink: dict[Sink, list[Event]] = {}
        for event in events:
            by_sink.setdefault(self.sinks[event.key], []).append(event)
        for sink, own in by_sink.items():
            sink(own)


def worker(engine: ScriptedEngine, clock: FakeClock) -> Worker:
    return Worker(
        worker_id="w-1",
        epoch=EPOCH,
        address="127.0.0.1:9",
        pid=4711,
        transport="inprocess",
        engine=engine,
        clock=clock,
        limits=Limits(vocab_size=256, max_model_len=4096, max_n=8, max_top_logprobs=5, max_logit_bias=4),
        root_of=lambda salt: salt.ljust(32, b"\0")[:32],
        load=lambda: load_of(engine.load(), leases=0, quarantined_pages=0, sequence=1),
    )
