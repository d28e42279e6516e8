"""The policies against each other: a table with intervals, a plot, and where ours loses.

    pdserve bench study [--seeds 5] [--requests 1500] [--loads 0.6,0.8,1.0,1.2] [--held-out] [--out FOLDER]

Mooncake's conversation trace on 16 prefill and 16 decode workers, simulated in virtual time, both profiles, every
policy; terms as in `bench replay`. --held-out instead: data on which no weight was chosen, at 80 and 100 %: a later
part of the trace, Azure's trace (which shares no prefixes), 8P24D and 24P8D. Every run is kept in FOLDER/runs.jsonl; a
study that is broken off goes on where it was, and runs of other sources are made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from bench._plots import picture
from bench.replay import PLOTTED, cache_folder, progress_bar, run
from bench.sim import study
from bench.sim.experiment import POLICIES, Setting
from bench.sim.study import Case, Results

DATA = Path(__file__).parent / "data"
MOONCAKE = str(DATA / "mooncake_conversation_trace.jsonl.gz")
AZURE = str(DATA / "AzureLLMInferenceTrace_conv.csv.gz")
PROFILES = ("sim-h100-8b", "sim-hybrid-48b")
OURS = ("predicted", "predicted_pairs", "predicted_fetch")
PEERS = tuple(name for name in POLICIES if name not in OURS)
COSTS = ("dynamo", "sgl")
"""Peers that weigh caches against load."""


def cases(loads: tuple[float, ...], requests: int, seeds: int) -> list[Case]:
    """The table."""
    return [
        Case(f"{profile}, 16P16D", Setting(MOONCAKE, profile, 16, 16, requests, 1), loads, seeds, tuple(POLICIES))
        for profile in PROFILES
    ]


def held_out(requests: int, seeds: int) -> list[Case]:
    """Where no weight was chosen: other requests, other seeds, other fleets."""
    names = ("round_robin", *COSTS, "predicted", "predicted_pairs")
    made = []
    for profile in PROFILES:
        for title, trace, skip, prefill, decode in (
            ("Mooncake from request 6000 on, 16P16D", MOONCAKE, 6000, 16, 16),
            ("Azure conversations, 16P16D", AZURE, 0, 16, 16),
            ("Mooncake from request 6000 on, 8P24D", MOONCAKE, 6000, 8, 24),
            ("Mooncake from request 6000 on, 24P8D", MOONCAKE, 6000, 24, 8),
        ):
            count = requests if trace == MOONCAKE else 4 * requests  # short prompts: fewer do not fill the fleet
            setting = Setting(trace, profile, prefill, decode, count, 11, skip=skip)
            made.append(Case(f"{profile}, {title}, {count} requests", setting, (0.8, 1.0), seeds, names))
    return made


# --- what is shown ------------------------------------------------------------------------------------------------


def table(case: Case, results: Results) -> str:
    """Markdown: a row per load and policy."""
    heads = "load | policy | TTFT mean (s) | p99 (s) | TPOT mean (ms) | goodput | hit rate | on D | error"
    lines = [f"| {heads} |", "|" + "---|" * (heads.count("|") + 1)]
    lines += [
        f"| {100 * load:.0f} % | {policy} | {_row(case, results, load, policy)} |"
        for load in case.loads
        for policy in case.policies
    ]
    return "\n".join(lines)


def _row(case: Case, results: Results, load: float, policy: str) -> str:
    def of(name: str) -> study.Mean:
        return study.mean(study.figures(case, results, load, policy, name))

    tpot = of("tpot_mean")
    local = of("local").value / case.setting.requests
    errors = study.figures(case, results, load, policy, "prediction_error_median")
    return " | ".join(
        (
            of("ttft_mean").text(3),
            of("ttft_p99").text(2),
            f"{1000 * tpot.value:.1f}",
            of("goodput").text(3),
            f"{of('hit_rate').value:.3f}",
            f"{100 * local:.0f} %" if local else "-",
            f"{100 * study.mean(errors).value:.0f} %" if errors else "-",
        )
    )


def ratios(case: Case, results: Results) -> str:
    """Markdown: ours by round robin and by the best of the peers' costs."""
    lines = [
        "| load | policy | TTFT mean / round robin | / best peer cost | TTFT p99 / best peer cost |",
        "|---|---|---|---|---|",
    ]
    for load in case.loads:
        for policy in (name for name in case.policies if name in OURS):
            parts = [study.ratio(case, results, load, policy, "round_robin", "ttft_mean").text(3)]
            for name in ("ttft_mean", "ttft_p99"):
                best = min(COSTS, key=lambda peer: study.mean(study.figures(case, results, load, peer, name)).value)
                parts.append(f"{study.ratio(case, results, load, policy, best, name).text(3)} ({best})")
            lines.append(f"| {100 * load:.0f} % | {policy} | {' | '.join(parts)} |")
    return "\n".join(lines)


