"""An engine on the oracle model, a fake clock and no thread: every turn is made by the test."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import Admitted, EngineRequest, Event, Failed, Mode, PromptScores, Retention, SourceDone, Tokens
from engine.loop import Engine, EngineSpec
from engine.models.oracle import OracleRunner
from engine.plan import SamplingParams
from engine.runner_api import Runner
from kvtransfer.hashing import root
from kvtransfer.types import LegKey, Region
from runtime.clock import FakeClock
from runtime.config import Config

ROOT = root(b"tenant", "oracle", "1")
VOCAB = 97


def config(**changes: object) -> Config:
    """Small chunks (below what a real configuration allows), so that short prompts have several."""
    small = {"model": "oracle", "max_batch": 4, "chunk_tokens": 32, "max_batched_tokens": 64, "headroom_tokens": 16}
    return Config().model_copy(update={**small, **changes})


@dataclass
class Lab:
    """pages: that can be handed out."""

    pages: int = 64
    state: bool = False
    changes: dict[str, object] = field(default_factory=dict)
    runner: Runner | None = None
    max_model_len: int = 2048

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        made = self.runner or OracleRunner(VOCAB, self.max_model_len, state=self.state)
        cfg = config(**self.changes)
        spec = EngineSpec(self.pages + 1, 2 * cfg.max_batch + 1 if self.state else 0, self.max_model_len)
        self.oracle = made
        self.engine = Engine(made, spec, cfg, self.clock)
        self.events: list[Event] = []

    def submit(self, request: EngineRequest) -> LegKey:
        self.engine.submit(request, self.events.extend)
        return request.key

    def run(self, limit: int = 2000) -> None:
        """Turns until nothing runs."""
        for _ in range(limit):
            if not self.engine.turn():
                return
        raise AssertionError("it runs for ever")

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.engine.turn()

    def of(self, key: LegKey) -> list[Event]:
        return [event for event in self.events if event.key == key]

    def tokens(self, key: LegKey, choice: int = 0) -> list[int]:
        """What a choice has said, after checking that its sequence numbers have no gap and nothing follows its end."""
        said: list[int] = []
        events = [e for e in self.of(key) if isinstance(e, Tokens) and e.choice == choice]
        for event in events:
            assert event.first_sequence == events[0].first_sequence + len(said), "a gap or a repeat"
            said += event.tokens
        assert all(event.finish == 0 for event in events[:-1]), "tokens after the end"
        return said

    def finish(self, key: LegKey, choice: int = 0) -> int:
        return next((e.finish for e in self.of(key) if isinstance(e, Tokens) and e.choice == choice and e.finish), 0)

    def ends(self, key: LegKey) -> int:
        """Terminal events."""
        return sum(isinstance(e, SourceDone | Failed) or (isinstance(e, Tokens) and e.last) for e in self.of(key))

    def admitted(self, key: LegKey) -> Admitted:
        return next(e for e in self.of(key) if isinstance(e, Admitted))

    def done(self, key: LegKey) -> SourceDone:
        return next(e for e in self.of(key) if isinstance(e, SourceDone))

    def failed(self, key: LegKey) -> Failed:
        return next(e for e in self.of(key) if isinstance(e, Failed))

    def scores(self, key: LegKey) -> list[PromptScores]:
        return [e for e in self.of(key) if isinstance(e, PromptScores)]

    def check(self) -> None:
        self.engine.pages.check()
        self.engine.slots.check()
        self.engine.cache.check()

    def memory(self) -> list[NDArray[np.uint8]]:
        """[items, bytes] of every region, from its address, as a transport sees it."""
        return [view(region) for region in self.engine.regions()]


def view(region: Region) -> NDArray[np.uint8]:
    raw = (ctypes.c_uint8 * region.length).from_address(region.base)
    return np.ctypeslib.as_array(raw).reshape(-1, region.stride)


def request(
    name: str,
    tokens: Sequence[int],
    mode: Mode = Mode.LOCAL,
    *,
    n: int = 1,
    choice: int = 0,
    prompt_len: int = 0,
    deadline: float = 1e9,
    root: bytes = ROOT,
    reservation_id: str = "",
    priority: int = 0,
    due: float | None = None,
    retention: Retention = Retention(),
    **sampling: object,
) -> EngineRequest:
    leg = "prefill" if mode is Mode.SOURCE else "decode"
    return EngineRequest(
        key=LegKey(name, leg, 1),
        mode=mode,
        tokens=tuple(tokens),
        prompt_len=prompt_len or len(tokens),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        root=root,
        deadline=deadline,
        n=n,
        choice=choice,
        reservation_id=reservation_id,
        priority=priority,
        retention=retention,
        due=due,
    )


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 31 + 7 * i + i * i) % VOCAB for i in range(length))


@lru_cache(maxsize=4096)
def undisturbed(
    tokens: tuple[int, ...], sampling: SamplingParams, n: int = 1, state: bool = False
) -> tuple[tuple[int, ...], ...]:
    """What each choice says when the request is alone in a large pool without a cache."""
    lab = Lab(pages=1024, state=state, changes={"prefix_cache": False, "max_batch": 64})
    work = EngineRequest(LegKey("r", "decode", 1), Mode.LOCAL, tokens, len(tokens), sampling, ROOT, 1e9, n)
    key = lab.submit(work)
    lab.run()
    return tuple(tuple(lab.tokens(key, choice)) for choice in range(n))


def move(source: Lab, target: Lab, from_pages: Admitted, to_pages: Admitted) -> None:
    """A pull: what the target lacks, pages and slots, from one engine's memory into the other's."""
    held = to_pages.ready // 16
    paged = {c.name: c.paged for c in target.engine.model.components}
    for region, mine, theirs in zip(target.engine.regions(), target.memory(), source.memory(), strict=True):
        into = to_pages.pages[held:] if paged[region.component] else to_pages.slots
        out_of = from_pages.pages[held:] if paged[region.component] else from_pages.slots
        mine[list(into)] = theirs[list(out_of)]


def expected(length: int, max_tokens: int, seed: int = 0) -> list[int]:
    return list(undisturbed(prompt(length, seed), SamplingParams(max_tokens=max_tokens))[0])


def hand_off(p: Lab, d: Lab, name: str, tokens: tuple[int, ...], n: int = 1, **sampling: Any) -> None:
    """The prefill leg at P and the decode leg at D, up to and including the arrival of the pages."""
    source = p.submit(request(name, tokens, Mode.SOURCE, n=n, **sampling))
    remote = d.submit(request(name, tokens, Mode.REMOTE, n=n, **sampling))
    p.run()
    d.turns(1)
    move(p, d, p.admitted(source), d.admitted(remote))
    d.engine.start(remote, p.done(source).first)
    d.admitted(remote).hold.release()
    p.admitted(source).hold.release()
