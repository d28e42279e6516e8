"""What a load generator knows of the server it talks to, whichever way; the ways are over_http and over_grpc."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from bench.load.plan import Tokens, Turn
from runtime.config import Config
from runtime.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Address:
    """Where requests go and what they all say. address: a URL, or gRPC's host:port. token_ids: the answer's are asked
    for. ledger: where its time went, too."""

    kind: Literal["http", "grpc"]
    address: str
    model: str = ""
    api_key: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    chat: bool = False
    token_ids: bool = False
    ledger: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0

    def config(self) -> Config:
        """With the three TLS files. Raises InvalidRequest when they are not all three or none."""
        return Config.load({"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca})


@dataclass(frozen=True, slots=True)
class Card:
    """A model as the server lists it. context and vocab: 0 = it does not say. ours: it is this package's router."""

    model: str
    context: int
    vocab: int
    ours: bool


class Unanswered(Exception):
    """A request that did not end well; state is one of bench.load.results."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


class Answer:
    """Takes the times and tokens of one answer as they come. Times are those of `now`; first = 0: nothing came yet."""

    __slots__ = ("_now", "cached", "first", "gaps", "last", "output", "parts", "prompt", "tokens")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.first = self.last = 0.0
        self.gaps: list[float] = []
        self.tokens: list[int] = []
        self.prompt = self.output = 0
        self.cached = -1
        self.parts: tuple[float, ...] = ()

    def chunk(self) -> None:
        at = self._now()
        if self.first:
            self.gaps.append(at - self.last)
        else:
            self.first = at
        self.last = at


class Target(Protocol):
    """A server that answers. Used from one event loop."""

    async def cards(self) -> list[Card]:
        """Its models. Raises PdserveError when it is not there or refuses."""

    def request(self, turn: Turn, tokens: Tokens, key: str) -> Any:
        """What ask() sends, made beforehand."""

    async def ask(self, request: Any, answer: Answer) -> None:
        """Returns when the answer is whole. Raises Unanswered."""


def opened(address: Address) -> AbstractAsyncContextManager[Target]:
    """Raises InvalidRequest for an address nothing can be sent to."""
    if address.kind == "grpc":
        from bench.load.over_grpc import GrpcTarget

        return GrpcTarget.opened(address)
    from bench.load.over_http import HttpTarget

    return HttpTarget.opened(address)


def chosen(cards: list[Card], model: str) -> Card:
    """The model that was asked for, else the only one. Raises InvalidRequest (field "model") naming what there is."""
    names = ", ".join(card.model for card in cards)
    if not cards:
        raise InvalidRequest("the server lists no model", field="model")
    if not model and len(cards) > 1:
        raise InvalidRequest("the server has several models: name one", field="model", limit=names)
    found = next((card for card in cards if model in ("", card.model)), None)
    if found is None:
        raise InvalidRequest(f"the server has no model {model}", field="model", limit=names)
    return found
