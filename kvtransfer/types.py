"""Plain values of the transfer layer. No I/O, no torch, no numpy: the router may import this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

PAGE_TOKENS = 16
"""Tokens of a KV page: a fleet constant, compared in the handshake and refused if unequal."""

LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Component:
    """What one page (or slot) holds of one kind, as `units` equal shares.

    A page of the component is laid out [units, layers, rows, tokens, token_bytes]: one unit's share is contiguous, so
    any tensor-parallel share is one byte range. GQA: units = KV heads, rows = 2 (K, V), tokens = 16. MLA: units = 1,
    rows = 1, replicated. A slot component: tokens = 1, rows = 1, token_bytes = bytes of the unit in one layer.
    """

    name: str
    paged: bool
    units: int
    layers: int
    rows: int
    tokens: int
    token_bytes: int
    dtype: str
    codec: str = "identity"
    replicated: bool = False

    @property
    def unit_bytes(self) -> int:
        return self.layers * self.rows * self.tokens * self.token_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one page or one slot with all units."""
        return self.units * self.unit_bytes


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory: item i of `component` begins at base + i * stride and holds units [first_unit, +units)."""

    region_id: int
    component: str
    base: int
    length: int
    stride: int
    first_unit: int
    units: int
    device: int = 0
    memory: str = "DRAM"


@dataclass(frozen=True, slots=True)
class Layout:
    """What two workers must agree on before a byte moves."""

    components: tuple[Component, ...]
    model_fingerprint: str
    chunk_tokens: int
    page_tokens: int = PAGE_TOKENS
    version: int = LAYOUT_VERSION
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    codecs: tuple[str, ...] = ("identity",)
    checksum: str = "wsum64-v1"


@dataclass(frozen=True, slots=True)
class LegKey:
    """One attempt of one leg of one request: the key of everything a worker holds for it."""

    request_id: str
    leg: str  # "prefill" or "decode"
    attempt: int


class Hold(Protocol):
    """A counted reference to pages and slots: they are not reused before release(). Idempotent, any thread."""

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class First:
    """The first sampled token of a choice. logprob is a serialised common.TokenLogprob or b""."""

    choice: int
    token: int
    finish: int = 0  # common.FinishReason; 0 = the choice goes on
    logprob: bytes = b""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a pull lands at D. `pages` covers tokens [0, token_count) in order; pages of [0, held) are there already
    (held is a multiple of the page size, < token_count) and are not read. `hold` is released by the puller when no
    read can touch the pages any more, whatever happened to the request meanwhile."""

    pages: tuple[int, ...]
    slots: tuple[int, ...]
    token_count: int
    held: int
    hold: Hold


@dataclass(frozen=True, slots=True)
class Pulled:
    """A verified hand-off."""

    state_length: int
    first: tuple[First, ...]
    bytes_read: int
    pages_read: int
    wait_s: float
    read_s: float
    checksum_s: float
    extras: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Below:
    """What of a cached prefix lies in the second pool, the host tier's: the pages from index `first` on, and the slots
    if `slot_sums` says so. sums: of each of these pages (slots), made when it was written: over the paged (other)
    components in region order and their units, all tokens of a page counted."""

    first: int
    sums: tuple[tuple[int, ...], ...] = ()
    slot_sums: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Prefix:
    """Pages of tokens [0, token_count) and, for models with a state, the slot of the state of exactly this length."""

    pages: tuple[int, ...]
    slots: tuple[int, ...]
    token_count: int
    hold: Hold
    below: Below | None = None

    @property
    def tier(self) -> str:
        """Where most of its pages lie."""
        low = len(self.pages) - self.below.first if self.below is not None else 0
        return "host" if 2 * low > len(self.pages) else "device"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt's beginning, as another worker asks for it. page_keys: of all its full pages, in chain order; under
    another salt or model they would be others. first_token: what is there already. state: a state is wanted, too;
    without one nothing is of use."""

    page_keys: tuple[bytes, ...]
    tokens: tuple[int, ...]
    first_token: int
    state: bool


ChecksumFn = Callable[[Region, Component, tuple[int, ...], tuple[int, ...]], list[int]]
"""(region, component, item indices, valid tokens per item) -> checksums [item][unit] flattened."""
