"""Load for a fleet that runs: what users would see of it, over the OpenAI API or gRPC.

    pdserve bench serve --rate 4 --requests 500 --input 1000:4000 --output 100

Without --url or --grpc the cluster of this state folder is asked. --dataset: `random` tokens, `shared-prefix` (one of
--groups prefixes of --prefix tokens, then --input of its own), `conversations` (--turns, each with the answers before
it), a `trace` (Mooncake's JSON lines or Azure's CSV, terms as in `bench replay`) or `prompts` (JSON lines with texts).
Requests come by --rate (Poisson; `inf` = at once; of a trace: its own times at this mean rate), at a trace's own times
with --speedup, or else as a closed loop of --concurrency. Each counts from when it was due. --loaders are processes;
with --address they are spread over the nodes of a Ray cluster.

Objective: TTFT <= --ttft-goal + --ttft-goal-per-8k for each 8K prompt tokens and mean TPOT <= --tpot-goal; goodput:
share of the requests that meet both. Ctrl-C ends the run with a report of what is done.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from bench import _plots
from bench.load import show
from bench.load.asked import Number, Target, Work, length, plan_of, rate, warm_plan
from bench.load.crew import Crew, Spread
from bench.load.loader import Job
from bench.load.plan import Plan
from bench.load.report import Objective, figures
from bench.load.results import COMPLETED
from bench.load.target import Address, Card, chosen, opened
from bench.replay import Report, progress_bar, run
from runtime.errors import InvalidRequest

DEFAULT = Objective()
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known above this folder. found: the HTTP address of the cluster of a state folder, "" for none; spread:
    how loaders get to the nodes of a Ray cluster."""

    found: Callable[[str], str]
    spread: Callable[[str], Spread]


def _nothing(_: str) -> Any:
    raise InvalidRequest("needs the command `pdserve bench serve`", field="address")


ALONE = Surroundings(lambda state_dir: "", _nothing)
"""As `python -m bench.serve`."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was asked for, checked against the server."""

    jobs: tuple[Job, ...]
    spread: Spread | None
    objective: Objective


async def looked_up(address: Address, model: str) -> Card:
    """Raises PdserveError when the server is not there, refuses the key, or has no such model."""
    async with opened(address) as target:
        return chosen(await target.cards(), model)


async def measured(run: Run, report: Report) -> tuple[Crew, bool]:
    """The crew with its results, and whether it was stopped. Raises PdserveError when it cannot start."""
    stop = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    plan = run.jobs[0].plan
    async with Crew(run.jobs, run.spread) as crew:
        report("starting", 0.0)
        if await crew.ready(stop):
            await crew.run(stop, lambda: report(*_progress(crew, plan)))
    return crew, stop.is_set()


def _progress(crew: Crew, plan: Plan) -> tuple[str, float]:
    ended = sum(len(loader.results) for loader in crew.loaders)
    done = sum(result.state == COMPLETED for loader in crew.loaders for result in loader.results[-500:])
    last = sum(min(len(loader.results), 500) for loader in crew.loaders)
    ends = max((loader.results[-1].end for loader in crew.loaders if loader.results), default=0.0)
    shares = [ended / plan.requests] if plan.requests else []
    shares += [ends / plan.duration_s] if plan.duration_s else []
    begun = sum(loader.begun for loader in crew.loaders)
    failing = f", {last - done} of the last {last} not answered" if done < last else ""
    return f"{ended} ended, {begun - ended} under way{failing}", min(1.0, max(shares, default=0.0))


def prepared(work: Work, target: Target, loaders: int, spread: Spread | None, objective: Objective) -> Run:
    """Raises PdserveError for what cannot be asked of this server."""
    address = target.address()
    card = asyncio.run(looked_up(address, target.model))
    plan = plan_of(work, card, loaders)
    address = replace(
        address,
        model=card.model,
        token_ids=card.ours or work.dataset == "conversations",
        ledger=card.ours,
        ignore_eos=address.ignore_eos or work.dataset != "prompts",
    )
    warm = warm_plan(plan, work.warmup, loaders)
    jobs = tuple(Job(address, plan, part, loaders, warm) for part in range(loaders))
    return Run(jobs, spread, objective)


def described(run: Run, work: Work) -> dict[str, Any]:
    """The configuration, as it is reported."""
    job = run.jobs[0]
    plan = asdict(replace(job.plan, rows=()))
    del plan["rows"]
    return {
        "target": job.address.address,
        "api": job.address.kind,
        "model": job.address.model,
        "loaders": len(run.jobs),
        "file": Path(work.file).name if work.file else None,
        "skip": work.given["skip"],
        "longest": work.given["longest"],
        "warmup": work.warmup,
        "timeout_s": job.address.timeout_s,
        "chat": job.address.chat,
        "ignore_eos": job.address.ignore_eos,
        **plan,
        "objective": asdict(run.objective),
    }


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", default="", help="HTTP, the OpenAI API: http://HOST:PORT")
@click.option("--grpc", "grpc_address", default="", help="HOST:PORT of a router's gRPC, instead of --url")
@click.option("--model", default="", help="[default: the server's]")
@click.option("--api-key", default="", envvar="PDSERVE_CLIENT_KEY", help="sent as a bearer token")
@click.option("--tls-cert", default="", envvar="PDSERVE_TLS_CERT", help="PEM files: for gRPC all three or none")
@click.option("--tls-key", default="", envvar="PDSERVE_TLS_KEY")
@click.option("--tls-ca", default="", envvar="PDSERVE_TLS_CA")
@click.option("--state-dir", default="", help="of the cluster that is asked when none is named")
@click.option("--dataset", type=click.Choice(["random", "shared-prefix", "conversations", "trace", "prompts"]),
              help="[random, or what a file is given for]")  # fmt: skip
