"""An engine with a host tier whose copies run when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.loop import Engine, EngineSpec
from engine.models.oracle import OracleRunner
from engine.tiers.build import Ways
from engine.tiers.carriers import Carrier, Found, Pair, Part, Plain
from engine.tiers.tiers import Tiers
from engine.tiers.work import Inline, Job, Lane
from runtime.clock import FakeClock
from tests.unit.engine_core.lab import VOCAB, Lab, config


class Manual:
    """A lane that runs nothing by itself, until it is told to run all there is and everything that comes."""

    def __init__(self) -> None:
        self.waiting: list[Job] = []
        self._over: list[Job] = []
        self._open = self._closed = False

    def submit(self, job: Job) -> None:
        assert not self._closed, "a job after the end"
        self.waiting.append(job)
        if self._open:
            self.run_all()

    def open(self) -> None:
        self._open = True
        self.run_all()

    def step(self, index: int = 0) -> None:
        """Run one of the waiting jobs."""
        job = self.waiting.pop(index)
        job.execute()
        self._over.append(job)

    def run_all(self) -> None:
        while self.waiting:
            self.step()

    def take(self) -> list[Job]:
        over, self._over = self._over, []
        return over

    def close(self) -> None:
        self._closed = True
        self.run_all()


class Lazy(Plain):
    """Copies nothing and says it has."""

    def move(self, part: Part, pairs: Sequence[Pair], down: bool) -> Found | None:
        return None


def carry(*_: object) -> Carrier:
    return Plain()


@dataclass
class TierLab(Lab):
    """host_pages: that can be handed out. Device pages that have gone down are poisoned."""

    host_pages: int = 64
    lane: Lane = field(default_factory=Inline)
    lane_of_disk: Lane = field(default_factory=Inline)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        made = self.runner or OracleRunner(VOCAB, self.max_model_len, state=self.state)
        cfg = config(**{"host_pool_tokens": self.host_pages * 16, "host_poison": True, **self.changes})
        spec = EngineSpec(self.pages + 1, 2 * cfg.max_batch + 1 if self.state else 0, self.max_model_len)
        self.oracle = made
        self.engine = Engine(made, spec, cfg, self.clock, ways=self.ways())
        self.events = []

    def ways(self) -> Ways:
        return Ways(carry, lane=self.lane, disk_lane=self.lane_of_disk, layout="oracle")

    @property
    def tiers(self) -> Tiers:
        assert self.engine.tiers is not None
        return self.engine.tiers

    def settle(self) -> None:
        """Turns until nothing more goes down to the host by itself."""
        before = (-1, -1)
        counts = self.tiers.counts
        while before != (counts.stored, counts.stored_states) or self.tiers._jobs:
            before = (counts.stored, counts.stored_states)
            self.engine.turn()
            if isinstance(self.lane, Manual):
                self.lane.run_all()
            self.engine.turn()

    def check(self) -> None:
        super().check()
        self.tiers.check()

    def baseline(self) -> None:
        self.settle()
        self.engine.check_baseline()
