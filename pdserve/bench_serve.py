"""`pdserve bench serve`: the benchmark, with what it cannot know by itself: the cluster that was started here, and the
way to the nodes of a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from bench.load.crew import Spread
from bench.replay import run as run_command
from bench.serve import Surroundings, main
from deploy.placement import child_env
from deploy.state import StateDir
from runtime.config import Config


def run(arguments: Sequence[str]) -> int:
    """Exit status."""
    return run_command(main, arguments, name="pdserve bench serve", around=Surroundings(_found, _spread))


def _found(state_dir: str) -> str:
    """The HTTP address of the cluster of that state folder, "" when none was started there."""
    record = StateDir(Config.load({"state_dir": state_dir or None}).state_dir).read()
    return record.http if record is not None else ""


def _spread(address: str) -> Spread:
    return Spread((sys.executable, "-m", "deploy.ray_load"), {"address": address}, child_env(os.environ, {}))
