"""The command `pdserve`. Commands import what they need when they run, so that `router` starts without torch and Ray,
and `--help` is quick."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click

from deploy.supervisor import EXIT_REFUSED
from pdserve.flags import Command, configured
from runtime.config import Config
from runtime.config_keys import CHAT_KEYS, DOWN_KEYS, RESTART_KEYS, STATUS_KEYS, keys_of, keys_of_demo, keys_of_up
from runtime.errors import InvalidRequest, NotFound, PdserveError


class _Group(click.Group):
    """Turns our errors into one line and an exit status: 2 = the configuration is refused, 1 = anything else."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        _pin_modules()
        try:
            return super().invoke(ctx)
        except PdserveError as error:
            click.echo(f"pdserve: {error.line}", err=True)
            sys.exit(EXIT_REFUSED if isinstance(error, InvalidRequest | NotFound) else 1)


def _pin_modules() -> None:
    """The processes we start (`python -m ...`) run this code, not what a folder named router or bench holds where the
    user happens to be: Python would look there first."""
    root = str(Path(__file__).parent.parent)
    paths = [root, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root)]
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "show_default": False})
@click.version_option(package_name="pdserve")
def main() -> None:
    """Disaggregated LLM serving: prefill and decode on separate workers."""


@main.command()
@configured(keys_of_demo())
@click.option("--json", "as_json", is_flag=True, help="print one JSON object and nothing else")
@click.option("--ask", default="", help="the question  [default: one the model can answer]")
def demo(config: Config, ask: str, as_json: bool) -> None:
    """Start a prefill and a decode worker, ask a question, show who did what."""
    from pdserve.demo import QUESTION, QUESTIONS, run

    sys.exit(asyncio.run(run(config, ask or QUESTIONS.get(config.model, QUESTION), as_json)))


@main.command()
@configured(keys_of_up())
def up(config: Config) -> None:
    """Start a cluster: router, Ray (or join --address) and workers. Runs until Ctrl-C unless --detach."""
    from pdserve.up import run

    sys.exit(asyncio.run(run(config)))


@main.command()
@configured(DOWN_KEYS)
def down(config: Config) -> None:
    """End the cluster of this state folder, or the workers in the Ray at --address."""
    from deploy import cluster

    try:
        ended = cluster.down(config)
    except cluster.StartFailed as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"ended: {', '.join(ended) or 'nothing was running'}")


@main.command()
@configured(RESTART_KEYS)
@click.option("--rolling/--at-once", default=True, help="one after the other, no request fails  [rolling]")
@click.option("--worker", "only", multiple=True, help="restart this one alone; may be given again  [all]")
@click.option("--force", is_flag=True, help="also a worker that nobody can stand in for")
@click.option("--part", type=click.Choice(["workers", "routers"]), default="workers", help="whose processes  [workers]")
@click.option("--router", default="", help="gRPC address of a router  [the cluster of this state folder]")
@click.option("--metrics", default="", help="host:port of that router's /metrics, or several  [as of the cluster]")
def restart(
    config: Config, rolling: bool, only: tuple[str, ...], force: bool, part: str, router: str, metrics: str
) -> None:
    """Restart the workers' processes: drain one, replace it, wait until it serves, then the next. With --part routers
    those of the routers: start another one, let the old one finish, then the next."""
    from deploy import restart as process
    from pdserve import restart

    try:
        if part == "routers":
            restart.check_routers(rolling=rolling, only=only, router=router)
            restart.routers(config)
        else:
            asyncio.run(restart.run(config, router, metrics, only, rolling=rolling, force=force))
    except process.RestartFailed as error:
        raise click.ClickException(str(error)) from None


@main.command()
@configured(STATUS_KEYS)
@click.option("--router", default="", help="gRPC address of a router  [the cluster of this state folder]")
@click.option("--json", "as_json", is_flag=True, help="for machines")
def status(config: Config, router: str, as_json: bool) -> None:
    """Show the workers: role, state, load and memory."""
    from pdserve.status import run

    asyncio.run(run(config, router, as_json))


@main.command()
@configured(CHAT_KEYS)
@click.option("--router", default="", help="gRPC address of a router  [the cluster of this state folder]")
@click.option("--api-key", default="", envvar="PDSERVE_CLIENT_KEY", help="sent as a bearer token")
@click.option("--max-tokens", default=512, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
def chat(config: Config, router: str, api_key: str, max_tokens: int, temperature: float) -> None:
    """Talk to the model. An empty line or Ctrl-D ends it."""
    from pdserve.chat import run

    run(config, router, api_key, max_tokens=max_tokens, temperature=temperature)


@main.command("router")
@configured(keys_of("router"))
def router_command(config: Config) -> None:
    """Run the router alone (in the foreground)."""
    from router.app import main as run
    from runtime.registry import check_of_router

    check_of_router(config)
    sys.exit(run(config))


@main.command()
@configured(keys_of("worker"))
def worker(config: Config) -> None:
    """Run one worker alone (in the foreground); --registry says where it announces itself."""
    from pdserve.worker import main as run

    sys.exit(run(config))


@main.command()
@configured(keys_of("controller"))
@click.option("--router", default="", help="gRPC address of a router  [the cluster of this state folder]")
@click.option("--metrics", default="", help="host:port of that router's /metrics, or several  [as of the cluster]")
def controller(config: Config, router: str, metrics: str) -> None:
    """Run the elastic controller alone (in the foreground): roles follow the load. `up --elastic` runs one."""
    from deploy.controller import main as run

    sys.exit(run(config, router, metrics))


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure; the arguments are those of the benchmarks (`pdserve bench --help`)."""
    if arguments[:1] == ("serve",):
        from pdserve.bench_serve import run as serve

        sys.exit(serve(arguments[1:]))
    from bench.__main__ import main as run

    sys.exit(run(list(arguments)))
