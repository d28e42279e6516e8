"""What a prompt can have from below the device, where fetching is faster than computing, in seconds measured here.

Engine thread only. A prompt has pages on the device, then on the host, then on the disk; a state is resumed with the
pages below it, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.tiers.cost import Costs
from engine.tiers.disk_tier import DiskTier
from engine.tiers.index import Entry, TierIndex
from engine.tiers.states import HostStates, TierState
from engine.tiers.stats import Counts
from kvtransfer.types import PAGE_TOKENS

InTime = Callable[[int], bool]
"""Whether so many bytes come up from the disk in the time there is."""

STAGED_SHARE = 2
"""Of the host pool at most one page in so many for what one request is staged."""


class Hits:
    def __init__(
        self, host: TierIndex, states: HostStates, costs: Costs, counts: Counts, page_bytes: int, slot_bytes: int
    ) -> None:
        self._host, self._states = host, states
        self._costs, self._counts = costs, counts
        self._page_bytes, self._slot_bytes = page_bytes, slot_bytes

    def pages(self, keys: Sequence[bytes], held: int) -> list[Entry]:
        """What follows the first `held` of `keys` on the host."""
        found = self._host.match(keys, held)
        tokens = len(found) * PAGE_TOKENS
        if found and not self._costs.fetch_pays("host", len(found) * self._page_bytes, tokens):
            self._counts.declined += 1
            return []
        return found

    def state(
        self, keys: Sequence[bytes], tokens: Sequence[int], held: int, resumed: int
    ) -> tuple[list[Entry], TierState | None]:
        """What follows the first `held` of `keys` on the host; and the longest state there that can be resumed with
        those pages, when fetching it and the pages below it is faster than running the tokens from `resumed` on."""
        entries = self._host.match(keys, held)
        candidates = self._states.match(keys[: held + len(entries)], tokens, resumed)
        for state in candidates:
            if self._costs.fetch_pays("host", self._bytes_up(state, held), state.length - resumed):
                return entries, state
        self._counts.declined += bool(candidates)
        return entries, None

    def pages_on_disk(
        self, disk: DiskTier, keys: Sequence[bytes], held: int, in_time: InTime | None = None
    ) -> list[Entry]:
        """What follows on the disk what the device (the first `held` of `keys`) and the host have. in_time: decides
        instead, for who does not compute it here."""
        found = self._far(disk, keys, held)[1]
        nbytes = len(found) * self._page_bytes
        if in_time is not None:
            return found if in_time(nbytes) else []
        up_s = self._costs.copy_s("host", "up", nbytes) or 0.0
        return found if self._costs.fetch_pays("disk", nbytes, len(found) * PAGE_TOKENS, up_s) else []

    def state_on_disk(
        self,
        disk: DiskTier,
        keys: Sequence[bytes],
        tokens: Sequence[int],
        held: int,
        resumed: int,
        in_time: InTime | None = None,
    ) -> tuple[list[Entry], TierState | None]:
        """The same for the longest state that can be resumed when something has come up from the disk: the pages it
        lacks, and itself where it is there. resumed: tokens that need not be run without that."""
        above, far = self._far(disk, keys, held)
        here = self._states.match(keys[:above], tokens, resumed)
        resumed = max(resumed, here[0].length if here else 0)
        chain = keys[: above + len(far)]
        low = {state.name: state for state in disk.states.match(chain, tokens, resumed)}
        near = {state.name: state for state in self._states.match(chain, tokens, resumed)}
        for state in sorted({**low, **near}.values(), key=lambda s: s.length, reverse=True):
            pages = far[: max(state.length // PAGE_TOKENS - above, 0)]
            on_disk = state.name not in near
            nbytes = len(pages) * self._page_bytes + on_disk * (self._slot_bytes + bool(state.tail) * self._page_bytes)
            if in_time is not None:
                pays = in_time(nbytes)
            else:
                up_s = self._costs.copy_s("host", "up", self._bytes_up(state, held)) or 0.0
                pays = self._costs.fetch_pays("disk", nbytes, state.length - resumed, up_s)
            if pays:
                return pages, state if on_disk else None
        return [], None

    def _far(self, disk: DiskTier, keys: Sequence[bytes], held: int) -> tuple[int, list[Entry]]:
        """How many of `keys` device and host have; and what follows on the disk."""
        above = held + len(self._host.match(keys, held))
        return above, disk.index.match(keys, above)[: self._host.pool.total // STAGED_SHARE]

    def _bytes_up(self, state: TierState, held: int) -> int:
        pages = max(state.length // PAGE_TOKENS - held, 0) + bool(state.tail)
        return pages * self._page_bytes + self._slot_bytes
