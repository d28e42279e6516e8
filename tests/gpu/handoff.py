"""Part of the GPU check: pages and a state from one process to another on one device, by NIXL reads.

The other process (python -m tests.gpu.handoff DEVICE DTYPE MODEL PAGES) computes the prompt and lends its pools; this
one reads, verifies, and goes on with the next tokens, which must be those of one process alone.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch  # before NIXL: its CUDA libraries are those that torch has loaded

from engine.device_memory import DeviceChecksum
from engine.plan import Copy, Row, SampleSpec, SamplingParams, StepPlan
from engine.runner import TorchRunner
from kvtransfer.mapping import Moves, UnitRead, concat, moves
from kvtransfer.nixl import NixlTransport
from kvtransfer.transport import Agent, Incarnation
from kvtransfer.types import PAGE_TOKENS, Component, Region
from tests.gpu.parts import Figures, limits, prompts, runner
from tests.gpu.speed import shapes

SOURCE = Incarnation("source", 0, 1)
READER = Incarnation("reader", 0, 1)
GREEDY = SamplingParams()
LENGTH = 75
"""Of the prompt: its last page is not full."""
SLOT = {"source": 1, "reader": 2}
SPARE = 3
TOKENS = 6
DEADLINE_S = 30.0


@dataclass(slots=True)
class Side:
    """A runner, and its sequence: where its pages lie."""

    run: TorchRunner
    pages: tuple[int, ...]
    slot: int

    def step(self, tokens: Sequence[int], start: int) -> int:
        spec = self.run.spec()
        samples = (SampleSpec(GREEDY, start + len(tokens), 0),)
        row = Row(0, tuple(tokens), start, self.pages, self.slot if spec.has_state else 0, samples)
        return self.run.run(StepPlan(0, (row,))).rows[0].tokens[0]

    def go_on(self, token: int) -> list[int]:
        found = [token]
        for at in range(LENGTH, LENGTH + TOKENS):
            found.append(self.step((found[-1],), at))
        return found


def side(name: str, device: str, dtype: str, model: str, pages: int) -> Side:
    """The source's pages rise, the reader's fall: neighbours on one side are none on the other."""
    run = runner(shapes(device)[model][0], device, dtype, pages, 4)
    count = (LENGTH + TOKENS) // PAGE_TOKENS + 1
    own = tuple(range(3, 3 + count)) if name == "source" else tuple(range(pages - 2, pages - 2 - count, -1))
    return Side(run, own, SLOT[name])


def vocabulary(one: Side) -> list[int]:
    return prompts(one.run.spec().vocab_size, (LENGTH,))[0]


async def lend(device: str, dtype: str, model: str, pages: int) -> None:
    """The source: one line of JSON says what it has; it ends with its standard input."""
    mine = side("source", device, dtype, model, pages)
    token = mine.step(vocabulary(mine), 0)
    transport = NixlTransport(SOURCE)
    agent = await transport.start(mine.run.regions())
    components, regions = mine.run.spec().components, mine.run.regions()
    checksum = DeviceChecksum()
    sums = [checksum(region, component, *_items(component, mine)) for component, region in _pairs(components, regions)]
    line = {
        "metadata": agent.metadata.hex(),
        "regions": [asdict(region) for region in regions],
        "token": token,
        "sums": sums,
        "pages": mine.pages,
        "alone": _alone(mine, token),
    }
    print(json.dumps(line), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


def _alone(mine: Side, token: int) -> list[int]:
    """The source's own tokens, from a copy of the state: the one that is lent stays as the prompt left it."""
    if mine.run.spec().has_state:
        mine.run.run(StepPlan(0, (), (Copy(False, mine.slot, SPARE, LENGTH, LENGTH),)))
    return Side(mine.run, mine.pages, SPARE).go_on(token)


def _pairs(components: Sequence[Component], regions: Sequence[Region]) -> list[tuple[Component, Region]]:
    by_name = {r.component: r for r in regions}
    return [(component, by_name[component.name]) for component in components]


