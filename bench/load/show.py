"""A run's figures for a person: a table, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench._plots import picture
from bench.load.results import COMPLETED, STATES, Result

BUSY = 0.8
"""Of a core: beyond, a load generator is what is measured."""

LATE_S = 0.02

_TIMES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"), ("latency_s", "end to end"))


def shown(title: str, found: Mapping[str, Any]) -> RenderableType:
    """Of a run in which nothing was answered, too."""
    lines = [Text(line) for line in _lines(found)]
    return Group(Text(title, style="italic"), _times(found), *lines, *_loaders(found["load"]))


def _times(found: Mapping[str, Any]) -> Table:
    table = Table()
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    rows = [(label, found[key]) for key, label in _TIMES]
    rows += [(f"  {name.replace('_', ' ')}", row) for name, row in (found["parts_s"] or {}).items()]
    for label, row in rows:
        table.add_row(label, *(f"{1000 * value:.1f}" for value in row.values()) if row else ["-"] * 5)
    return table


def _lines(found: Mapping[str, Any]) -> list[str]:
    counts = found["requests"]
    states = ", ".join(f"{counts[state]} {state.replace('_', ' ')}" for state in STATES)
    lines = [
        f"{counts['sum']} requests in {found['seconds']:.1f} s: {states}",
        f"{found['requests_per_s']:.2f} requests/s, {found['prompt_tokens_per_s']:.0f} prompt and "
        f"{found['output_tokens_per_s']:.1f} output tokens/s",
        f"goodput {found['goodput']:.3f} ({found['goodput_requests_per_s']:.2f} requests/s), hit rate "
        + ("not told" if found["hit_rate"] is None else f"{found['hit_rate']:.3f}"),
    ]
    if found.get("stopped"):
        lines.insert(0, "stopped before its end")
    for state, reasons in found["reasons"].items():
        lines += [f"{state.replace('_', ' ')}: {count} {reason}" for reason, count in reasons.items()]
    if found["short_answers"]:
        lines.append(f"{found['short_answers']} answers had fewer tokens than asked for")
    if found["prompts_of_other_length"]:
        lines.append(f"{found['prompts_of_other_length']} prompts had another length at the server")
    return lines


def _loaders(load: Mapping[str, Any]) -> list[RenderableType]:
    table = Table(title="load generators", title_justify="left")
    for name in ("node", "requests", "late p50 (ms)", "late p99 (ms)", "share of a core"):
        table.add_column(name, justify="left" if name == "node" else "right")
    for one in load["loaders"]:
        late = [f"{1000 * one['late_s'][key]:.2f}" for key in ("p50", "p99")] if one["late_s"] else ["-", "-"]
        share = "lost" if one["lost"] else f"{one['own_share']:.2f}"
        table.add_row(one["node"], str(one["requests"]), *late, share)
    late_s = (load["late_s"] or {"p99": 0.0})["p99"]
    if load["own_share"] < BUSY and late_s < LATE_S:
        return [table]
    advice = "the load generator itself was busy or late: more --loaders, or machines of their own for them"
    return [table, Text(advice, style="yellow")]


def plot(file: Path, results: Sequence[Result]) -> None:
    """Raises InvalidRequest when it cannot be made or written."""
    done = sorted((result for result in results if result.state == COMPLETED), key=lambda result: result.due)
    with picture(file, 2, 2, size=(11, 7)) as axes:
        over_time, per_second, first, token = axes.flat
        over_time.plot([one.due for one in done], [one.ttft for one in done], ".", markersize=3)
        over_time.set(title="TTFT (s) over time", xlabel="s")
        _rates(per_second, results)
        for axis, values, title in (
            (first, [one.ttft for one in done], "TTFT (s): share of requests below"),
            (token, [one.tpot for one in done if one.output > 1], "TPOT (s): share of requests below"),
        ):
            axis.plot(sorted(values), np.linspace(0, 1, len(values) + 1)[1:])
            axis.set_title(title)


def _rates(axis: Any, results: Sequence[Result]) -> None:
    """What ended in each second."""
    edges = np.arange(int(max((one.end for one in results), default=0.0)) + 2)
    for state in STATES:
        ends = [one.end for one in results if one.state == state]
        if ends:
            axis.stairs(np.histogram(ends, edges)[0], edges, label=state.replace("_", " "))
    axis.set(title="requests that ended, by second", xlabel="s")
    if results:
        axis.legend()


def console() -> Console:
    made = Console()
    return made if made.is_terminal else Console(width=140)
