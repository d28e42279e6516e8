"""What the other routers have at the same workers.

The failure that shapes it: every router's own books say that a worker is empty, and all of them send it their next
requests. What workers report of themselves holds everybody's; less what this router had there when the report came,
the rest is the others'. It is as old as the report, so it is a correction and no booking: the worker's own answer to
Reserve stays the truth, and a refused request goes elsewhere. A router that is alone corrects nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from kvtransfer.types import PAGE_TOKENS
from protos.v1 import common_pb2
from router.policy.pairing import Role
from router.policy.speeds import Speeds
from router.policy.view import Work, WorkerView
from router.shared.claims import Claimant
from runtime.registry.store import Store

PRESENCE_S = 1.0
PRESENCE_TTL_S = 3.0


@dataclass(frozen=True, slots=True)
class _Own:
    """What this router had at a worker when it reported."""

    sequence: int
    prefill_tokens: int
    requests: int
    held_tokens: int
    held_slots: int


class Others:
    """present: whether there is another router now, or was when Redis last answered."""

    def __init__(self, speeds: Speeds) -> None:
        self.present = False
        self._speeds = speeds
        self._own: dict[str, _Own] = {}

    def forget(self, worker_id: str) -> None:
        self._own.pop(worker_id, None)

    def corrected(self, view: WorkerView, load: common_pb2.Load, now: float) -> WorkerView:
        """The view with the others' part in its account: a copy to decide on, never to book in."""
        if not self.present:
            return view
        own = self._own.get(view.worker_id)
        if own is None or own.sequence != load.sequence:
            own = self._own[view.worker_id] = _account(view, load.sequence)
        prefill = max(load.queued_prefill_tokens - own.prefill_tokens, 0)
        requests = max(load.running + load.waiting - own.requests, 0)
        held = max(PAGE_TOKENS * (load.pages_total - load.pages_free) - own.held_tokens, 0)
        slots = max(load.slots_total - load.slots_free - own.held_slots, 0)
        if not (prefill or requests or held or slots):
            return view
        decoding = requests if view.role is not Role.PREFILL else 0
        corrected = replace(
            view,
            kv_tokens=max(view.kv_tokens - held, 1) if view.kv_tokens else 0,
            slots=max(view.slots - slots, 1) if view.slots else 0,
            prefill_tokens=view.prefill_tokens + prefill,
            decoding=view.decoding + decoding,
            context_tokens=view.context_tokens + (held if decoding else 0),
        )
        if prefill:  # as one more prompt, behind ours
            seconds = self._speeds.prefill_s(view.worker_id, prefill, 0)
            corrected.work = {**view.work, ("", 0): Work(seconds, prefill, (now, 0))}
            corrected.head_since = view.head_since if view.work else now
        return corrected


def _account(view: WorkerView, sequence: int) -> _Own:
    prompts = len(view.work) if view.role is not Role.DECODE else 0  # those that stay there decode, too
    requests = prompts + (view.decoding if view.role is not Role.PREFILL else 0)
    return _Own(sequence, view.prefill_tokens, requests, view.held_tokens, view.held_slots)


class Presence(Claimant):
    """Tells the others that this router is there, and `others` whether they are."""

    def __init__(self, store: Store, router_id: str, others: Others) -> None:
        super().__init__(store, "routers", router_id, PRESENCE_TTL_S)
        self._others = others

    async def turn(self) -> None:
        self._others.present = (await self.claim({})).holders > 1

    async def pause(self) -> None:
        await asyncio.sleep(PRESENCE_S)