def _items(component: Component, one: Side) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the prompt left in this component, and the valid tokens of each."""
    if not component.paged:
        return (one.slot,), (1,)
    count = -(-LENGTH // PAGE_TOKENS)
    return one.pages[:count], (*[PAGE_TOKENS] * (count - 1), LENGTH - (count - 1) * PAGE_TOKENS)


def _table(mine: Side, regions: Sequence[Region], theirs: Side) -> list[Moves]:
    found = []
    own = {r.component: r for r in mine.run.regions()}
    for component, remote in _pairs(mine.run.spec().components, regions):
        read = UnitRead(0, 0, 0, component.units)
        here, there = _items(component, mine)[0], _items(component, theirs)[0]
        found.append(moves(component, read, own[component.name], here, remote, there))
    return concat(found)


async def _read(transport: NixlTransport, tables: Sequence[Moves]) -> int:
    flights = [transport.read(SOURCE.agent_name, table, time.monotonic() + DEADLINE_S) for table in tables]
    return sum([(await flight.result).nbytes for flight in flights])


async def _handed(mine: Side, source: subprocess.Popen[str], device: str, pages: int) -> Figures:
    told = json.loads(await asyncio.get_running_loop().run_in_executor(None, _line, source))
    regions = [Region(**region) for region in told["regions"]]
    theirs = Side(mine.run, tuple(told["pages"]), SLOT["source"])
    transport = NixlTransport(READER)
    await transport.start(mine.run.regions())
    try:
        await transport.connect(SOURCE, Agent(SOURCE.agent_name, bytes.fromhex(told["metadata"])))
        nbytes = await _read(transport, _table(mine, regions, theirs))
        own, checksum = {r.component: r for r in mine.run.regions()}, DeviceChecksum()
        for component, sums in zip(mine.run.spec().components, told["sums"], strict=True):
            here = checksum(own[component.name], component, *_items(component, mine))
            assert here == sums, f"{component.name} arrived with other bytes"
        assert mine.go_on(told["token"]) == told["alone"], "other tokens than one process alone"
        rates = await _rate(transport, mine, regions, pages)
        best = limits(device)["memory_bytes_per_s"] / 2
        return {"bytes": nbytes, **rates, "best_ratio": rates["read_bytes_per_s"] / best}
    finally:
        await transport.close()


def _line(source: subprocess.Popen[str]) -> str:
    """What the source has to say, past what its libraries print."""
    assert source.stdout is not None
    for line in source.stdout:
        if line.startswith("{"):
            return line
    raise AssertionError("the source has ended")


async def _rate(transport: NixlTransport, mine: Side, regions: Sequence[Region], pages: int) -> Figures:
    """Reads of as many scattered pages as half the pool holds, which nobody uses."""
    component, remote = next(p for p in _pairs(mine.run.spec().components, regions) if p[0].paged)
    own = next(r for r in mine.run.regions() if r.component == component.name)
    odd = list(range(1, pages, 2))
    table = moves(component, UnitRead(0, 0, 0, component.units), own, odd, remote, odd[::-1])
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        await _read(transport, [table])
        taken.append(time.perf_counter() - began)
    return {
        "read_bytes_per_s": table.nbytes / min(taken),
        "first_read_bytes_per_s": table.nbytes / taken[0],
        "ranges": len(table),
    }


def handoff(device: str) -> Figures:
    """A dense and a hybrid model, in fp32: a prompt handed from one process to another."""
    return {model: _one(device, model, 1025 if device == "cuda" else 33) for model in ("dense", "hybrid")}


def _one(device: str, model: str, pages: int) -> Figures:
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, device, "float32", model, str(pages)]
    source = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        mine = side("reader", device, "float32", model, pages)
        found = asyncio.run(_handed(mine, source, device, pages))
        mine.run.close()
        return found
    finally:
        assert source.stdin is not None
        source.stdin.close()
        try:
            source.wait(20)
        except subprocess.TimeoutExpired:
            source.kill()
            source.wait()


def main(arguments: Sequence[Any]) -> None:
    device, dtype, model, pages = arguments
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    asyncio.run(lend(device, dtype, model, int(pages)))


if __name__ == "__main__":
    main(sys.argv[1:])
