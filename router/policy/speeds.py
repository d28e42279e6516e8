"""How fast the workers are, learned from what they report, never from a profile.

Three questions: how long does a prefill take, how long a decode step, how long a transfer. Each is answered by one
small regression over the whole fleet (what the model costs) times a factor per worker or path (what this machine makes
of it): the shape is learned from everybody's reports, so a new worker is predicted well after a few of its own.

Reports are noisy and sometimes stalled, and noise only makes things slower. The regression minimises the logarithm of
observed by expected (on a busy machine the mean is well above what most take: with it the median of the errors was a
seventh larger), and its residuals are clipped, so one report six times too long moves little; it forgets slowly, so a
fleet that changes is followed. What it begins with is the shape of a cost, not its size: the first report says whether
this is a GPU or a laptop.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from router.policy.trust import Trust, measurable

CLIP = 0.5
"""Largest relative residual one report may count with, or SCATTER times what residuals are of late, if that is more:
then they are no outliers, and the fleet is unlike what is thought of it."""

SCATTER = 3.0

CHANGE = 3.0
"""Of log(observed / expected), once a machine is known to have changed."""

FIRST = 20
"""Reports after which the regression is taken to know something: before that one is weighted by the larger of what was
expected and what came, so that neither an expectation far too low nor a stall counts many times."""


AWAY, AGREED = math.log(20.0), 5
"""So many reports in a row, each so far off to the same side: what is thought of the fleet began with an absurd one, or
it is another fleet. Small corrections would never get there."""

NOISE = 0.05
"""Variance of one report's relative error, roughly: what a report is trusted."""

FLOOR = 0.01
"""No term becomes less than this share of its prior: a cost is never zero, let alone negative."""


SILENT_S, HALF_S = 15.0, 15.0
"""Who has told nothing for so long is thought better of; after HALF_S more the difference is half of what it was."""

PASSING_S = 0.002
"""What lies between worker and router in the best of cases, roughly."""

RELAX_S = 1.0
"""How often that is looked at."""

NOW = float("nan")
"""Of reports whose time nobody knows: each is one of its own, and none is ever too old."""

MOST_KNOWN = 20_000
"""Machines and paths between them: of more, those that were met first are forgotten. Workers come with new names."""


class Regression:
    """Recursive least squares with forgetting over positive physical features.

    prior: positive coefficients to start from. Their common size is taken from the first report; to each other they are
    good to a factor of 1 + spread, one for all or one for each. forgetting: weight kept per report.
    """

    def __init__(
        self, prior: Sequence[float], forgetting: float = 0.998, spread: float | Sequence[float] = 2.0
    ) -> None:
        self._shape = np.asarray(prior, dtype=float)
        self._spread = np.diag(np.broadcast_to(np.asarray(spread, dtype=float), len(prior)) ** 2)
        self._keep = forgetting
        self._trace = float(np.trace(self._spread))
        self._above = False
        self._far: list[float] = []  # sizes of the shape that the last reports ask for, all far off to one side
        self._begin(1.0)
        self.count = 0

    def _begin(self, size: float) -> None:
        """With nothing but the shape, of this size."""
        self._prior = self._shape * size
        self._theta = np.ones(len(self._shape))  # in units of the prior
        self._cov = self._spread
        self._scatter = 1.0  # of relative residuals
        self._far = []
        self.count = 1
        self.coefficients: tuple[float, ...] = tuple(float(value) for value in self._prior)

    def predict(self, features: Sequence[float]) -> float:
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))

    def learn(self, features: Sequence[float], observed: float) -> None:
        """One report. Weighted by its own size, so that short and long ones count alike."""
        expected = self.predict(features)
        if not _comparable(observed, expected):
            return
        if self._unlike(features, observed / expected, observed):
            self._begin(median(self._far))
            return
        if not self.count:
            self._prior = self._prior * (observed / expected)
            expected = observed
        weight = 1.0 / (max(expected, observed) if self.count < FIRST else expected)
        row = np.asarray(features, dtype=float) * self._prior * weight
        error = (observed - expected) * weight if self.count < FIRST else math.log(observed / expected)
        self._scatter += 0.1 * (min(abs(error), 4.0) - self._scatter)
        clip = max(CLIP, SCATTER * self._scatter)
        error = min(max(error, -clip), clip)
        gain = self._cov @ row
        denominator = NOISE + float(row @ gain)
        self._theta = np.maximum(self._theta + gain / denominator * error, FLOOR)
        self._cov = self._cov - np.outer(gain, gain) / denominator
        if float(np.trace(self._cov)) < self._trace:  # forgetting must not wind up while nothing new is told
            self._cov /= self._keep
        self.count += 1
        self.coefficients = tuple(float(value) for value in self._theta * self._prior)

    def _unlike(self, features: Sequence[float], ratio: float, observed: float) -> bool:
        """Whether enough reports agree that all of this is wrong."""
        off = math.log(ratio)
        if not self.count or abs(off) < AWAY:
            self._far = []
            return False
        size = observed / float(np.asarray(features, dtype=float) @ self._shape)
        if (off > 0) != self._above:
            self._far = []
        self._above = off > 0
        self._far.append(size)
        return len(self._far) >= AGREED

    def scale(self, factor: float) -> None:
        """All of it is `factor` times as much."""
        self._theta = np.maximum(self._theta * factor, FLOOR)
        self.coefficients = tuple(float(value) for value in self._theta * self._prior)


