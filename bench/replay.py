"""Replay a trace against a simulated fleet under several routing policies, in virtual time.

    pdserve bench replay TRACE[.gz] --sim PROFILE --virtual-clock --prefill 16 --decode 16
        --policies round_robin,predicted,dynamo,sgl --requests 1500 --load 0.8 --seed 1 [--json]

TRACE: Mooncake's JSON lines or Azure's CSV; without it, the conversations of Mooncake that come with pdserve.
Objective: TTFT <= 2 s + 1 s per 8K prompt tokens and mean TPOT <= 50 ms; goodput: share of requests that meet both;
capacity: the highest rate with goodput >= 0.9 under least_load; --load is a share of it (several, separated by commas,
without --json), or of the trace's own rate where there is none, since so few requests are fast enough even all at once;
--rate or --speedup say the rate instead.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench._plots import check, picture
from bench.sim.experiment import POLICIES, Capacity, Experiment, Setting
from runtime.errors import InvalidRequest, PdserveError

SHIPPED = Path(__file__).parent / "data" / "mooncake_conversation_trace.jsonl.gz"

FASTEST = 1e6
"""Requests per second, or times the trace's own speed: beyond, times drown in rounding."""

Report = Callable[[str, float], None]
PLOTTED = (
    ("ttft_mean", "mean TTFT (s)"),
    ("ttft_p99", "TTFT p99 (s)"),
    ("goodput", "goodput"),
    ("hit_rate", "hit rate"),
)


def cache_folder() -> Path:
    """Where capacities are remembered."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        base = Path(tempfile.gettempdir())
    return base / "pdserve" / "bench"


def rates(
    experiment: Experiment,
    loads: list[float],
    rate: float | None,
    speedup: float | None,
    cache: Path | None,
    report: Report,
) -> tuple[Capacity | None, list[tuple[float | None, float]]]:
    """(capacity, [(load, requests per second)]). Only a load needs the capacity. Where so few requests are played that
    they have none, the load is a share of the trace's own rate."""
    if rate:
        return None, [(None, rate)]
    if speedup:
        return None, [(None, experiment.native_rate * speedup)]
    capacity: Capacity | None = None
    try:
        capacity = experiment.capacity(cache, report)
    except InvalidRequest as error:
        if error.field != "requests":
            raise
    whole = capacity.requests_per_s if capacity is not None else experiment.native_rate
    return capacity, [(load, load * whole) for load in loads]


def study(
    experiment: Experiment, policies: list[str], at: list[tuple[float | None, float]], report: Report
) -> list[dict[str, dict[str, Any]]]:
    """One {policy: figures} per rate."""
    results = []
    total = len(at) * len(policies)
    for index, (_, rate) in enumerate(at):
        figures = {}
        for place, policy in enumerate(policies):
            report(f"{policy} at {rate:.2f} requests/s", (index * len(policies) + place) / total)
            figures[policy] = experiment.measure(policy, rate)
        results.append(figures)
    return results


# --- what is shown ----------------------------------------------------------------------------------------------


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Report]:
    """On stderr, on a terminal only; nothing at all when quiet."""
    if quiet or not sys.stderr.isatty():
        yield lambda text, share: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=1.0)
        yield lambda text, share: bar.update(task, description=text, completed=share)


def table(title: str, figures: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title=title, title_justify="left")
    heads = (
        "policy",
        "TTFT mean",
        "p50",
        "p99",
        "TPOT mean",
        "goodput",
        "hit rate",
        "spread",
        "local",
        "failed",
        "error",
    )
    for name in heads:
        shown.add_column(name, justify="left" if name == "policy" else "right")
    for policy, row in figures.items():
        error = row["prediction_error_median"]
        shown.add_row(
            policy,
            f"{row['ttft_mean']:.3f} s",
            f"{row['ttft_p50']:.3f}",
            f"{row['ttft_p99']:.2f}",
            f"{1000 * row['tpot_mean']:.1f} ms",
            f"{row['goodput']:.3f}",
            f"{row['hit_rate']:.3f}",
            f"{row['load_spread']:.2f}",
            str(row["local"]),
            str(row["failed"]),
            "-" if error is None else f"{100 * error:.0f} %",
        )
    return shown


def plot(file: Path, at: list[tuple[float | None, float]], results: list[dict[str, dict[str, Any]]]) -> None:
    """One picture: bars for one rate, curves for several. Raises InvalidRequest when it cannot be made or written."""
    names = list(results[0])
    with picture(file, 2, 2, size=(11, 7)) as axes:
        for axis, (key, label) in zip(axes.flat, PLOTTED, strict=True):
            if len(at) == 1:
                axis.bar(names, [results[0][name][key] for name in names])
                axis.tick_params(axis="x", rotation=30)
            else:
                x = [load if load is not None else rate for load, rate in at]
                for name in names:
                    axis.plot(x, [figures[name][key] for figures in results], marker="o", label=name)
                axis.set_xlabel("load (share of least_load's capacity)")
            axis.set_title(label)
            if key.startswith("ttft"):
                axis.set_yscale("log")
        if len(at) > 1:
            axes.flat[0].legend()


