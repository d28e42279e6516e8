"""One trace, one fleet, several policies at one load; and the capacity that load is a share of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.sim import trace as traces
from bench.sim.metrics import summary
from bench.sim.profile import Profile
from bench.sim.world import Fleet, Outcome, World
from router.policy.cost import CostConfig, Predicted
from router.policy.peers import Dynamo, Sgl
from router.policy.policies import LeastLoad, Policy, PowerOfTwo, RoundRobin, SessionAffinity
from router.policy.speeds import Speeds
from runtime.errors import InvalidRequest

VERSION = 1
"""Of the simulation: capacities found by another version are not used."""

GOOD_ENOUGH = 0.9
PRECISION = 0.02
DOUBLINGS = 12
"""Of the first guess, until a fleet is taken to hold whatever comes."""

Progress = Callable[[str, float], None]
"""What is being done, and how far it is (0..1)."""

HOLD_S = 0.25
"""As `line_hold_s` of the router is by default."""

POLICIES: dict[str, Callable[[Speeds, int], Policy]] = {
    "round_robin": lambda speeds, seed: RoundRobin(),
    "least_load": lambda speeds, seed: LeastLoad(),
    "power_of_two": lambda speeds, seed: PowerOfTwo(seed),
    "session_affinity": lambda speeds, seed: SessionAffinity(),
    "dynamo": lambda speeds, seed: Dynamo(seed),
    "sgl": lambda speeds, seed: Sgl(seed),
    "predicted": lambda speeds, seed: Predicted(speeds, CostConfig(hold_s=HOLD_S)),
    "predicted_pairs": lambda speeds, seed: Predicted(speeds, CostConfig(hold_s=HOLD_S, deflect=False)),
    "predicted_fetch": lambda speeds, seed: Predicted(speeds, CostConfig(hold_s=HOLD_S)),
}
"""predicted_pairs: ours without prefill on decode workers, so that it can be seen what of its gain comes from those.
predicted_fetch: ours on workers that read cached prefixes from each other."""
RESERVING = ("predicted", "predicted_pairs", "predicted_fetch")
FETCHES = {"predicted_fetch": 4}
"""Prefixes a worker may read, and others from it, at once."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured on. requests: so many of the trace, behind the first `skip`."""

    trace: str
    profile: str
    prefill: int
    decode: int
    requests: int
    seed: int
    unit_tokens: int = 256
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """goodput: what it had to keep: 0.9, or what the trace allows at any speed if that is less."""

    requests_per_s: float
    goodput: float


class Experiment:
    """Loads the trace once; runs are independent of each other and repeatable."""

    def __init__(self, setting: Setting) -> None:
        if setting.prefill < 1 or setting.decode < 1 or setting.requests < 1:
            raise InvalidRequest("prefill, decode and requests are at least 1", field="prefill")
        self.setting = setting
        self.profile = Profile.load(setting.profile)
        self.entries = traces.load(setting.trace, setting.requests, setting.skip)
        book = traces.KeyBook(setting.unit_tokens)
        self._keys = [book.of(entry) for entry in self.entries]

    @property
    def native_rate(self) -> float:
        """Requests per second of the trace as it was recorded."""
        return len(self.entries) / max(self.entries[-1].at, 1e-9)

    def run(self, policy: str, rate: float) -> tuple[list[Outcome], World]:
        """At `rate` requests per second. Raises InvalidRequest for a policy that is not known."""
        if policy not in POLICIES:
            raise InvalidRequest(f"there is no policy {policy}", field="policies", limit=", ".join(POLICIES))
        setting, speeds = self.setting, Speeds()
        world = World(
            self.profile,
            Fleet(
                setting.prefill,
                setting.decode,
                seed=setting.seed,
                unit_tokens=setting.unit_tokens,
                fetches=FETCHES.get(policy, 0),
            ),
            POLICIES[policy](speeds, setting.seed),
            speeds,
            reserving=policy in RESERVING,
        )
        return world.run(self.entries, self._keys, rate / self.native_rate), world

    def measure(self, policy: str, rate: float) -> dict[str, Any]:
        return summary(*self.run(policy, rate))

    def goodput(self, rate: float) -> float:
        outcomes, _ = self.run("least_load", rate)
        return sum(outcome.good for outcome in outcomes) / len(outcomes)

    # --- capacity -----------------------------------------------------------------------------------------------

    def capacity(self, cache: Path | None, progress: Progress) -> Capacity:
        """The highest rate at which least_load keeps the goal, by bisection to 2 %. Raises InvalidRequest when there is
        none."""
        file = cache / f"capacity-{self._key()}.json" if cache is not None else None
        known = _read(file)
        if known is not None:
            return known
        found = self._bisect(progress)
        if file is not None:
            content = {**asdict(found), **asdict(self.setting), "version": VERSION}
            temporary = file.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):  # not remembered: a read-only home costs time, not the run
                file.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_text(json.dumps(content), encoding="utf-8")
                temporary.replace(file)
        return found

    def _bisect(self, progress: Progress) -> Capacity:
        """A trace whose requests come in bursts may miss the goal on a small fleet however slowly it is played: then
        the goal is so much of what is reached when it is played as slowly."""
        guess = self._guess()
        progress("capacity: slowly", 0.02)
        goal = GOOD_ENOUGH * min(1.0, self.goodput(guess / 100) / GOOD_ENOUGH)
        low, high = guess / 100, guess
        tried = 0
        while self._good(high, goal, tried, progress):
            low, high, tried = high, 2 * high, tried + 1
            if tried > DOUBLINGS:
                raise InvalidRequest(
                    "so few requests keep the goal on this fleet even when all come at once: "
                    "give more of them, or a rate instead of a load",
                    field="requests",
                )
        while high / low > 1 + PRECISION:
            middle = (low * high) ** 0.5
            tried += 1
            if self._good(middle, goal, tried, progress):
                low = middle
            else:
                high = middle
        return Capacity(low, goal)

    def _good(self, rate: float, goal: float, tried: int, progress: Progress) -> bool:
        progress(f"capacity: {rate:.2f} requests/s", min(tried / 10, 0.95))
        return self.goodput(rate) >= goal

    def _guess(self) -> float:
        """What the prefill workers could compute if nothing were cached and nobody waited."""
        total = sum(self.profile.prefill_s(0, entry.prompt_tokens) for entry in self.entries)
        return self.setting.prefill / (total / len(self.entries))

    def _key(self) -> str:
        parts = [VERSION, asdict(self.setting)]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
        digest.update(Path(self.setting.trace).read_bytes())
        digest.update(repr(self.profile).encode())
        return digest.hexdigest()[:24]


def _read(file: Path | None) -> Capacity | None:
    if file is None:
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Capacity(float(content["requests_per_s"]), float(content["goodput"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