@dataclass(slots=True, eq=False)
class _Machine:
    """log: of its factor. told_at: when its last report ended that was one of its own."""

    log: float
    count: int = 0
    drift: float = 0.0
    told_at: float = NOW


class Factors:
    """What each machine (or path) makes of the fleet's figure: a clipped running mean of log(observed / expected).

    Taken relative to their common mean, which belongs to the fleet's figure: otherwise a regression that is too low and
    factors that are too high would chase each other. When one machine moves the mean, the fleet's figure has to move
    with it, or all others would seem to have changed. A new one begins as the mean, factor 1."""

    def __init__(self, floor_rate: float = 0.04) -> None:
        self._floor_rate = floor_rate
        self._machines: dict[Hashable, _Machine] = {}
        self._sum = 0.0
        self._relaxed_at = NOW

    def __len__(self) -> int:
        return len(self._machines)

    def of(self, key: Hashable) -> float:
        machine = self._machines.get(key)
        return 1.0 if machine is None else math.exp(machine.log - self._mean())

    def told_before(self, key: Hashable, observed: float, expected: float, began: float) -> bool:
        """Whether this is what another report has told already: it is far off, and part of it lies in that one's
        time."""
        machine = self._machines.get(key)
        if machine is None or not _comparable(observed, expected) or not began < machine.told_at:
            return False
        return abs(self._residual(machine, observed, expected)) > CLIP

    def learn(self, key: Hashable, observed: float, expected: float, ended: float = NOW) -> float:
        """expected: without any factor. Returns what the fleet's figure is to be multiplied with."""
        if not _comparable(observed, expected):
            return 1.0
        machine = self._machines.get(key)
        if machine is None:
            if len(self._machines) >= MOST_KNOWN:
                self._sum -= self._machines.pop(next(iter(self._machines))).log
            machine = self._machines[key] = _Machine(self._mean())
            self._sum += machine.log
        if not machine.told_at > ended:
            machine.told_at = ended
        residual = self._residual(machine, observed, expected)
        clip = CLIP if not self._changed(machine, residual) else CHANGE
        machine.count += 1
        rate = max(1.0 / (machine.count + 3), self._floor_rate)
        return self._move(machine, rate * min(max(residual, -clip), clip))

    def relax(self, now: float) -> float:
        """Think better of whoever has told nothing of late. Returns as learn() does."""
        since, self._relaxed_at = now - self._relaxed_at, now
        machines = list(self._machines.values())
        silent = [one for one in machines if now - one.told_at > SILENT_S]
        if not silent or not since > 0.0:
            return 1.0
        heard = [one for one in machines if not now - one.told_at > SILENT_S]
        best = min(one.log for one in heard or machines)
        share = 1.0 - 0.5 ** (since / HALF_S)
        moved = 1.0
        for one in silent:
            if one.log > best:
                moved *= self._move(one, share * (best - one.log))
        return moved

    def _mean(self) -> float:
        return self._sum / len(self._machines) if self._machines else 0.0

    def _residual(self, machine: _Machine, observed: float, expected: float) -> float:
        return math.log(observed / expected) - (machine.log - self._mean())

    def _move(self, machine: _Machine, step: float) -> float:
        machine.log += step
        self._sum += step
        return math.exp(step / len(self._machines))

    @staticmethod
    def _changed(machine: _Machine, residual: float) -> bool:
        """Whether the last few reports were all far off to the same side: the machine is another one than it was, and
        what was learned of it is worth little."""
        machine.drift += 0.3 * (min(max(residual, -CLIP), CLIP) - machine.drift)
        if abs(machine.drift) < 0.6 * CLIP:
            return False
        machine.count = 0
        return True