def _names(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise click.BadParameter(f"{', '.join(unknown) or 'nothing'}: known are {', '.join(POLICIES)}")
    return list(dict.fromkeys(names))


def _loads(_: click.Context, __: click.Parameter, value: str) -> list[float]:
    try:
        loads = [float(part) for part in value.split(",")]
    except ValueError as exc:
        raise click.BadParameter("numbers, separated by commas") from exc
    if any(not 0 < load < 100 for load in loads):
        raise click.BadParameter("a load is a share of the capacity, more than 0")
    return loads


def _positive(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < FASTEST:
        raise click.BadParameter(f"more than 0 and less than {FASTEST:g}")
    return value


def _folder(_: click.Context, __: click.Parameter, value: str | None) -> Path | None:
    if value is None:
        return None
    try:
        Path(value).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise click.BadParameter(f"{value}: {exc.strerror}") from exc
    return Path(value)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("trace", type=click.Path(exists=True, dir_okay=False), default=str(SHIPPED))
@click.option(
    "--sim", "profile", default="sim-h100-8b", show_default=True, help="profile: a YAML file or a shipped name"
)
@click.option("--virtual-clock/--wall-clock", default=True, help="in simulated time (the only way here)")
@click.option("--prefill", default=16, show_default=True, type=click.IntRange(1, 4096))
@click.option("--decode", default=16, show_default=True, type=click.IntRange(1, 4096))
@click.option("--policies", default="round_robin,predicted,dynamo,sgl", show_default=True, callback=_names)
@click.option("--requests", default=1500, show_default=True, type=click.IntRange(1))
@click.option("--skip", default=0, type=click.IntRange(0), help="begin behind so many requests of the trace")
@click.option("--load", "loads", default="0.8", show_default=True, callback=_loads)
@click.option("--rate", type=float, callback=_positive, help="requests per second, instead of --load")
@click.option("--speedup", type=float, callback=_positive, help="times the trace's own speed, instead of --load")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0))
@click.option("--unit-tokens", default=256, show_default=True, help="grid of the simulated pools: 16 to 256")
@click.option("--cache-dir", type=click.Path(file_okay=False), callback=_folder, help="where capacities are remembered")
@click.option("--no-cache", is_flag=True, help="find the capacity again")
@click.option(
    "--plot", "plotted", type=click.Path(dir_okay=False), help="PNG  [replay.png in the cache folder, none with --json]"
)
@click.option("--json", "as_json", is_flag=True, help="one JSON object and nothing else")
def main(
    trace: str,
    profile: str,
    virtual_clock: bool,
    prefill: int,
    decode: int,
    policies: list[str],
    requests: int,
    skip: int,
    loads: list[float],
    rate: float | None,
    speedup: float | None,
    seed: int,
    unit_tokens: int,
    cache_dir: Path | None,
    no_cache: bool,
    plotted: str | None,
    as_json: bool,
) -> None:
    if not virtual_clock:
        raise click.UsageError(
            "a replay runs on the virtual clock; for real time use `pdserve up --sim` and a load generator"
        )
    if as_json and len(loads) > 1:
        raise click.UsageError("--json prints one object: give one --load")
    asked = click.get_current_context().get_parameter_source("loads") is ParameterSource.COMMANDLINE
    if asked + (rate is not None) + (speedup is not None) > 1:
        raise click.UsageError("--load, --rate and --speedup each say how fast requests come: give one")
    cache = None if no_cache else cache_dir or cache_folder()
    file = Path(plotted) if plotted else None if as_json else (cache_dir or cache_folder()) / "replay.png"
    if file is not None:
        check(file)  # now, not after the work
    setting = Setting(str(Path(trace).resolve()), profile, prefill, decode, requests, seed, unit_tokens, skip)
    with progress_bar(quiet=as_json) as report:
        experiment = Experiment(setting)
        capacity, at = rates(experiment, loads, rate, speedup, cache, report)
        results = study(experiment, policies, at, report)
    config = {
        "trace": Path(trace).name,
        "profile": experiment.profile.name,
        "prefill": prefill,
        "decode": decode,
        "requests": len(experiment.entries),
        "skip": skip,
        "seed": seed,
        "unit_tokens": unit_tokens,
        "capacity_requests_per_s": capacity.requests_per_s if capacity is not None else None,
        "capacity_goodput": capacity.goodput if capacity is not None else None,
        "load": at[0][0],
        "rate_requests_per_s": at[0][1],
        "speedup": at[0][1] / experiment.native_rate,
        "virtual_clock": True,
        "objective": {"ttft_s": 2.0, "ttft_s_per_8k": 1.0, "tpot_s": 0.05},
    }
    if as_json:
        print(json.dumps({"policies": results[0], "config": config}))
        if file is not None:
            plot(file, at, results)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    for (load, per_s), figures in zip(at, results, strict=True):
        of = "capacity" if capacity is not None else "the trace's own speed: so few requests have no capacity here"
        share = "" if load is None else f", {100 * load:.0f} % of {of}"
        title = f"{experiment.profile.name} {prefill}P{decode}D, seed {seed}: {per_s:.2f} requests/s{share}"
        console.print(table(title, figures))
    assert file is not None
    plot(file, at, results)
    console.print(f"plots: {file.resolve()}", markup=False, highlight=False, soft_wrap=True)


def run(command: click.Command, arguments: Sequence[str] | None = None, *, name: str = "", around: Any = None) -> int:
    """Errors of ours become one line and a status, as in the rest of the command line. around: the context's `obj`."""
    try:
        command(arguments, prog_name=name or None, obj=around)
    except PdserveError as error:
        print(f"pdserve: {error.line}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
