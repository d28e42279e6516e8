"""What the tiers have done, counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.pages import PagePool


@dataclass(slots=True)
class Moved:
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Counts:
    """Of one engine since its start. Pages: stored (gone down), hit_pages (come up for a prefix hit), lost (dropped
    from the device with no copy below), spilled (gone on to disk), disk_pages (come up to the host from disk).
    States: stored_states, hit_states (come up for a hit that could not be had from the device), spilled_states and
    disk_states (as those of pages), lost_states (wanted below, and gone from the device with no copy there).
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
    stored_states: int = 0
    hit_states: int = 0
    spilled_states: int = 0
    disk_states: int = 0
    lost_states: int = 0
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
    """One tier as a worker reports it; the fields of common.TierLoad. states: slots of the tier, those with a name."""

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
    states_total: int = 0
    states_published: int = 0
    hit_states: int = 0
    lost_states: int = 0

    @classmethod
    def of(cls, tier: str, pool: PagePool, published: int, counts: Counts, slots: PagePool, states: int) -> TierReport:
        """published: pages with a name; states: those with one, in `slots`."""
        down = counts.moves.get((tier, "down"), Moved())
        up = counts.moves.get((tier, "up"), Moved())
        host = tier == "host"
        return cls(
            tier=tier,
            pages_total=pool.total,
            pages_published=published,
            pages_held=pool.referenced,
            hit_pages=counts.hit_pages if host else counts.disk_pages,
            bytes_down=down.nbytes,
            bytes_up=up.nbytes,
            seconds_down=down.seconds,
            seconds_up=up.seconds,
            swapped_out=counts.swapped_out if host else 0,
            swapped_in=counts.swapped_in if host else 0,
            faults=counts.failed + counts.corrupt,
            states_total=slots.total,
            states_published=states,
            hit_states=counts.hit_states if host else counts.disk_states,
            lost_states=counts.lost_states if host else 0,
        )