@click.option(
    "--trace", default="", type=click.Path(dir_okay=False), help="file [.gz]; --dataset trace without: Mooncake's"
)
@click.option("--prompts", default="", type=click.Path(dir_okay=False), help='file [.gz]: {"prompt": TEXT} a line')
@click.option("--chat", is_flag=True, help="send the --prompts as chats")
@click.option(
    "--input", "input_tokens", default="512", show_default=True, callback=length, help="tokens: N or LOW:HIGH"
)
@click.option("--output", default="64", show_default=True, callback=length, help="tokens: N or LOW:HIGH")
@click.option("--ignore-eos", is_flag=True, help="answers to --prompts are as long as --output, too")
@click.option("--groups", default=8, show_default=True, type=click.IntRange(1, 1_000_000), help="different prefixes")
@click.option("--prefix", default=1024, show_default=True, type=click.IntRange(1, 1_000_000), help="tokens of a prefix")
@click.option("--turns", default=4, show_default=True, type=click.IntRange(1, 1000), help="of a conversation")
@click.option("--think", default=0.0, type=Number(0, 3600), help="seconds between two turns  [0]")
@click.option("--skip", default=0, type=click.IntRange(0), help="begin behind so many requests of the trace")
@click.option(
    "--longest", default=0, type=click.IntRange(0), help="leave out longer ones of the trace (tokens, with answer)"
)
@click.option("--rate", default=None, callback=rate, help="requests per second, or inf")
@click.option("--speedup", type=Number(0, 1e6, min_open=True), help="times the trace's own speed")
@click.option(
    "--concurrency", default=0, type=click.IntRange(0, 1_000_000), help="most requests in flight  [16 without --rate]"
)
@click.option("--requests", default=0, type=click.IntRange(0, 100_000_000), help="[100, without --duration]")
@click.option("--duration", default=0.0, type=Number(0, 1e6), help="seconds in which requests begin")
@click.option("--warmup", default=0, type=click.IntRange(0, 100_000), help="requests before, that are not counted")
@click.option(
    "--timeout", default=600.0, show_default=True, type=Number(0, 1e6, min_open=True), help="of a request (s)"
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0, 2**32))
@click.option("--loaders", default=1, show_default=True, type=click.IntRange(1, 1024), help="processes that send")
@click.option("--address", default="", help="HOST:PORT of a Ray cluster: spread the loaders over its nodes")
@click.option("--ttft-goal", default=DEFAULT.ttft_s, show_default=True, type=Number(0, 1e6))
@click.option("--ttft-goal-per-8k", default=DEFAULT.ttft_s_per_8k, show_default=True, type=Number(0, 1e6))
@click.option("--tpot-goal", default=DEFAULT.tpot_s, show_default=True, type=Number(0, 1e6))
@click.option("--plot", "picture", type=click.Path(dir_okay=False), help="PNG")
@click.option("--json", "as_json", is_flag=True, help="one JSON object and nothing else")
@click.pass_context
def main(context: click.Context, /, **given: Any) -> None:
    around: Surroundings = context.obj or ALONE
    objective = Objective(given["ttft_goal"], given["ttft_goal_per_8k"], given["tpot_goal"])
    work = Work.of(given, context)
    if given["picture"]:
        _plots.check(Path(given["picture"]))
    target = Target.of(given, around.found)
    spread = around.spread(given["address"]) if given["address"] else None
    made = prepared(work, target, given["loaders"], spread, objective)
    with progress_bar(quiet=given["as_json"]) as report:
        crew, stopped = asyncio.run(measured(made, report))
    found = figures(crew.loaders, objective) | {"stopped": stopped, "config": described(made, work)}
    if given["as_json"]:
        print(json.dumps(found))
    else:
        show.console().print(show.shown(_title(found), found), highlight=False)
    if given["picture"]:
        show.plot(Path(given["picture"]), [result for loader in crew.loaders for result in loader.results])
    if crew.why:
        print(f"pdserve: a load generator was lost: {crew.why}", file=sys.stderr)
    if found["load"]["lost"] or not found["requests"][COMPLETED]:
        sys.exit(1)


def _title(found: dict[str, Any]) -> str:
    config = found["config"]
    when = {"closed": f"closed loop of {config['concurrency']}", "burst": "all at once"}.get(
        config["arrival"], f"{config['rate']:.3g} requests/s"
    )
    return f"{config['model']} at {config['target']}: {config['dataset']}, {when}, seed {config['seed']}"


if __name__ == "__main__":
    sys.exit(run(main))
