"""The tiers a configuration asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.pages import PagePool, SlotPool
from engine.prefix_cache import PrefixCache
from engine.retention import Retained
from engine.runner_api import ModelSpec
from engine.states import StateCache
from engine.tiers.carriers import Carrier, carrier_for
from engine.tiers.cost import SMALLEST_BYTES
from engine.tiers.disk import Disk, Folder, FolderDisk, OpenFile
from engine.tiers.pace import Pace
from engine.tiers.policy import Options, Sightings
from engine.tiers.pool import HostPool, Mover
from engine.tiers.tiers import Tiers
from engine.tiers.work import Lane, Thread
from kvtransfer.files import PlainFile
from kvtransfer.types import PAGE_TOKENS, Region
from runtime.config import Config
from runtime.errors import InvalidRequest

SLOT_SHARE = 2
"""By default at most one byte in so many of the host pool is for states, cached ones and those of swapped requests; of
the disk as much."""

SLOTS_PER_DEVICE_SLOT = 4
"""By default not more than so many states for each the device has room for: pages are what they stand on."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How bytes move between tiers. carry: makes who copies between the device's regions and the host's. open_file: the
    disk tier's file. layout: names what a page's bytes depend on beside its key and shape. lanes: of a test, instead of
    threads. disk: made of the host's mover, instead of files in the configured folder. clock: by which copies are
    timed. smallest_bytes: see Costs."""

    carry: Callable[[Config, Sequence[Region], Sequence[Region]], Carrier] = carrier_for
    open_file: OpenFile = PlainFile
    layout: str = ""
    lane: Lane | None = None
    disk_lane: Lane | None = None
    disk: Callable[[Mover], Disk] | None = None
    clock: Callable[[], float] = time.perf_counter
    smallest_bytes: int = SMALLEST_BYTES


def make_tiers(
    config: Config,
    model: ModelSpec,
    device: Sequence[Region],
    pages: PagePool,
    slots: SlotPool,
    cache: PrefixCache,
    states: StateCache | None,
    retained: Retained,
    news: Callable[[], None],
    now: Callable[[], float],
    ways: Ways,
    wall: Callable[[], float],
    busy: Callable[[], bool] = lambda: False,
) -> tuple[Tiers, HostPool] | None:
    """None when no host pool is configured.

    Raises InvalidRequest (the pool is smaller than a page, no folder is free), Unsupported (nobody can copy from such
    device memory), OSError (the disk). busy: a step is running.
    """
    count, host_slots = host_items(config, model, slots.total)
    if count == 0:
        return None
    host = HostPool(model.components, device, count + 1, host_slots + 1 if host_slots else 0)
    carrier = ways.carry(config, device, host.regions)
    pace = Pace(carrier.beside_step, busy)
    mover = Mover(tuple(model.components), tuple(device), host.regions, carrier, pace.spent)
    options = Options(
        pages=count + 1,
        slots=host_slots + 1 if host_slots else 0,
        order=config.host_evict,
        queue_pages=config.host_queue_pages,
        swap=config.swap,
        poison=config.host_poison,
    )
    sightings = Sightings(
        after=config.host_store_after,
        scope=config.host_store,
        cap_pages=-(-config.host_tokens_per_request // PAGE_TOKENS),
        bound=max(1 << 14, 4 * (count + pages.total)),
    )
    lane = ways.lane or Thread("host-tier", news, ways.clock)
    tiers = Tiers(options, sightings, pages, slots, cache, states, retained, mover, lane, now)
    tiers.costs.smallest_bytes = ways.smallest_bytes
    disk = ways.disk(mover) if ways.disk is not None else _folder_disk(config, model, mover, ways)
    if disk is not None:
        lane = ways.disk_lane or Thread("disk-tier", news, ways.clock)
        tiers.add_disk(disk, lane, config.disk_queue_pages, wall)
    return tiers, host


def _folder_disk(config: Config, model: ModelSpec, mover: Mover, ways: Ways) -> Disk | None:
    """None when none is configured."""
    if not config.disk_pool_bytes:
        return None
    count, places = disk_items(config, model)
    try:
        folder = Folder(Path(config.disk_pool_dir))
    except OSError as error:
        raise InvalidRequest(f"the folder cannot be used: {error.strerror}", field="disk_pool_dir") from error
    return FolderDisk(folder, layout_of(model, ways.layout), count, mover, ways.open_file, places)


def layout_of(model: ModelSpec, more: str) -> str:
    """All that the bytes of a page, or of a state, depend on and its key does not name."""
    return f"{more} {list(model.components)!r}"


def disk_items(config: Config, model: ModelSpec) -> tuple[int, int]:
    """Pages and states that the disk has room for: half of it is for states, but not more of them than of pages."""
    budget = config.disk_pool_bytes
    states = 0
    if model.has_state:
        size = model.slot_bytes + model.page_bytes
        states = min(budget // SLOT_SHARE // size, budget // (size + model.page_bytes))
        budget -= states * size
    return max(1, budget // model.page_bytes), states


def host_items(config: Config, model: ModelSpec, device_slots: int) -> tuple[int, int]:
    """Host pages and host slots, the null ones not counted."""
    budget = config.host_pool_bytes or config.host_pool_tokens // PAGE_TOKENS * model.page_bytes
    if budget == 0:
        return 0, 0
    states = 0
    if model.has_state:
        most = max(1, budget // SLOT_SHARE // model.slot_bytes) if config.host_pool_bytes else device_slots
        states = config.host_state_slots or min(SLOTS_PER_DEVICE_SLOT * device_slots, most)
        if not config.host_pool_bytes:
            budget += states * model.slot_bytes
    count = (budget - states * model.slot_bytes) // model.page_bytes
    if count < 1:
        least = states * model.slot_bytes + model.page_bytes
        key, limit = "host_pool_bytes", f"{least} bytes"
        if not config.host_pool_bytes:
            key, limit = "host_pool_tokens", f"{PAGE_TOKENS} tokens"
        raise InvalidRequest(f"less than one page and the states take: {limit}", field=key, limit=limit)
    return count, states
