"""What lies below a simulated device, in real time: the real worker's tiers, with the profile's room, around copies
that take their time and move nothing.

Pages and states have their places, owners, names and events as in a real worker. No host memory is ever touched, and
there is no file: where a real worker compares checksums, these are all 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.sim.noise import Reader, reader_of
from bench.sim.profile import Profile
from engine.tiers.build import Ways
from engine.tiers.carriers import Carrier, Found, Pair, Part
from engine.tiers.disk import Disk, HostItem
from engine.tiers.journal import Found as Left
from engine.tiers.journal import Hint, Put, StatePut
from engine.tiers.pool import Mover, Sums
from kvtransfer.types import PAGE_TOKENS, Region
from runtime.clock import Clock
from runtime.config import Config

Sleep = Callable[[float], None]

IN_ONE_GO = 1 << 62
"""Bytes: a copy is set up once, however long it is."""


def ways(profile: Profile, worker_id: str, clock: Clock, sleep: Sleep = time.sleep) -> Ways:
    """How bytes move below this worker's device. clock: the worker's own."""
    host, disk = (reader_of(profile.noise, worker_id, part) for part in ("host", "disk"))

    def carry(_config: Config, _device: Sequence[Region], _host: Sequence[Region]) -> Carrier:
        return SimCarrier(profile, host, sleep)

    def below(mover: Mover) -> Disk:
        return SimDisk(profile, mover, disk, sleep)

    return Ways(carry=carry, disk=below, clock=clock.monotonic, smallest_bytes=1)


@dataclass(frozen=True, slots=True)
class SimCarrier:
    """Implements engine.tiers.carriers.Carrier, for the host tier's thread. What is wanted in two places comes up once:
    the second is a copy on the device."""

    profile: Profile
    reader: Reader
    sleep: Sleep
    block_bytes: int = IN_ONE_GO
    beside_step: float = 0.0

    def move(self, part: Part, pairs: Sequence[Pair], down: bool) -> Found | None:
        component, _, host = part
        size = component.item_bytes * len({low for _, low in pairs})
        self.sleep(copy_s(self.profile, size, self.profile.tiers.host_Bps) * self.reader.next())
        return np.zeros((len(pairs), host.units), np.uint64)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class SimDisk:
    """Implements engine.tiers.disk.Disk, for the disk tier's thread. It has room for pages only, as the profile says,
    and forgets all of them when the worker ends."""

    profile: Profile
    mover: Mover
    reader: Reader
    sleep: Sleep
    count: int = field(init=False)
    states: int = 0
    found: Left = field(default_factory=Left)

    def __post_init__(self) -> None:
        self.count = self.profile.disk_tokens // PAGE_TOKENS

    @property
    def place_bytes(self) -> int:
        return self.state_bytes(partial=True)

    def state_bytes(self, *, partial: bool) -> int:
        return self.mover.item_bytes(False) + partial * self.mover.item_bytes(True)

    def write(
        self,
        pairs: Sequence[Pair],
        puts: Sequence[Put],
        drops: Iterable[bytes],
        hints: Iterable[tuple[bytes, Hint]] = (),
    ) -> None:
        self._take(len(pairs))

    def write_state(self, source: HostItem, put: StatePut, drops: Iterable[bytes]) -> None:
        raise AssertionError("a disk without room for states was given one")

    def note(self, drops: Iterable[bytes], hints: Iterable[tuple[bytes, Hint]]) -> None:
        """Nobody will read it."""

    def read(self, pairs: Sequence[Pair], sums: Sequence[Sums]) -> int:
        self._take(len(pairs))
        return len(pairs)

    def read_state(self, slot: int, target: HostItem, slot_sums: Sums, page_sums: Sums) -> bool:
        raise AssertionError("a disk without room for states was asked for one")

    def close(self) -> None:
        """Nothing is held."""

    def _take(self, pages: int) -> None:
        size = pages * self.mover.item_bytes(True)
        self.sleep(copy_s(self.profile, size, self.profile.tiers.disk_Bps) * self.reader.next())


def copy_s(profile: Profile, size: int, bytes_per_s: float) -> float:
    """Without noise. size: in bytes of the simulated pools, each of which stands for so many real ones."""
    return profile.tiers.setup_s + size * profile.model.kv_bytes_per_token / bytes_per_s
