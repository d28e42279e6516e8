"""What the elastic controller looks at, what it may do, and the rules between: plain values, no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from runtime.config import Config, RoleName

Pool = Literal["prefill", "decode"]
POOLS: tuple[Pool, Pool] = ("prefill", "decode")

CEILING = 2.0
"""A pressure above this is not worse: the smoothed one must come down again when the load has gone."""


@dataclass(frozen=True, slots=True)
class Member:
    """One worker as the registry knows it. fresh: its load is heard of. load: requests it holds."""

    name: str
    epoch: int
    role: RoleName
    ready: bool = True
    draining: bool = False
    fresh: bool = True
    load: float = 0.0

    @property
    def usable(self) -> bool:
        return self.ready and not self.draining

    def serves(self, pool: Pool) -> bool:
        return self.role in (pool, "both")


@dataclass(frozen=True, slots=True)
class View:
    """The fleet now. prefill, decode: the pools' pressures; 1 = full, or at the objective."""

    members: tuple[Member, ...]
    prefill: float
    decode: float

    def member(self, name: str) -> Member | None:
        return next((one for one in self.members if one.name == name), None)

    def pressure(self, pool: Pool) -> float:
        return self.prefill if pool == "prefill" else self.decode

    def serving(self, pool: Pool) -> list[Member]:
        return [one for one in self.members if one.usable and one.serves(pool)]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one pool, workers that do both included. most: 0 = nobody is asked for more or fewer."""

    least: int = 1
    most: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """home: how many of each role were configured. drain_s: how long a drain may take; what runs then goes on in the
    new role. start_s: a worker asked for and not there by then is not waited for."""

    high: float = 0.8
    low: float = 0.4
    dwell_s: float = 10.0
    cooldown_s: float = 30.0
    drain_s: float = 30.0
    start_s: float = 300.0
    bounds: Mapping[Pool, Bounds] = field(default_factory=lambda: dict.fromkeys(POOLS, Bounds()))
    home: Mapping[RoleName, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> Rules:
        return cls(
            high=config.elastic_high,
            low=config.elastic_low,
            dwell_s=config.elastic_dwell_s,
            cooldown_s=config.elastic_cooldown_s,
            drain_s=config.drain_timeout_s,
            bounds={
                "prefill": Bounds(config.prefill_min, config.prefill_max),
                "decode": Bounds(config.decode_min, config.decode_max),
            },
            home={"prefill": config.prefill, "decode": config.decode, "both": config.both},
        )

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


# --- what to do


@dataclass(frozen=True, slots=True)
class Nothing:
    why: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take a worker out of the choice, or put it back. Answered by Elastic.drained()."""

    worker: str
    on: bool


@dataclass(frozen=True, slots=True)
class SetRole:
    worker: str
    role: RoleName


@dataclass(frozen=True, slots=True)
class Add:
    """Ask Ray for one more. Answered by Elastic.added()."""

    role: Pool


@dataclass(frozen=True, slots=True)
class Remove:
    """Give one back to Ray: drained, or never come."""

    worker: str


Action = Nothing | Drain | SetRole | Add | Remove


# --- pressure that lasts


@dataclass(slots=True)
class Gauge:
    """A pool's smoothed pressure, and since when it is over the one threshold or under the other."""

    value: float | None = None
    hot_since: float | None = None
    cold_since: float | None = None

    def feed(self, raw: float, now: float, elapsed_s: float, rules: Rules) -> None:
        raw = min(raw, CEILING)
        weight = 1 - math.exp(-elapsed_s / (rules.dwell_s / 2))
        self.value = raw if self.value is None else self.value + weight * (raw - self.value)
        hot, cold = self.value >= rules.high, self.value <= rules.low
        self.hot_since = (self.hot_since if self.hot_since is not None else now) if hot else None
        self.cold_since = (self.cold_since if self.cold_since is not None else now) if cold else None

    def forget(self) -> None:
        """The pool is another one, or was not looked at: nothing has lasted."""
        self.hot_since = self.cold_since = None

    def hot_for(self, now: float) -> float:
        return -1.0 if self.hot_since is None else now - self.hot_since

    def cold_for(self, now: float) -> float:
        return -1.0 if self.cold_since is None else now - self.cold_since
