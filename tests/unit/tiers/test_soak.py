"""Conversations on a pool of 30 % of what they touch, with host, disk and swap: every answer is the undisturbed one,
and in the end nothing is held. Engines and copies run on their own threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.api import EngineRequest, Event, Failed, Retention, Tokens
from engine.loop import Engine, EngineSpec
from engine.models.oracle import OracleRunner
from engine.tiers.build import Ways
from runtime import faults
from runtime.clock import SystemClock
from tests.unit.engine_core.lab import VOCAB, config, prompt, request, undisturbed

FAULTY = (
    "tier.load=delay:0.003",
    "tier.store=delay:0.003",
    "disk.read=delay:0.003",
    "disk.write=delay:0.003",
    "tier.corrupt=count*3@4",
)
HINTS = (Retention(), Retention(b"a", 2, 60.0), Retention(b"b", -1), Retention(b"c", ttl_s=0.05))


@dataclass
class Asked:
    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    failed: Failed | None = None
    cancelled: bool = False

    def sink(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                self.failed = event
                self.over.set()
            elif isinstance(event, Tokens):
                self.tokens += event.tokens
                if event.last:
                    self.over.set()


@dataclass
class Soak:
    """Twelve conversations of up to six turns share two beginnings. pages: 30 % of what all of it fills."""

    state: bool
    folder: Path
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        changes: dict[str, object] = {
            "max_batch": 6,
            "headroom_tokens": 8,
            "host_pool_tokens": 16 * 96,
            "disk_pool_bytes": 2048 * 256,
            "disk_pool_dir": str(self.folder),
            "host_poison": True,
        }
        settings = config(**changes)
        spec = EngineSpec(self.pages() + 1, 13 if self.state else 0, 2048)
        runner = OracleRunner(VOCAB, 2048, state=self.state)
        self.engine = Engine(runner, spec, settings, SystemClock(), Ways(layout="oracle"))
        self.talks = [prompt(64 + 16 * (i % 3), seed=i % 2) + prompt(20, seed=i) for i in range(12)]
        self.engine.start_loop()

    @staticmethod
    def pages() -> int:
        return int(0.3 * 12 * (84 + 5 * 34) / 16)

    def run(self, count: int, aborts: bool) -> None:
        open_: list[tuple[int, Asked]] = []
        for number in range(count):
            free = [i for i in range(12) if i not in {talk for talk, _ in open_}]
            talk = self.random.choice(free)
            open_.append((talk, self.ask(f"r{number}", talk)))
            if aborts and self.random.random() < 0.2:
                self.abort(self.random.choice(open_)[1])
            while len(open_) >= 6 or (open_ and number == count - 1):
                self.close(*open_.pop(0))

    def ask(self, name: str, talk: int) -> Asked:
        seeded = self.random.random() < 0.4
        sampling = {"temperature": 0.8, "seed": talk} if seeded else {}
        made = request(
            name,
            self.talks[talk],
            max_tokens=self.random.choice([1, 12, 30]),
            retention=self.random.choice(HINTS),
            **sampling,  # type: ignore[arg-type]
        )
        asked = Asked(made)
        self.engine.submit(made, asked.sink)
        return asked

    def abort(self, asked: Asked) -> None:
        asked.cancelled = True
        self.engine.cancel(asked.request.key)

    def close(self, talk: int, asked: Asked) -> None:
        done = asked.cancelled or asked.over.wait(60.0)
        assert asked.failed is None, asked.failed
        assert done, "it never ended"
        right = undisturbed(asked.request.tokens, asked.request.sampling, state=self.state)[0]
        assert tuple(asked.tokens) == right[: len(asked.tokens)]
        if asked.cancelled:
            return
        assert len(asked.tokens) == len(right)
        longer = (*asked.request.tokens, *asked.tokens, talk, 7, 9, 11)
        self.talks[talk] = (
            longer if len(longer) < 250 else prompt(64, seed=talk % 2) + prompt(20, seed=50 + len(longer))
        )

    def end(self) -> None:
        self.engine.stop()
        self.engine.check_baseline()


def soaked(folder: Path, state: bool, count: int, aborts: bool, fault: tuple[str, ...]) -> Soak:
    soak = Soak(state, folder)
    with faults.armed(*fault):
        soak.run(count, aborts)
    tiers = soak.engine.tiers
    assert tiers is not None
    soak.end()
    assert tiers.counts.stored > 0
    return soak


@pytest.mark.parametrize(("state", "fault"), [(True, ()), (False, FAULTY)], ids=["state", "dense, slow and damaged"])
def test_under_pressure_every_answer_is_the_undisturbed_one(
    tmp_path: Path, state: bool, fault: tuple[str, ...]
) -> None:
    soaked(tmp_path, state, 40, aborts=bool(fault), fault=fault)


@pytest.mark.slow
@pytest.mark.parametrize("state", [False, True], ids=["dense", "state"])
@pytest.mark.parametrize("fault", [(), FAULTY], ids=["sound", "slow and damaged"])
def test_the_same_for_long(tmp_path: Path, state: bool, fault: tuple[str, ...]) -> None:
    soak = soaked(tmp_path, state, 250, aborts=bool(fault), fault=fault)
    assert soak.engine.tiers is not None
    counts = soak.engine.tiers.counts
    assert counts.hit_pages > 0
    assert counts.hit_states > 0 or not state
    assert counts.disk_states > 0 or not state