def losses(case: Case, results: Results) -> str:
    peers = [name for name in case.policies if name not in OURS]
    ours = [name for name in case.policies if name in OURS]
    lines = [line for policy in ours for line in study.losses(case, results, policy, peers)]
    return "\n".join(f"- {line}" for line in lines) or "- nowhere"


def report(title: str, chosen: list[Case], results: Results, command: str) -> str:
    first = chosen[0]
    parts = [
        f"# {title}",
        f"`{command}`, commit {_commit()}, {datetime.now(UTC):%Y-%m-%d}, sources {results.source}.\n"
        f"{first.setting.requests} requests unless said, {first.seeds} seeds, mean ± 95 % interval over seeds. Load: "
        "share of least_load's capacity. On D: prompts prefilled where they decode. Error: median of "
        "|predicted - observed| / observed TTFT.",
    ]
    for case in chosen:
        parts += [f"## {case.title}", table(case, results), ratios(case, results)]
        parts += ["Where a peer is better by more than the scatter of the seeds:", losses(case, results)]
    return "\n\n".join(parts) + "\n"


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=study.ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def plot(file: Path, chosen: list[Case], results: Results) -> None:
    """Four figures over the load, a row per case. Raises InvalidRequest when it cannot be made or written."""
    with picture(file, len(chosen), 4, size=(18, 4.2 * len(chosen))) as axes:
        for case, row in zip(chosen, axes, strict=True):
            for axis, (key, label) in zip(row, PLOTTED, strict=True):
                for policy in case.policies:
                    means = [study.mean(study.figures(case, results, load, policy, key)) for load in case.loads]
                    width = 2.4 if policy in OURS else 1.2
                    axis.errorbar(
                        [100 * load for load in case.loads],
                        [mean.value for mean in means],
                        [mean.half for mean in means],
                        marker="o",
                        markersize=3,
                        capsize=3,
                        linewidth=width,
                        label=policy,
                    )
                axis.set_title(f"{label}\n{case.title}", fontsize=9)
                axis.set_xlabel("load (% of least_load's capacity)", fontsize=8)
                if key.startswith("ttft"):
                    axis.set_yscale("log")
        axes[0][0].legend(fontsize=7)


def numbers(chosen: list[Case], results: Results) -> list[dict[str, Any]]:
    """What the table shows, for machines: per case, load and policy, values by seed."""
    names = (*study.BETTER, "ttft_p50", "prediction_error_median", "local", "failed", "requests_per_s")
    return [
        {
            "case": case.title,
            "load": load,
            "policy": policy,
            **{name: study.figures(case, results, load, policy, name) for name in names},
        }
        for case in chosen
        for load in case.loads
        for policy in case.policies
    ]


def _loads(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        loads = tuple(float(part) for part in value.split(","))
    except ValueError as exc:
        raise click.BadParameter("numbers, separated by commas") from exc
    if any(not 0 < load < 100 for load in loads):
        raise click.BadParameter("a load is a share of the capacity, more than 0")
    return loads


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1, 10))
@click.option("--requests", default=1500, show_default=True, type=click.IntRange(1))
@click.option("--loads", default="0.6,0.8,1.0,1.2", show_default=True, callback=_loads)
@click.option("--held-out", "other", is_flag=True, help="other data, fleets and seeds, at 80 and 100 %")
@click.option("--out", type=click.Path(file_okay=False), help="folder of results  [in the cache]")
def main(seeds: int, requests: int, loads: tuple[float, ...], other: bool, out: str | None) -> None:
    folder = Path(out) if out else cache_folder() / "study"
    results = Results(folder / "runs.jsonl")
    chosen = held_out(requests, seeds) if other else cases(loads, requests, seeds)
    with progress_bar(quiet=False) as said:
        study.run(chosen, results, cache_folder(), said)
    name = "held-out" if other else "policies"
    title = "Policies on data no weight was chosen on" if other else "Policies on Mooncake's conversation trace"
    command = f"pdserve bench study --seeds {seeds} --requests {requests}" + (" --held-out" if other else "")
    text = report(title, chosen, results, command)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(numbers(chosen, results)), encoding="utf-8")
    plot(folder / f"{name}.png", chosen, results)
    print(text)
    print(f"written to {folder}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(main))
