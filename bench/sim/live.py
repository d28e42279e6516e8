"""Simulated hardware in real time: a runner that only takes the profile's time, and a transport that only takes the
network's (and see bench.sim.below, bench.sim.clock). Everything around them is the real worker: engine, scheduler,
pools, prefix cache, tiers, tickets, leases, events.

A page here holds one byte a token and nothing is written into it, so hundreds of workers fit into one process. One such
byte stands for `kv_bytes_per_token` real ones; a state slot is scaled alike, so that what workers report of transfers
keeps its proportions. Next tokens are a function of their position and seed: an answer is the same wherever and however
often it is computed, and never ends by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.sim.clock import drift_of
from bench.sim.noise import reader_of, seed_of
from bench.sim.profile import Profile
from engine.plan import Logprob, Row, RowResult, SampleSpec, StepPlan, StepResult
from engine.runner_api import ModelSpec
from kvtransfer.mapping import Moves
from kvtransfer.transport import Agent, Flight, Incarnation, ReadStats
from kvtransfer.types import PAGE_TOKENS, Component, Region
from runtime.config import Config
from runtime.errors import DeadlineExceeded, InvalidRequest, TransferFailed

CONTEXT = 1 << 17
STARTED_REMEMBERED = 4096


def configured(config: Config, profile: Profile) -> Config:
    """`config` with the pools, batch and chunks of the profile."""
    return config.model_copy(update=_changes(config, profile))


def refuse_overridden(config: Config, profile: Profile) -> None:
    """Raises InvalidRequest for a key that only the profile says."""
    given, changes = config.overrides(), _changes(config, profile)
    for key in changes.keys() - {"host_queue_pages", "disk_queue_pages"}:
        if key in given and given[key] != changes[key]:
            raise InvalidRequest("a simulated worker has it from its profile", field=key, limit=f"{changes[key]}")


def _changes(config: Config, profile: Profile) -> dict[str, Any]:
    """What a chunk leaves may be on its way down at once: the default is for pages that are copied by a processor."""
    pool = profile.pool
    chunk = max(profile.prefill.chunk_tokens // 256 * 256, 256)
    changes: dict[str, Any] = {
        "kv_pool_tokens": pool.kv_tokens,
        "max_batch": pool.max_batch,
        "chunk_tokens": chunk,
        "max_batched_tokens": chunk + pool.max_batch,
        "host_pool_bytes": 0,
        "host_pool_tokens": pool.host_kv_tokens,
        "host_queue_pages": max(config.host_queue_pages, chunk // PAGE_TOKENS),
        "disk_pool_bytes": 0,
        "disk_queue_pages": max(config.disk_queue_pages, chunk // PAGE_TOKENS),
    }
    if profile.model.kind == "hybrid":
        changes |= {
            "state_slots": pool.state_slots,
            "state_interval_tokens": profile.model.checkpoint_interval,
            "host_state_slots": pool.host_state_slots,
        }
    return changes


class SimRunner:
    """Implements engine.runner_api.Runner. vocab_size and eos_token_ids are the served model's."""

    def __init__(
        self,
        profile: Profile,
        worker_id: str,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        model = profile.model
        components = [Component("kv", True, 1, 1, 1, PAGE_TOKENS, 1, "uint8")]
        if model.kind == "hybrid":
            scaled = max(round(model.state_bytes / model.kv_bytes_per_token), 1)
            components.append(Component("state", False, 1, 1, 1, 1, scaled, "uint8"))
        device = f"sim: {profile.name}, {model.layers} layers"
        self._spec = ModelSpec(vocab_size, CONTEXT, tuple(components), eos_token_ids, dtype="uint8", device=device)
        self._profile = profile
        self._reader = reader_of(profile.noise, worker_id, "steps")
        drawn = np.random.default_rng([seed_of(worker_id), 0xF1EE7]).normal(0.0, profile.heterogeneity.speed_sigma)
        self._speed = float(np.exp(drawn))
        self._sleep = sleep
        self._pools: list[NDArray[np.uint8]] = []
        self._started: OrderedDict[int, None] = OrderedDict()

    def spec(self) -> ModelSpec:
        return self._spec

    def allocate(self, num_pages: int, num_slots: int) -> None:
        counts = [num_pages if component.paged else num_slots for component in self._spec.components]
        self._pools = [
            np.zeros((count, component.item_bytes), np.uint8)
            for count, component in zip(counts, self._spec.components, strict=True)
        ]

    def regions(self) -> tuple[Region, ...]:
        return tuple(
            Region(index, component.name, pool.ctypes.data, pool.nbytes, component.item_bytes, 0, 1)
            for index, (component, pool) in enumerate(zip(self._spec.components, self._pools, strict=True))
        )

    def run(self, plan: StepPlan) -> StepResult:
        self._sleep(self.seconds(plan))
        return StepResult(plan.step, tuple(self._row(row) for row in plan.rows))

    def close(self) -> None:
        """The memory goes with the last reference to this runner."""

    def seconds(self, plan: StepPlan) -> float:
        """What the step takes on this worker."""
        decodes = [row for row in plan.rows if row.is_decode]
        prefills = [row for row in plan.rows if not row.is_decode]
        tokens = sum(len(row.tokens) for row in prefills)
        seconds = sum(self._prefill(row) for row in prefills)
        if decodes:
            step = self._profile.step_s(len(decodes), sum(row.start + 1 for row in decodes))
            stretch = 1.0 + self._profile.mixed.decode_slowdown_per_prefill_token * tokens
            seconds += step * stretch * self._reader.next()
        return seconds * self._speed

    def _prefill(self, row: Row) -> float:
        fixed = 0.0 if row.seq in self._started else self._profile.prefill.fixed_s
        if row.samples:
            self._started.pop(row.seq, None)
        else:
            self._started[row.seq] = None
            if len(self._started) > STARTED_REMEMBERED:
                self._started.popitem(last=False)
        return fixed + self._profile.prefill_s(row.start, len(row.tokens)) * self._reader.next()

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _row(self, row: Row) -> RowResult:
        tokens = tuple(self._token(spec) for spec in row.samples)
        scores = tuple(
            _score(token) if spec.params.logprobs else None for token, spec in zip(tokens, row.samples, strict=True)
        )
        return RowResult(row.seq, tokens, scores, tuple(_score(token) for token in row.prompt_targets))

    def _token(self, spec: SampleSpec) -> int:
        token = (spec.position * 2_654_435_761 + spec.params.seed * 40_503 + spec.choice * 97) % self._spec.vocab_size
        never = {*spec.banned, *self._spec.eos_token_ids, *spec.params.stop_token_ids}
        while token in never:
            token = (token + 1) % self._spec.vocab_size
        return token


def _score(token: int) -> Logprob:
    return Logprob(token, 0.0, 1)


@dataclass(slots=True)
class Nics:
    """NICs of the simulated workers of one process, filled in the order they start. flows: NIC -> reads on it."""

    profile: Profile
    _places: dict[str, int] = field(default_factory=dict)
    _flows: dict[int, int] = field(default_factory=dict)

    def of(self, worker_id: str) -> int:
        place = self._places.setdefault(worker_id, len(self._places))
        return place // self.profile.transfer.shared_nic_workers

    def begin(self, nics: tuple[int, int]) -> int:
        """Count a read; how many share the fuller of its NICs."""
        for nic in set(nics):
            self._flows[nic] = self._flows.get(nic, 0) + 1
        return max(self._flows[nic] for nic in nics)

    def end(self, nics: tuple[int, int]) -> None:
        for nic in set(nics):
            self._flows[nic] -= 1


class SimTransport:
    """Implements kvtransfer.transport.Transport: a read takes its time and moves nothing. Its peers may live in other
    processes; a read's share of a NIC is fixed when it starts, by what flies in this process then."""

    name = "sim"

    def __init__(self, incarnation: Incarnation, nics: Nics) -> None:
        self._incarnation = incarnation
        self._nics = nics
        self._reader = reader_of(nics.profile.noise, incarnation.worker_id, "transfers")
        self._pace = 1.0 + drift_of(nics.profile, incarnation.worker_id)  # of its clock
        self._peers: dict[str, Incarnation] = {}
        self._tasks: dict[asyncio.Task[None], Flight] = {}

    async def start(self, regions: Sequence[Region]) -> Agent:
        self._nics.of(self._incarnation.worker_id)
        return Agent(self._incarnation.agent_name, b"sim")

    async def connect(self, incarnation: Incarnation, agent: Agent) -> None:
        if agent.metadata != b"sim":
            raise TransferFailed("a simulated worker reads from simulated workers only")
        for name, known in list(self._peers.items()):
            if (known.worker_id, known.rank) == (incarnation.worker_id, incarnation.rank) and name != agent.name:
                if known.epoch > incarnation.epoch:
                    raise TransferFailed("a newer incarnation of this peer is known")
                await self.disconnect(name)
        self._peers[agent.name] = incarnation

    async def disconnect(self, agent_name: str) -> None:
        self._peers.pop(agent_name, None)
        for task, flight in list(self._tasks.items()):
            if flight.peer == agent_name:
                task.cancel()

    def read(self, agent_name: str, moves: Moves, deadline: float) -> Flight:
        flight = Flight(agent_name, moves, deadline)
        peer = self._peers.get(agent_name)
        if peer is None:
            flight.fail(TransferFailed("no such peer is connected"))
            flight.settle()
            return flight
        task = asyncio.create_task(self._fly(flight, peer))
        self._tasks[task] = flight
        task.add_done_callback(self._landed)
        return flight

    def quarantined(self) -> int:
        return 0  # nothing is ever written

    def unhealthy(self) -> str:
        return ""

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*list(self._tasks), return_exceptions=True)

    async def _fly(self, flight: Flight, peer: Incarnation) -> None:
        terms, nics = self._nics.profile.transfer, self._nics
        ends = (nics.of(peer.worker_id), nics.of(self._incarnation.worker_id))
        size = int(flight.moves.local[:, 1].sum())
        started = time.monotonic()
        crowd = nics.begin(ends)
        try:
            rate = terms.bandwidth_Bps / crowd / nics.profile.model.kv_bytes_per_token
            seconds = (terms.setup_s + size / rate) * self._reader.next()
            left = flight.deadline - started
            await _until(started + min(seconds, left))
            if seconds > left:
                raise DeadlineExceeded("the read did not finish in time")
        finally:
            nics.end(ends)
        flight.succeed(ReadStats(size, len(flight.moves), (time.monotonic() - started) * self._pace))

    def _landed(self, task: asyncio.Task[None]) -> None:
        flight = self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, DeadlineExceeded | TransferFailed):
            flight.fail(error)
        elif task.cancelled() or error is not None:
            flight.fail(TransferFailed("the peer was disconnected"))
        flight.settle()


async def _until(end: float) -> None:
    """Sleep to `end` of time.monotonic. uvloop rounds to milliseconds, down too; here it is rounded up."""
    left = end - time.monotonic()
    await asyncio.sleep(left)
    if time.monotonic() < end:
        await asyncio.sleep(0.001)
