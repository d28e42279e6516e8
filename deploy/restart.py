"""Every worker's process is replaced, one after the other, and no request fails.

For each: somebody else must be able to do its work; it drains (what decodes there moves on or finishes, hand-offs are
read); its supervising actor puts another process in its place; the router sees that one ready; it gets back the role it
had. Where a worker is the only one of its role, one of the other role does both meanwhile. Any failure puts back what
was changed and ends the whole: the rest goes on in its old processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from deploy.actors import RayFailed
from deploy.fleet import Fleet
from deploy.pressure import ROLES, scrape, together
from protos.v1 import common_pb2, registry_pb2
from runtime.errors import InvalidRequest, PdserveError

LOOK_S = 0.2
SEEN_S = 20.0
"""How long the router may take to see what was changed."""
READY_S = 900.0
"""How long a new process may take to load its weights."""

_ORDER = {common_pb2.ROLE_PREFILL: 0, common_pb2.ROLE_DECODE: 1, common_pb2.ROLE_BOTH: 2}
_NEEDS: dict[int, frozenset[str]] = {
    common_pb2.ROLE_PREFILL: frozenset({"prefill"}),
    common_pb2.ROLE_DECODE: frozenset({"decode"}),
    common_pb2.ROLE_BOTH: frozenset({"prefill", "decode"}),
}

Record = registry_pb2.WorkerRecord
Say = Callable[[str, str], None]


class RestartFailed(Exception):
    """A restart ended early; the message says at which worker and why."""


class Restart:
    """replace(worker): start another process in its place; called on a thread, raises RayFailed. metrics: host:port of
    the router's /metrics (several: commas between them), "" = it cannot be asked. say(worker, what it is doing)."""

    def __init__(self, fleet: Fleet, replace: Callable[[str], object], metrics: str, drain_s: float, say: Say) -> None:
        self._fleet = fleet
        self._process = replace
        self._metrics = metrics
        self._drain_s = drain_s
        self._say = say

    async def rolling(self, only: Sequence[str], *, force: bool) -> list[str]:
        """The workers that were restarted: all, or `only` these. force: even one that nobody can stand in for.

        Raises InvalidRequest before anything is changed, RestartFailed later, PdserveError without a router."""
        names = [record.worker_id for record in await self._chosen(only)]
        if not force:
            await self._refuse_alone(names)
        for name in names:
            try:
                await self._one(name, force)
            except (PdserveError, RayFailed, TimeoutError) as error:
                why = str(error) or "it took too long"
                raise RestartFailed(f"{name}: {why}; the workers after it were not touched") from error
        return names

    async def at_once(self, only: Sequence[str]) -> list[str]:
        """All together, without a drain: what runs fails."""
        records = await self._chosen(only)
        try:
            await asyncio.gather(*(self._replace(record) for record in records))
        except (PdserveError, RayFailed, TimeoutError) as error:
            raise RestartFailed(str(error) or "it took too long") from error
        return [record.worker_id for record in records]

    async def _chosen(self, only: Sequence[str]) -> list[Record]:
        records = await self._fleet.workers()
        unknown = set(only) - {record.worker_id for record in records}
        if unknown:
            raise InvalidRequest(f"there is no worker {min(unknown)}", field="worker")
        chosen = [record for record in records if not only or record.worker_id in only]
        return sorted(chosen, key=lambda record: (_ORDER.get(record.role, 3), record.worker_id))

    async def _refuse_alone(self, names: Sequence[str]) -> None:
        usable = [record for record in await self._fleet.workers() if _usable(record)]
        if len(usable) == 1 and usable[0].worker_id in names:
            raise InvalidRequest(
                f"{usable[0].worker_id} is the only worker: requests would fail while it restarts (--force does it)",
                field="force",
            )

    # --- one worker

    async def _one(self, name: str, force: bool) -> None:
        record = await self._record(name)
        if not _usable(record):  # nobody uses it
            await self._replace(record)
            return
        async with self._stood_in(record, force):
            try:
                await self._drained(record)
                await self._replace(record)
            except BaseException:
                with contextlib.suppress(PdserveError):
                    await self._fleet.drain(record.address, False)
                raise
            new = await self._record(name)
            if new.role != record.role:
                await self._fleet.set_role(new.address, record.role)
            await self._seen(record.worker_id, record.role, _NEEDS[record.role])

    @asynccontextmanager
    async def _stood_in(self, record: Record, force: bool) -> AsyncIterator[None]:
        """While somebody else can do what this worker does, if need be in a second role."""
        others = [one for one in await self._fleet.workers() if _usable(one) and one.worker_id != record.worker_id]
        missing = {pool for pool in _NEEDS[record.role] if not any(pool in _NEEDS[one.role] for one in others)}
        if not missing or not others:
            if missing and not force:
                raise InvalidRequest("nobody else is there to do its work", field="force")
            yield
            return
        helper = min(others, key=lambda one: (one.load.running + one.load.waiting, one.worker_id))
        self._say(helper.worker_id, f"does both meanwhile, as {record.worker_id} is the only one for {min(missing)}")
        await self._fleet.set_role(helper.address, common_pb2.ROLE_BOTH)
        try:
            await self._seen(helper.worker_id, common_pb2.ROLE_BOTH, _NEEDS[record.role])
            yield
        finally:
            with contextlib.suppress(PdserveError):
                await self._fleet.set_role(helper.address, helper.role)
        # Until that is heard of its record says both, which is what it would be given back after its own restart.
        await self._seen(helper.worker_id, helper.role, frozenset())
        self._say(helper.worker_id, f"is {ROLES[helper.role]} again")

    async def _drained(self, record: Record) -> None:
        """Empty, or out of time: then what it still holds is finished elsewhere."""
        self._say(record.worker_id, "drains")
        running, leases = await self._fleet.drain(record.address, True, self._drain_s)
        if running or leases:
            self._say(record.worker_id, f"still holds {running} requests and {leases} hand-offs: they go on elsewhere")

    async def _replace(self, record: Record) -> None:
        """Another process, ready. Raises TimeoutError."""
        self._say(record.worker_id, "restarts")
        await asyncio.to_thread(self._process, record.worker_id)
        said = ""
        async with asyncio.timeout(READY_S):
            while True:
                new = await self._look(record.worker_id)
                if new is not None and new.epoch > record.epoch and new.ready:
                    break
                if new is not None and new.epoch > record.epoch and new.progress != said:
                    said = new.progress
                    self._say(record.worker_id, said)
                await asyncio.sleep(LOOK_S)
        self._say(record.worker_id, "is ready")

    async def _record(self, name: str) -> Record:
        record = await self._look(name)
        if record is None:
            raise InvalidRequest("it is not registered any more", field="worker")
        return record

    async def _look(self, name: str) -> Record | None:
        return next((one for one in await self._fleet.workers() if one.worker_id == name), None)

    async def _seen(self, worker: str, role: common_pb2.Role.ValueType, pools: frozenset[str]) -> None:
        """The worker has said that it has this role, and the router can choose everybody who says to be there. One that
        cannot be asked is given time instead."""
        async with asyncio.timeout(SEEN_S):
            while True:
                records = [one for one in await self._fleet.workers() if _usable(one)]
                if any(one.worker_id == worker and one.role == role for one in records):
                    break
                await asyncio.sleep(LOOK_S / 4)
            while self._metrics:
                records = [one for one in await self._fleet.workers() if _usable(one)]
                try:
                    usable = together(await asyncio.to_thread(scrape, self._metrics)).usable
                except (OSError, ValueError):
                    break
                wanted = {pool: sum(pool in _NEEDS[one.role] for one in records) for pool in pools}
                if all(usable.get(pool, 0) + usable.get("both", 0) >= count for pool, count in wanted.items()):
                    return
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(1.0)


def _usable(record: Record) -> bool:
    return record.ready and not record.draining and record.role in _NEEDS