@dataclass(slots=True)
class Accuracy:
    """Relative error of predictions: a running median (by signed steps) and a running mean."""

    median: float = 0.15
    mean: float = 0.15
    count: int = 0

    def learn(self, predicted: float, observed: float) -> None:
        if observed <= 0:
            return
        error = abs(predicted - observed) / observed
        self.count += 1
        rate = max(1.0 / self.count, 0.01)
        self.mean += rate * (min(error, 5.0) - self.mean)
        self.median += 0.01 * (1 if error > self.median else -1)
        self.median = max(self.median, 0.0)


@dataclass(slots=True)
class OutputLength:
    """Expected output tokens: what similar prompts of this router produced, never more than was allowed.

    By size class of the prompt (powers of two), shrunk towards the mean of all while a class is young."""

    mean: float = 256.0
    count: int = 0
    classes: dict[int, tuple[float, int]] = field(default_factory=dict)

    def expect(self, prompt_tokens: int, max_tokens: int) -> float:
        mean, count = self.classes.get(prompt_tokens.bit_length(), (self.mean, 0))
        blended = (mean * count + self.mean * 20) / (count + 20)
        return max(min(blended, float(max_tokens)), 1.0) if max_tokens > 0 else max(blended, 1.0)

    def learn(self, prompt_tokens: int, output_tokens: int) -> None:
        self.count += 1
        self.mean += max(1.0 / (self.count + 1), 0.01) * (output_tokens - self.mean)
        key = prompt_tokens.bit_length()
        mean, count = self.classes.get(key, (float(output_tokens), 0))
        self.classes[key] = (mean + max(1.0 / (count + 1), 0.01) * (output_tokens - mean), count + 1)


