"""`pdserve demo`: one prefill worker, one decode worker, one question, and the proof of who did what.

It is a check as much as a show: it fails when both halves ran in one process, when the bytes did not go through NIXL,
or when fewer or more moved than the prompt's pages hold.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.cluster import Cluster, Endpoints, StartFailed
from deploy.fleet import Fleet
from deploy.supervisor import EXIT_REFUSED
from pdserve import preflight
from pdserve.client import AsyncClient
from pdserve.progress import ProgressView
from pdserve.results import Completed, Delta, Event, Ledger, Usage
from pdserve.status import with_token
from pdserve.up import Stopped, until_signal
from protos.v1 import worker_pb2
from runtime.config import Config
from runtime.errors import InvalidRequest, NotFound, PdserveError, WorkerLost

MAX_TOKENS = 64

QUESTION = "What is the capital of France?"
QUESTIONS = {"tiny-kimi": "Anna lives in the forest. Anna likes soup. What does Anna like?"}
"""What a model was trained on, where that is not the world."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    usage: Usage
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class Worker:
    """What the demo needs of a worker's own description."""

    name: str
    pid: int
    transport: str
    page_tokens: int
    page_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, described: worker_pb2.DescribeReply) -> Worker:
        sizes = {True: 0, False: 0}
        for part in described.layout.components:
            sizes[part.paged] += part.units * part.layers * part.rows * part.tokens * part.token_bytes
        return cls(
            described.worker_id,
            described.pid,
            described.transport,
            described.layout.page_tokens,
            sizes[True],
            sizes[False],
        )


def expected_bytes(prompt_tokens: int, worker: Worker) -> int:
    """What a hand-off of that many tokens moves: whole pages, and the slot's components."""
    return -(-prompt_tokens // worker.page_tokens) * worker.page_bytes + worker.slot_bytes


def faults(answer: Answer, prefill: Worker, decode: Worker) -> list[str]:
    """Why this was not a hand-off between two processes over NIXL; empty when it was."""
    ledger, found = answer.ledger, []
    if not ledger.prefill_pid or ledger.prefill_pid == ledger.decode_pid:
        found.append(f"prefill and decode ran in one process ({ledger.prefill_pid})")
    if (ledger.prefill_pid, ledger.decode_pid) != (prefill.pid, decode.pid):
        found.append("the processes of the ledger are not those of the workers")
    if {ledger.transport, prefill.transport, decode.transport} != {"nixl"}:
        found.append(f"the transport is {ledger.transport or 'none'}, not nixl")
    expected = expected_bytes(answer.usage.prompt_tokens, decode)
    if ledger.transfer_bytes != expected or not expected:
        found.append(f"{ledger.transfer_bytes} bytes moved, {expected} expected")
    pages = -(-answer.usage.prompt_tokens // decode.page_tokens)
    if ledger.transfer_pages != pages:
        found.append(f"{ledger.transfer_pages} pages moved, {pages} expected")
    if not answer.text.strip():
        found.append("the answer is empty")
    return found


async def run(config: Config, ask: str, as_json: bool) -> int:
    """Exit status 0 only for a proven hand-off."""
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="pdserve-demo-", ignore_cleanup_errors=True) as folder:
        try:
            if config.sim:
                raise InvalidRequest("the demo is a proof that real workers work", field="sim")
            await asyncio.to_thread(preflight.check, config)
            return int(await until_signal(_run(_own(config, folder), ask, as_json, console)))
        except Stopped:
            return 130
        except (InvalidRequest, NotFound) as error:
            if not as_json:
                raise
            print(json.dumps({"ok": False, "faults": [error.line]}))
            return EXIT_REFUSED
        except (StartFailed, PdserveError) as error:
            text = error.line if isinstance(error, PdserveError) else str(error)
            console.print(f"pdserve demo: {text}", markup=False, highlight=False, soft_wrap=True, style="red")
            if as_json:
                print(json.dumps({"ok": False, "faults": [text]}))
            return 1


def _own(config: Config, folder: str) -> Config:
    """1P1D on ports and in a folder of its own, whatever else runs here."""
    fixed = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "state_dir": folder, "detach": False}
    return config.model_copy(update={**fixed, "prefill": 1, "decode": 1, "both": 0, "address": ""})


