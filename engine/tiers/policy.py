"""What is worth keeping below the device, and what goes first when that is full too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtransfer.types import PAGE_TOKENS

Scope = Literal["all", "prompt"]
Order = Literal["lru", "flops"]

KNEE_TOKENS = 4096
"""Depth at which a token's attention costs as much as all the rest of it (dense models of a few billion weights);
below it FLOPs per byte hardly differ, far beyond they grow with the depth."""

FLOPS_WEIGHT = 0.5
"""Of FLOPs per byte against recency, both scaled to 0…1 over the candidates."""


@dataclass(frozen=True, slots=True)
class Options:
    """queue_pages: pages on their way down at most. poison: device pages and slots whose content has gone down are
    overwritten when they are given up (a test's proof that bytes came back up)."""

    pages: int
    slots: int = 0
    order: Order = "lru"
    queue_pages: int = 64
    swap: bool = True
    poison: bool = False


@dataclass(slots=True)
class _Seen:
    count: int
    depth: int  # pages before it
    output: bool


@dataclass(slots=True)
class Sightings:
    """How often each page was wanted, where in its sequence it lies, and whether a model wrote it.

    after: a page goes down at its so-maniest sighting. scope: all pages, or only those of prompts. cap_pages: of one
    sequence, from its beginning; 0 = all. bound: pages remembered; the longest unseen are forgotten.
    """

    after: int = 1
    scope: Scope = "all"
    cap_pages: int = 0
    bound: int = 1 << 16
    _seen: OrderedDict[bytes, _Seen] = field(default_factory=OrderedDict)

    def asked(self, keys: Sequence[bytes]) -> None:
        """A prompt of these pages has arrived."""
        for depth, key in enumerate(keys):
            self._saw(key, depth, output=False)

    def written(self, keys: Sequence[bytes], first: int, prompt_tokens: int) -> None:
        """keys[first:] have been computed. Pages with output in them count as seen here for the first time."""
        for depth in range(max(first, prompt_tokens // PAGE_TOKENS), len(keys)):
            if keys[depth] not in self._seen:
                self._saw(keys[depth], depth, output=True)

    def state(self, name: bytes, length: int, prompt_tokens: int) -> None:
        """The state after `length` tokens was made or hit (see engine.states.state_id)."""
        self._saw(name, -(-length // PAGE_TOKENS) - 1, output=length > prompt_tokens)

    def wanted(self, key: bytes) -> bool:
        """Whether this page, or state, may take room below."""
        seen = self._seen.get(key)
        if seen is None:
            return self.after <= 1 and self.scope == "all" and not self.cap_pages
        if self.cap_pages and seen.depth >= self.cap_pages:
            return False
        return seen.count >= self.after and not (self.scope == "prompt" and seen.output)

    def _saw(self, key: bytes, depth: int, output: bool) -> None:
        seen = self._seen.get(key)
        if seen is None:
            self._seen[key] = _Seen(1, depth, output)
            if len(self._seen) > self.bound:
                self._seen.popitem(last=False)
            return
        seen.count += 1
        seen.output = seen.output and output
        self._seen.move_to_end(key)


def flops_per_byte(depth_tokens: int, tokens: int, nbytes: int) -> float:
    """Relative FLOPs that `nbytes` save: `tokens` of them before `depth_tokens`, attention included."""
    return tokens * (1.0 + depth_tokens / KNEE_TOKENS) / nbytes


def first_to_go(worth: Sequence[float]) -> int:
    """Of candidates from the longest unused to the most recently used, the one to evict (Marconi's score: recency plus
    FLOPs per byte, arXiv 2411.19379)."""
    low, high = min(worth), max(worth)
    spread = (high - low) or 1.0
    age = max(len(worth) - 1, 1)
    scores = [(1 - FLOPS_WEIGHT) * i / age + FLOPS_WEIGHT * (w - low) / spread for i, w in enumerate(worth)]
    return scores.index(min(scores))
