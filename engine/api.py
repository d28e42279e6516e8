"""The engine loop as its services see it: commands in, events out. Torch-free.

One Engine per worker, whatever its role. Commands may be called from any thread and never wait for a model step.
Events are delivered on the engine thread, all of one step in one call of the sink, which must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine.plan import Logprob, SamplingParams
from kvtransfer.types import Below, First, Hold, LegKey
from runtime.errors import PdserveError


class Mode(Enum):
    """SOURCE: run the prompt, sample first tokens, hold the pages (the prefill leg).
    REMOTE: allocate, wait for start() or recompute(), then decode. LOCAL: prefill and decode here."""

    SOURCE = "source"
    REMOTE = "remote"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Retention:
    """How a request would like its cache entries to be kept, see engine.retention. session: entries of one are kept and
    evicted together. priority: higher is kept longer. ttl_s: after so long without use they go first; 0 = never."""

    session: bytes = b""
    priority: int = 0
    ttl_s: float = 0.0

    @property
    def plain(self) -> bool:
        """No hint at all."""
        return not self.session and not self.priority and not self.ttl_s


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """tokens[prompt_len:] is earlier output. deadline is on the engine's monotonic clock, in seconds.

    root: 32-byte hash root (salt, model, adapter) for prefix keys, see kvtransfer.hashing.
    unit_extras: (position, content hash) of multimodal items, mixed into the keys of the units that hold them.
    choice: the choice index of a continuation (n == 1). first tokens' sequence = len(tokens) - prompt_len.
    due: when its first token is, on the engine's clock: who is due first goes first, see engine.order. None: now, moved
    by its priority.
    """

    key: LegKey
    mode: Mode
    tokens: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    root: bytes
    deadline: float
    n: int = 1
    choice: int = 0
    reservation_id: str = ""
    priority: int = 0
    unit_extras: tuple[tuple[int, bytes], ...] = ()
    retention: Retention = Retention()
    due: float | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    prompt_tokens: int
    headroom_tokens: int = 0
    choices: int = 1
    prefill_tokens: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    pages: int
    slots: int
    batch: int
    queued_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Reserved:
    reservation_id: str
    expires_in_s: float
    free: Free


@dataclass(frozen=True, slots=True)
class Refused:
    """Not now (retryable) or never (`error` is an InvalidRequest: more than the whole pool)."""

    error: PdserveError
    free: Free


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    """Pages are allocated. SOURCE: pages of the whole prompt, tokens [0, ready) are valid already (prefix hit).
    REMOTE: pages for tokens [0, len(tokens)), of which [0, ready) are there already. The receiver owns `hold`
    (a further count on pages and slots) and must release it: the lease at P, the landing at D."""

    key: LegKey
    pages: tuple[int, ...]
    slots: tuple[int, ...]
    ready: int
    hold: Hold


@dataclass(frozen=True, slots=True)
class RangeReady:
    """SOURCE: tokens [start, end) are written and final. start is a multiple of 16."""

    key: LegKey
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    key: LegKey
    offset: int
    entries: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class SourceDone:
    """SOURCE: the prompt is computed; state length = len(tokens). Ends the leg's work in the engine."""

    key: LegKey
    first: tuple[First, ...]
    cached_tokens: int
    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """LOCAL and REMOTE: new tokens of one choice, contiguous from first_sequence. finish != 0: its last event.
    For LOCAL, the first event has the first token; for REMOTE, the token after first[]."""

    key: LegKey
    choice: int
    first_sequence: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob | None, ...]
    finish: int
    last: bool  # with the last choice's finish: the request is over
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandedOver:
    """LOCAL and REMOTE: a choice has left at a step's end, in mid-answer, and this is its last event. Pages and state
    are of token_count tokens; `token` is the newest one, delivered and in no state yet: who goes on with it does so as
    after a prompt of token_count tokens. below: which of the pages and slots are the host tier's. last: with this
    choice the request is over. The receiver owns `hold` and must release it."""

    key: LegKey
    choice: int
    token_count: int
    token: int
    pages: tuple[int, ...]
    slots: tuple[int, ...]
    hold: Hold
    last: bool
    below: Below | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Ends the request at this worker (deadline, cancel is silent, engine fault of this request alone)."""

    key: LegKey
    error: PdserveError


Event = Admitted | RangeReady | PromptScores | SourceDone | Tokens | HandedOver | Failed
Sink = Callable[[Sequence[Event]], None]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int
    waiting: int
    queued_prefill_tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_reserved: int
    slots_total: int
    slots_free: int
    step: int
    steps_alive_at: float  # monotonic time of the loop's last turn (idle turns count): liveness
    slots_cached: int = 0
    swapped: int = 0  # sequences put aside in host memory


class EnginePort(Protocol):
    """What the services use. Implemented by engine.loop.Engine."""

    def reserve(self, key: LegKey, needs: Needs) -> Reserved | Refused:
        """Book capacity; idempotent per key while the booking lives. Never waits."""
        ...

    def cancel_reservation(self, reservation_id: str) -> bool: ...

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue a request. A reservation it names is consumed. Raises InvalidRequest, Saturated, Draining.
        Submitting a live key again is refused (InvalidRequest, reason "duplicate")."""
        ...

    def start(self, key: LegKey, first: Sequence[First]) -> None:
        """REMOTE: every page has arrived and is verified; decode from these first tokens (published to the cache)."""
        ...

    def recompute(self, key: LegKey) -> None:
        """REMOTE: the KV did not arrive whole; drop it and prefill here. The pages that were being written are left
        to the landing's hold; new ones are allocated. The first token is sampled here again (same seed and position,
        so the same token) and emitted with its own sequence number; the router has it from P and drops the repeat."""
        ...

    def cancel(self, key: LegKey) -> None:
        """Silent and idempotent: no event follows for this key."""
        ...

    def end_choices(self, key: LegKey, choices: Sequence[int]) -> None:
        """The receiver has all it wants of these choices: they stop, silently, and give back what is theirs alone; the
        others go on. A choice that has not begun never will. Idempotent. When no choice is left the request is over
        without an event, so cancel() is the last word then."""
        ...

    def handover(self, key: LegKey, choice: int) -> None:
        """Give a choice away: at the next step's end at which it has a state, it leaves with HandedOver. One that has
        ended by then does not. A request of which nothing is computed, and nothing will be soon, fails instead
        (Draining): whoever asked finds it another place. Idempotent; LOCAL and REMOTE."""
        ...

    def load(self) -> EngineLoad: ...

    def drain(self, on: bool) -> None:
        """A draining engine refuses reserve and submit and finishes what it has."""
        ...
