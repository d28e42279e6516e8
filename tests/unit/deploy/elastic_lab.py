"""A fleet that does what the controller says, in made-up time: pressures follow from the work offered and the roles."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deploy.elastic import Elastic
from deploy.elastic_state import POOLS, Action, Add, Bounds, Drain, Member, Nothing, Pool, Remove, Rules, SetRole, View
from runtime.config import RoleName

RULES = Rules(dwell_s=10, cooldown_s=20, drain_s=15, start_s=60)


def rules(home: dict[RoleName, int], prefill: Bounds = Bounds(), decode: Bounds = Bounds()) -> Rules:
    return replace(RULES, home=home, bounds={"prefill": prefill, "decode": decode})


@dataclass
class Lab:
    """work: (prefill, decode) in workers' worth; a worker that does both gives half of itself to each.

    holds: requests a worker has while it drains, one less every second. deaf: workers that refuse every call.
    """

    rules: Rules
    work: tuple[float, float] = (0.0, 0.0)
    holds: int = 2
    deaf: set[str] = field(default_factory=set)
    ray: bool = True  # whether it starts what is asked for
    now: float = 1000.0
    members: dict[str, Member] = field(default_factory=dict)
    done: list[tuple[float, Action]] = field(default_factory=list)
    why: str = ""

    def __post_init__(self) -> None:
        self.elastic = Elastic(self.rules)
        for role, count in self.rules.home.items():
            for number in range(count):
                name = f"{role}-{number}"
                self.members[name] = Member(name, 1, role)
        self._left: dict[str, int] = {}
        self._numbers = itertools.count(len(self.members))

    def view(self) -> View:
        prefill, decode = (self.pressure(pool) for pool in POOLS)
        return View(tuple(self.members.values()), prefill, decode)

    def pressure(self, pool: Pool) -> float:
        offered = self.work[POOLS.index(pool)]
        serving = [one for one in self.members.values() if one.usable and one.serves(pool)]
        capacity = sum(0.5 if one.role == "both" else 1.0 for one in serving)
        return offered / capacity if capacity else 2.0 * bool(offered)

    def run(self, seconds: int, check: Callable[[Lab], None] = lambda lab: None) -> Lab:
        for _ in range(seconds):
            self.now += 1
            action = self.elastic.step(self.now, self.view())
            if isinstance(action, Nothing):
                self.why = action.why
            else:
                self.done.append((self.now, action))
                self._do(action)
            check(self)
        return self

    def _do(self, action: Action) -> None:
        name = action.worker if isinstance(action, Drain | SetRole | Remove) else ""
        if name in self.deaf:
            self.elastic.refused(name, self.now)
        elif isinstance(action, Drain):
            self._drain(action)
        elif isinstance(action, SetRole):
            self.change(name, role=action.role)
        elif isinstance(action, Remove):
            self.members.pop(name, None)
        elif isinstance(action, Add):
            name = f"{action.role}-{next(self._numbers)}"
            self.elastic.added(name, action.role, self.now)
            if self.ray:
                self.members[name] = Member(name, 1, action.role)

    def _drain(self, action: Drain) -> None:
        self.change(action.worker, draining=action.on)
        if action.on:
            left = self._left.setdefault(action.worker, self.holds)
            self._left[action.worker] = max(left - 1, 0)
            self.elastic.drained(action.worker, left)
        else:
            self._left.pop(action.worker, None)

    def change(self, name: str, **fields: object) -> None:
        self.members[name] = replace(self.members[name], **fields)  # type: ignore[arg-type]

    @property
    def roles(self) -> dict[str, int]:
        """Count of each role that somebody has."""
        found = [one.role for one in self.members.values()]
        return {role: found.count(role) for role in sorted(set(found))}

    @property
    def changes(self) -> list[tuple[float, Action]]:
        """What was done but for drains."""
        return [(at, action) for at, action in self.done if not isinstance(action, Drain)]
