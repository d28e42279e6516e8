"""What the tiers have done, counted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Moved:
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Counts:
    """Of one engine since its start. Pages: stored (gone down), hit_pages (come up for a prefix hit), lost (dropped
    from the device with no copy below), spilled (gone on to disk), disk_pages (come up to the host from disk).
    dropped: stores, swaps and spills without room; declined: fetches and swaps that would have taken longer than
    computing; corrupt: loads whose checksum did not agree; failed: copies that failed.
    """

    stored: int = 0
    hit_pages: int = 0
    lost: int = 0
    dropped: int = 0
    declined: int = 0
    corrupt: int = 0
    failed: int = 0
    spilled: int = 0
    disk_pages: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    moves: dict[tuple[str, str], Moved] = field(default_factory=dict)

    def moved(self, tier: str, direction: str, nbytes: int, seconds: float) -> None:
        """tier: host or disk; direction: down or up."""
        total = self.moves.setdefault((tier, direction), Moved())
        total.nbytes += nbytes
        total.seconds += seconds


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier as a worker reports it; the fields of common.TierLoad."""

    tier: str
    pages_total: int
    pages_published: int
    pages_held: int
    hit_pages: int
    bytes_down: int
    bytes_up: int
    seconds_down: float
    seconds_up: float
    swapped_out: int = 0
    swapped_in: int = 0
    faults: int = 0
