"""`pdserve status`: the registry's view of the workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.actors import answers
from deploy.fleet import Fleet
from deploy.state import StateDir
from pdserve.client import unanswered
from protos.v1 import common_pb2, registry_pb2
from runtime.config import Config
from runtime.errors import InvalidRequest, WorkerLost

_ROLES = {common_pb2.ROLE_PREFILL: "prefill", common_pb2.ROLE_DECODE: "decode", common_pb2.ROLE_BOTH: "both"}
COLUMNS = ("worker", "role", "state", "run", "wait", "pages free", "cached", "leases", "pid", "address", "epoch")


def router_address(config: Config, given: str) -> str:
    """The router's gRPC address: as given, or of the cluster started here. Raises InvalidRequest without either."""
    if given:
        return given
    record = StateDir(config.state_dir).read()
    if record is None:
        raise InvalidRequest("no cluster was started here by `pdserve up`; name a router with --router", field="router")
    if not record.running:
        raise InvalidRequest("the cluster here has died: `pdserve down` removes what it left", field="state_dir")
    return record.grpc


def with_token(config: Config, given: str) -> Config:
    """The registry token of the cluster started here, which `up` has made up, unless one is configured."""
    record = StateDir(config.state_dir).read() if not given and not config.registry_token else None
    return config.model_copy(update={"registry_token": record.registry_token}) if record is not None else config


async def run(config: Config, router: str, as_json: bool) -> None:
    """Print the table, or a JSON object with the same. Raises the tree of runtime.errors."""
    address = router_address(config, router)
    async with Fleet(address, with_token(config, router)) as fleet:
        try:
            workers = await fleet.workers()
            serving = await fleet.serving()
        except WorkerLost as lost:
            raise WorkerLost(unanswered(address)) from lost
    rows = [row(record) for record in workers]
    ray = await asyncio.to_thread(_ray, config, router)
    if as_json:
        print(json.dumps({"router": address, "serving": serving, "ray": ray, "workers": rows}))
        return
    _print(address, serving, rows, ray)


def _ray(config: Config, router: str) -> dict[str, Any]:
    """Of the cluster started here: where its Ray is and whether it answers. {} where there is none."""
    record = StateDir(config.state_dir).read() if not router else None
    if record is None or not record.ray_address:
        return {}
    return {"address": record.ray_address, "answers": answers(record.ray_address)}


def row(record: registry_pb2.WorkerRecord) -> dict[str, Any]:
    """One worker as plain values."""
    load = record.load
    return {
        "worker": record.worker_id,
        "role": _ROLES.get(record.role, "?"),
        "state": _state(record),
        "running": load.running,
        "waiting": load.waiting,
        "pages_total": load.pages_total,
        "pages_free": load.pages_free,
        "pages_cached": load.pages_cached,
        "leases": load.leases,
        "quarantined_pages": load.quarantined_pages,
        "swapped": load.swapped,
        "tiers": [_tier(tier) for tier in load.tiers],
        "pid": record.pid,
        "epoch": str(record.epoch),  # more than a JSON number holds
        "address": record.address,
        "metrics": record.metrics_address,
        "node": record.node,
        "model": record.model,
    }


def _tier(tier: common_pb2.TierLoad) -> dict[str, Any]:
    """Bytes per second are those of the copies themselves; None before the first."""
    return {
        "tier": tier.tier,
        "pages_total": tier.pages_total,
        "pages_published": tier.pages_published,
        "pages_held": tier.pages_held,
        "hit_pages": tier.hit_pages,
        "states_total": tier.states_total,
        "states_published": tier.states_published,
        "hit_states": tier.hit_states,
        "lost_states": tier.lost_states,
        "bytes_down": tier.bytes_down,
        "bytes_up": tier.bytes_up,
        "down_bytes_per_s": tier.bytes_down / tier.seconds_down if tier.seconds_down else None,
        "up_bytes_per_s": tier.bytes_up / tier.seconds_up if tier.seconds_up else None,
        "swapped_out": tier.swapped_out,
        "swapped_in": tier.swapped_in,
        "faults": tier.faults,
    }


def _tiers_line(one: dict[str, Any]) -> str:
    parts = []
    for t in one["tiers"]:
        states = f", {t['states_published']}/{t['states_total']} states, {t['hit_states']} hits"
        states += f", {t['lost_states']} lost" if t["lost_states"] else ""
        pages = f"{t['tier']} {t['pages_published']}/{t['pages_total']} pages, {t['hit_pages']} hits"
        if not t["pages_total"]:  # other workers' caches
            pages = f"{t['tier']} {t['hit_pages']} hits"
        parts.append(pages + (states if t["states_total"] else ""))
    swapped = f", {one['swapped']} requests swapped out" if one["swapped"] else ""
    return f"{one['worker']}: " + "; ".join(parts) + swapped


def _state(record: registry_pb2.WorkerRecord) -> str:
    if record.draining:
        return "draining"
    return "ready" if record.ready else record.progress or "starting"


def _print(address: str, serving: bool, rows: Sequence[dict[str, Any]], ray: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # nothing is cut where nobody sees the window
    word = "[green]serving[/]" if serving else "[yellow]not serving[/]"
    console.print(f"router {address}: {word}", highlight=False)
    if ray and not ray["answers"]:
        text = f"Ray {ray['address']}: away; what runs goes on, and nobody starts a worker again"
        console.print(text, style="yellow", highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for one in rows:
        pages = f"{one['pages_free']}/{one['pages_total']}"
        values = (one["worker"], one["role"], one["state"], one["running"], one["waiting"], pages, one["pages_cached"])
        table.add_row(*map(str, (*values, one["leases"], one["pid"], one["address"], one["epoch"])))
    console.print(table)
    for one in rows:
        if one["tiers"]:
            console.print(_tiers_line(one), highlight=False)
