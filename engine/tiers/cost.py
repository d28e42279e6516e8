"""Seconds to fetch against seconds to compute, both as measured here."""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHT = 0.2
"""Of a new measurement in a moving average."""

SMALLEST_BYTES = 64 << 10
"""Less than this measures the call, not the copy."""


@dataclass(slots=True)
class Rate:
    """A moving average of units per second; 0 until something was measured."""

    per_second: float = 0.0

    def saw(self, units: float, seconds: float) -> None:
        if units <= 0 or seconds <= 0:
            return
        new = units / seconds
        self.per_second = new if self.per_second == 0 else self.per_second + WEIGHT * (new - self.per_second)

    def seconds(self, units: float) -> float | None:
        """None while nothing is known."""
        return units / self.per_second if self.per_second else None


@dataclass(slots=True)
class Costs:
    """up and down: bytes per second by tier and direction. prefill: tokens per second of steps that ran a prompt.
    smallest_bytes: copies of less are not learned from."""

    rates: dict[tuple[str, str], Rate] = field(default_factory=dict)
    prefill: Rate = field(default_factory=Rate)
    smallest_bytes: int = SMALLEST_BYTES

    def copied(self, tier: str, direction: str, nbytes: int, seconds: float) -> None:
        if nbytes >= self.smallest_bytes:
            self.rates.setdefault((tier, direction), Rate()).saw(nbytes, seconds)

    def copy_s(self, tier: str, direction: str, nbytes: int) -> float | None:
        return self.rates.get((tier, direction), Rate()).seconds(nbytes)

    def fetch_pays(self, tier: str, nbytes: int, tokens: int, other_s: float = 0.0) -> bool:
        """Whether `nbytes` come up from `tier` sooner than `tokens` are computed. Yes while either is unknown:
        trying is how it becomes known. other_s: further seconds the fetch costs."""
        fetch, compute = self.copy_s(tier, "up", nbytes), self.prefill.seconds(tokens)
        return fetch is None or compute is None or fetch + other_s <= compute

    def swap_pays(self, nbytes: int, tokens: int) -> bool:
        """Whether going down and up again costs less than computing `tokens` anew."""
        down = self.copy_s("host", "down", nbytes)
        return self.fetch_pays("host", nbytes, tokens, down or 0.0)
