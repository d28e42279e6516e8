"""A grid of runs: settings x loads x seeds x policies, kept one by one, so that a study can be broken off and go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.sim.experiment import Experiment, Setting

ROOT = Path(__file__).parent.parent.parent
SOURCES = (
    "bench/sim",
    "router/admission/admission.py",
    "router/policy",
    "engine/pages.py",
    "engine/prefix_cache.py",
    "kvtransfer/hashing.py",
)
"""What a run's figures depend on."""

STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Runs -> half width of a 95 % interval, in standard errors."""

BETTER = {"ttft_mean": -1, "ttft_p99": -1, "tpot_mean": -1, "goodput": 1, "hit_rate": 1}
"""Figures policies are compared by; 1 = more is better."""

Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One fleet and one stretch of a trace, at several loads. setting.seed is the first of `seeds`."""

    title: str
    setting: Setting
    loads: tuple[float, ...]
    seeds: int
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mean:
    """Over seeds. half: of the 95 % interval; 0 for one run."""

    value: float
    half: float

    def text(self, digits: int) -> str:
        if not self.half:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} ± {self.half:.{digits}f}"


@dataclass(slots=True)
class Results:
    """Figures by (setting, load, policy), in a file of JSON lines. Runs of other sources are not used."""

    file: Path
    source: str = field(default_factory=lambda: digest())
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.file.exists():
            return
        for line in self.file.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # the run that was broken off
                continue
            if row["source"] == self.source:
                self._known[row["key"]] = row

    def get(self, key: str) -> dict[str, Any] | None:
        row = self._known.get(key)
        return row["figures"] if row is not None else None

    def put(self, key: str, figures: dict[str, Any]) -> None:
        row = {"source": self.source, "key": key, "figures": figures}
        self._known[key] = row
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def digest() -> str:
    """Of the sources a figure depends on."""
    made = hashlib.sha256()
    for name in SOURCES:
        path = ROOT / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            made.update(file.read_bytes())
    return made.hexdigest()[:16]


def key_of(setting: Setting, load: float, policy: str) -> str:
    parts = {**asdict(setting), "trace": Path(setting.trace).name, "load": load, "policy": policy}
    return json.dumps(parts, sort_keys=True)


def settings(case: Case) -> Iterator[Setting]:
    for number in range(case.seeds):
        yield replace(case.setting, seed=case.setting.seed + number)


def run(cases: Sequence[Case], results: Results, cache: Path | None, report: Report) -> None:
    """Every run that is not known yet. Seeds come outermost, so that a study broken off has something of everything."""
    total = sum(case.seeds * len(case.loads) * len(case.policies) for case in cases)
    done = 0
    for number in range(max(case.seeds for case in cases)):
        for case in cases:
            if number < case.seeds:
                setting = list(settings(case))[number]
                done = _run(case, setting, results, cache, lambda text, at: report(text, at / total), done)
    report("done", 1.0)


def _run(case: Case, setting: Setting, results: Results, cache: Path | None, report: Report, done: int) -> int:
    wanted = [(load, policy) for load in case.loads for policy in case.policies]
    missing = [(load, policy) for load, policy in wanted if results.get(key_of(setting, load, policy)) is None]
    done += len(wanted) - len(missing)
    if not missing:
        return done
    experiment = Experiment(setting)
    report(f"{case.title}, seed {setting.seed}: capacity", done)
    capacity = experiment.capacity(cache, lambda text, share: None)
    for load, policy in missing:
        report(f"{case.title}, seed {setting.seed}, {100 * load:.0f} %: {policy}", done)
        rate = load * capacity.requests_per_s
        figures = {**experiment.measure(policy, rate), "requests_per_s": rate, "capacity_goodput": capacity.goodput}
        results.put(key_of(setting, load, policy), figures)
        done += 1
    return done


# --- what it comes to ---------------------------------------------------------------------------------------------


def figures(case: Case, results: Results, load: float, policy: str, name: str) -> list[float]:
    """One value per seed that has been run, in the order of seeds."""
    rows = [results.get(key_of(setting, load, policy)) for setting in settings(case)]
    return [float(row[name]) for row in rows if row is not None and row[name] is not None]


def mean(values: Sequence[float]) -> Mean:
    """Raises ValueError for none."""
    if not values:
        raise ValueError("no run")
    count = len(values)
    if count == 1:
        return Mean(values[0], 0.0)
    half = STUDENT.get(count, 1.96) * float(np.std(values, ddof=1)) / count**0.5
    return Mean(float(np.mean(values)), half)


def ratio(case: Case, results: Results, load: float, ours: str, theirs: str, name: str) -> Mean:
    """Of the same seeds, one by one."""
    pairs = zip(figures(case, results, load, ours, name), figures(case, results, load, theirs, name), strict=True)
    return mean([mine / other for mine, other in pairs if other])


def losses(case: Case, results: Results, ours: str, peers: Sequence[str]) -> list[str]:
    """Where a peer is better than `ours` by more than the seeds' scatter, in words."""
    found = []
    for load in case.loads:
        for name, sign in BETTER.items():
            mine = figures(case, results, load, ours, name)
            better = {}
            for peer in peers:
                theirs = figures(case, results, load, peer, name)
                gap = mean([sign * (b - a) for a, b in zip(mine, theirs, strict=True)])
                if gap.value > max(gap.half, 0.002 * abs(float(np.mean(theirs)))):
                    better[peer] = float(np.mean(theirs))
            if better:
                listed = ", ".join(f"{peer} {value:.4g}" for peer, value in better.items())
                found.append(f"{100 * load:.0f} %, {name}: {ours} {np.mean(mine):.4g}; {listed}")
    return found