async def _run(config: Config, ask: str, as_json: bool, console: Console) -> int:
    view = ProgressView(console, quiet=as_json)
    cluster = Cluster(config, view)
    try:
        with view:
            endpoints = await cluster.start()
        prefill, decode = await _workers(endpoints, with_token(config, ""))
        if not as_json:
            console.print(f"\n[bold]{ask}[/bold]", highlight=False)
        answer = await _ask(endpoints.grpc, config, ask, quiet=as_json)
    finally:
        cluster.stop()
    found = faults(answer, prefill, decode)
    if as_json:
        print(json.dumps(_machine(ask, answer, prefill, decode, found)))
    else:
        _show(console, answer, prefill, decode, found)
    return 1 if found else 0


async def _workers(endpoints: Endpoints, config: Config) -> tuple[Worker, Worker]:
    async with Fleet(endpoints.grpc, config) as fleet:
        addresses = {record.worker_id: record.address for record in await fleet.workers()}
        prefill, decode = [Worker.of(await fleet.describe(addresses[name])) for name in endpoints.workers]
        return prefill, decode


async def _ask(router: str, config: Config, ask: str, quiet: bool) -> Answer:
    tls = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_ca": config.tls_ca}
    parts: list[str] = []
    last: Event | None = None
    async with AsyncClient(router, **tls) as client:
        async for event in client.chat_stream(ask, temperature=0.0, max_tokens=MAX_TOKENS, return_ledger=True):
            last = event
            if isinstance(event, Delta):
                parts.append(event.text)
                if not quiet:
                    print(event.text, end="", flush=True)
    if not quiet:
        print("\n")
    if not isinstance(last, Completed) or last.ledger is None:
        raise WorkerLost("the answer came without its ledger")
    return Answer("".join(parts), last.usage, last.ledger)


def _machine(ask: str, answer: Answer, prefill: Worker, decode: Worker, found: list[str]) -> dict[str, Any]:
    return {
        "ok": not found,
        "faults": found,
        "question": ask,
        "answer": answer.text,
        "usage": asdict(answer.usage),
        "ledger": asdict(answer.ledger),
        "expected_bytes": expected_bytes(answer.usage.prompt_tokens, decode),
        "workers": {"prefill": asdict(prefill), "decode": asdict(decode)},
    }


def _show(console: Console, answer: Answer, prefill: Worker, decode: Worker, found: list[str]) -> None:
    ledger = answer.ledger
    table = Table(title="Where the time went", title_justify="left", box=None, show_header=False)
    stages = ("render", "queue", "route", "prefill", "handoff_wait", "transfer", "checksum", "decode")
    for stage in stages:
        table.add_row(stage.replace("_", " "), f"{1000 * getattr(ledger, f'{stage}_s'):9.2f} ms")
    table.add_row("first token", f"{1000 * ledger.first_token_s:9.2f} ms after arrival")
    table.add_row("total", f"{1000 * ledger.total_s:9.2f} ms")
    console.print(table)
    tokens = f"{answer.usage.prompt_tokens} prompt tokens"
    state = f" and a recurrent state of {decode.slot_bytes:,} bytes" if decode.slot_bytes else ""
    moved = f"{ledger.transfer_pages} pages{state}: {ledger.transfer_bytes:,} bytes over {ledger.transport}"
    formula = f"{ledger.transfer_pages} x {decode.page_bytes:,}"
    formula += f" + {decode.slot_bytes:,}" if decode.slot_bytes else ""
    for line in (
        f"process {ledger.prefill_pid} ({prefill.name}) computed {tokens} and the first token",
        f"process {ledger.decode_pid} ({decode.name}) generated the other {answer.usage.completion_tokens - 1} tokens",
        f"{moved} (NIXL telemetry), {formula} expected",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    for fault in found:
        console.print(f"FAILED: {fault}", style="red", highlight=False)
