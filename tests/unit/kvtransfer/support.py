"""Small real parts for the tests of the transfer layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.layout import fingerprint
from kvtransfer.source import Caller, HandoffStore, Watch
from kvtransfer.tickets import TicketMint
from kvtransfer.types import Component, First, Layout, LegKey
from runtime.clock import FakeClock

KV = Component("kv", True, 4, 2, 2, 16, 8, "bfloat16")
STATE = Component("recurrent", False, 4, 2, 1, 1, 64, "float32")
LAYOUT = Layout((KV, STATE), "model-a", 512)
LEASE_S = 10.0
TOKENS = 100
PAGES = (3, 4, 5, 6, 7, 8, 9)
READER = Caller("d", 1)
OTHER = Caller("e", 1)


class CountingHold:
    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


def key(request: str = "r", attempt: int = 1) -> LegKey:
    return LegKey(request, "prefill", attempt)


@dataclass
class World:
    """A store on a fake clock, with the hold of every hand-off it was given."""

    clock: FakeClock = field(default_factory=FakeClock)
    holds: dict[LegKey, CountingHold] = field(default_factory=dict)
    wakes: int = 0

    def __post_init__(self) -> None:
        self.mint = TicketMint("p", 7, fingerprint(LAYOUT))
        self.store = HandoffStore(self.mint, self.clock, LEASE_S)

    def open(self, k: LegKey | None = None, ready: int = 0, **options: object) -> bytes:
        k = k or key()
        self.holds[k] = CountingHold()
        return self.store.open(
            k,
            pages=PAGES,
            token_count=TOKENS,
            ready=ready,
            hold=self.holds[k],
            **options,  # type: ignore[arg-type]
        )

    def final(self, k: LegKey | None = None) -> bool:
        return self.store.final(k or key(), state_length=TOKENS, first=[First(0, 42)], slots=[1])

    def watch(self, ticket: bytes, caller: Caller = READER, first_token: int = 0, fence: int = 1) -> Watch:
        return self.store.watch(ticket, caller, first_token, fence, self._wake)

    def releases(self, k: LegKey | None = None) -> int:
        return self.holds[k or key()].releases

    def _wake(self) -> None:
        self.wakes += 1