class Speeds:
    """All of one router's calibrations. Times in seconds, sizes in tokens and bytes; workers by id."""

    def __init__(self) -> None:
        # 1, uncached tokens, uncached tokens x their mean context, uncached tokens x the step they ride on; what
        # context costs differs most between machines: forty times as much of the rest on a CPU as on a GPU
        self._prefill = Regression((0.01, 5e-5, 5e-10, 2e-4), spread=(2.0, 2.0, 20.0, 2.0))
        # 1, requests in the step, their context tokens
        self._step = Regression((0.01, 5e-5, 1e-8))
        self._transfer = Regression((0.001, 1e-10))
        # by tier; a disk is a tenth as fast until one is known
        self._load = {"host": Regression((0.001, 1e-10)), "disk": Regression((0.001, 1e-9))}
        # beside the transfer itself, a fetch of a cached prefix: 1, bytes (asking, room, checksums at both ends);
        # hopeful, since only what is tried becomes known
        self._fetch = Regression((0.005, 2e-11))
        self._prefill_of = Factors()
        self._step_of = Factors()
        self._path = Factors(0.1)
        self.trust = Trust()
        self._fetch_trust = Trust()  # by path: the share of fetches that brought what was planned
        self.output = OutputLength()
        self.ttft_error = Accuracy()
        self.passing_s = 0.0  # from the router to the worker's clock and back, and its loop
        self._passed = 0
        self._relaxed_at = NOW

    def relax(self, now: float) -> None:
        """Whoever has told nothing for a while gets another chance. To be called before every decision."""
        if now - self._relaxed_at < RELAX_S:
            return
        self._relaxed_at = now
        self._prefill.scale(self._prefill_of.relax(now))
        self._step.scale(self._step_of.relax(now))
        self._transfer.scale(self._path.relax(now))
        self.trust.relax(now)
        self._fetch_trust.relax(now)

    # --- prefill ------------------------------------------------------------------------------------------------

    def prefill_s(self, worker: str, uncached: int, cached: int, step_s: float = 0.0) -> float:
        """Computing `uncached` tokens that follow `cached` ones. step_s: the decode step they share, 0 = none."""
        fixed, token, context, mixed = self._prefill.coefficients
        seconds = fixed + uncached * (token + context * (cached + 0.5 * uncached) + mixed * step_s)
        return seconds * self._prefill_of.of(worker)

    def learn_prefill(
        self, worker: str, uncached: int, cached: int, seconds: float, step_s: float = 0.0, ended: float = NOW
    ) -> None:
        """ended: when it was over, on the clock of relax()."""
        features = (1.0, float(uncached), uncached * (cached + 0.5 * uncached), uncached * step_s)
        _learn(self._prefill, self._prefill_of, worker, features, seconds, ended - seconds, ended)

    def learn_passing(self, seconds: float) -> None:
        """What a first token took beyond all that its worker accounts for. One that was held up counts for little."""
        seconds = min(max(seconds, 0.0), 3.0 * self.passing_s + PASSING_S)
        self._passed += 1
        self.passing_s += max(1.0 / (self._passed + 1), 0.05) * (seconds - self.passing_s)

    # --- decode -------------------------------------------------------------------------------------------------

    def step_s(self, worker: str, batch: float, context: float) -> float:
        """One decode step of `batch` requests that hold `context` tokens in all."""
        fixed, request, token = self._step.coefficients
        seconds = fixed + request * batch + token * context
        return seconds * self._step_of.of(worker)

    def learn_step(
        self, worker: str, batch: float, context: float, seconds: float, began: float = NOW, ended: float = NOW
    ) -> None:
        """seconds: of each of the steps between `began` and `ended`."""
        _learn(self._step, self._step_of, worker, (1.0, batch, context), seconds, began, ended)

    # --- transfer -----------------------------------------------------------------------------------------------

    def transfer_s(self, source: str, target: str, size: float, flows: int = 0) -> float:
        """`size` bytes from source to target while `flows` other transfers share the way."""
        setup, byte = self._transfer.coefficients
        return (setup + byte * size * (1 + flows)) * self._path.of((source, target))

    def learn_transfer(
        self, source: str, target: str, size: float, seconds: float, flows: int = 0, ended: float = NOW
    ) -> None:
        features = (1.0, size * (1 + flows))
        _learn(self._transfer, self._path, (source, target), features, seconds, ended - seconds, ended)

    def fetch_s(self, source: str, target: str, size: float, flows: int = 0) -> float:
        """Bringing `size` bytes of a cached prefix from source to target, from the question to the last checksum."""
        return self._fetch.predict((1.0, size)) + self.transfer_s(source, target, size, flows)

    def learn_fetch(
        self,
        source: str,
        target: str,
        size: float,
        moved_s: float,
        seconds: float,
        ended: float = NOW,
        lifted: float = 0.0,
    ) -> None:
        """seconds: in all, of which the transfer took moved_s. lifted: bytes its source was to read from its disk: that
        is no part of what fetches take otherwise, and how fast disks are workers report."""
        self.learn_transfer(source, target, size, moved_s, ended=ended)
        if not lifted:
            self._fetch.learn((1.0, size), seconds - moved_s)
        self._fetch_trust.learn(f"{source} {target}", 1, 1, ended)

    def missed_fetch(self, source: str, target: str, ended: float = NOW) -> None:
        """A fetch brought nothing: it was not there, there was no room, or it took too long."""
        self._fetch_trust.learn(f"{source} {target}", 1, 0, ended)

    def fetch_trust(self, source: str, target: str) -> float:
        """What a planned fetch is worth: 1 until it is known."""
        return self._fetch_trust.of(f"{source} {target}")

    def load_s(self, size: float, tier: str = "host") -> float:
        """Promoting `size` bytes from host memory ("host") or disk ("disk")."""
        return self._load[tier].predict((1.0, size)) if size > 0 else 0.0

    def learn_load(self, size: float, seconds: float, tier: str = "host") -> None:
        self._load[tier].learn((1.0, size), seconds)


def _comparable(observed: float, expected: float) -> bool:
    return measurable(observed) and 0.0 < expected < math.inf


def _learn(
    fleet: Regression,
    machines: Factors,
    key: Hashable,
    features: Sequence[float],
    seconds: float,
    began: float,
    ended: float,
) -> None:
    """One report: what it says of the machine, and of all."""
    expected = fleet.predict(features)
    if machines.told_before(key, seconds, expected, began):
        return
    fleet.scale(machines.learn(key, seconds, expected, ended))
    fleet.learn(features, seconds / machines.of(key))
