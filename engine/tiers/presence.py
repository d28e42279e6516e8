"""In which tiers a page is, and what follows when it leaves one: what hangs on a key that is nowhere goes as well.
Engine thread only.

Over all tiers presence is prefix-closed, and a state's page is in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.prefix_cache import PrefixCache
from engine.tiers.disk_tier import DiskTier
from engine.tiers.index import TierIndex
from engine.tiers.states import HostStates


class Presence:
    def __init__(self, cache: PrefixCache, host: TierIndex, states: HostStates) -> None:
        self._cache, self._host, self._states = cache, host, states
        self.disk: DiskTier | None = None

    def has(self, key: bytes) -> bool:
        """Whether the page under this key is in some tier."""
        return key in self._cache or bool(self._tier(key))

    def stranded(self, key: bytes) -> bool:
        """Whether this page is on the device only, and something below stands on it."""
        if self._tier(key):
            return False
        if self._states.on(key) or self._host.following(key):
            return True
        return self.disk is not None and bool(self.disk.states.on(key) or self.disk.index.following(key))

    def ways(self, key: bytes) -> int:
        """How many pages follow the one under this key."""
        found = {*self._cache.following(key), *self._host.following(key)}
        if self.disk is not None:
            found.update(self.disk.index.following(key))
        return len(found)

    def dropped(self, keys: Sequence[bytes]) -> dict[bytes, str]:
        """The device has forgotten these (tail first). The tiers of those that are still somewhere."""
        kept = {}
        for key in keys:
            tier = self._tier(key)
            if tier:
                kept[key] = tier
            else:
                self._orphan(key)
        return kept

    def left_host(self, keys: Sequence[bytes]) -> None:
        """Tail first."""
        gone = [key for key in keys if key not in self._cache]
        lower = [key for key in gone if self._tier(key)]
        lost = [key for key in gone if not self._tier(key)]
        if lower:
            self._cache.record_lower(lower[::-1], "disk")
        self._lost(lost)

    def left_disk(self, keys: Sequence[bytes]) -> None:
        """Tail first."""
        self._lost([key for key in keys if not self.has(key)])

    def below(self) -> dict[str, list[bytes]]:
        """Keys by tier, those on the disk without those that are on the host as well. Under the pools' lock."""
        lower = {"host": self._host.keys()}
        if self.disk is not None:
            lower["disk"] = [key for key in self.disk.index.keys() if key not in self._host]  # noqa: SIM118
        return lower

    def _lost(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._cache.record_lower(keys, "")
        for key in keys:
            self._orphan(key)

    def _orphan(self, key: bytes) -> None:
        """This key is nowhere any more: nor may be what hangs on it."""
        self._states.key_gone(key)
        self._host.drop(key)
        if self.disk is not None:
            self.disk.states.key_gone(key)
            self.disk.index.drop(key)

    def _tier(self, key: bytes) -> str:
        """The highest tier below the device that has this key, "" = none."""
        if key in self._host:
            return "host"
        return "disk" if self.disk is not None and key in self.disk.index else ""
