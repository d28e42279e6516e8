"""The values a request is made of on its way through the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protos.v1 import common_pb2, inference_pb2
from router.params import Params
from router.text.progress import Delta, Finish
from runtime.values import value


@value
class Work:
    """One prompt, ready for workers. deadline: on the router's monotonic clock, seconds. scoring: only the prompt's
    log-probabilities (or its echo) are wanted."""

    request_id: str
    tokens: tuple[int, ...]
    params: Params
    sampling: common_pb2.Sampling
    salt: bytes
    deadline: float
    arrived: float
    tenant: str
    traceparent: str = ""
    session: str = ""
    priority: int = 0
    scoring: bool = False
    retention: common_pb2.Retention = field(default_factory=common_pb2.Retention)

    @property
    def most_tokens(self) -> int:
        """Prompt and answer together at most."""
        return len(self.tokens) + self.sampling.max_tokens


class Reply(Protocol):
    """Who takes the answer. Called on the event loop from the worker streams' callbacks; must not block or raise.

    Order: prompt_logprobs*, then per choice delta* finished; step() after everything one worker message brought.
    """

    def delta(self, delta: Delta) -> None: ...

    def finished(self, finish: Finish) -> None: ...

    def prompt_logprobs(self, offset: int, entries: Sequence[common_pb2.TokenLogprob]) -> None: ...

    def step(self) -> None: ...


NOTHING = common_pb2.StageTimes()
"""Read only."""


@dataclass(slots=True)
class Ledger:
    """Seconds and facts of one request, filled in as it goes; every duration is of one process's monotonic clock."""

    render_s: float = 0.0
    queue_s: float = 0.0
    route_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""
    prefill_attempts: int = 0
    decode_attempts: int = 0
    prefill: common_pb2.StageTimes = field(default_factory=lambda: NOTHING)
    handoff: common_pb2.StageTimes = field(default_factory=lambda: NOTHING)
    decode: common_pb2.StageTimes = field(default_factory=lambda: NOTHING)

    # what passages report; a continuation's prefill is its own affair: the prompt was computed once before

    def placed(self, prefill: str, decode: str) -> None:
        self.prefill_worker = prefill or self.prefill_worker
        self.decode_worker = decode

    def prefilled(self, times: common_pb2.StageTimes) -> None:
        if self.prefill is NOTHING:
            self.prefill = times

    def handed_over(self, times: common_pb2.StageTimes) -> None:
        self.handoff = times

    def decoded(self, times: common_pb2.StageTimes) -> None:
        self.decode = times

    def values(self) -> dict[str, float | int | str]:
        """What inference.proto's Ledger has, by name."""
        prefill, handoff, decode = self.prefill, self.handoff, self.decode
        source = prefill if self.prefill_worker != self.decode_worker else decode
        return {
            "render_s": self.render_s,
            "queue_s": self.queue_s,
            "route_s": self.route_s,
            "prefill_s": source.prefill_s,
            "handoff_wait_s": handoff.handoff_wait_s or decode.handoff_wait_s,
            "transfer_s": handoff.transfer_s or decode.transfer_s,
            "first_token_s": self.first_token_s,
            "decode_s": decode.decode_s,
            "total_s": self.total_s,
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "prefill_pid": source.pid,
            "decode_pid": decode.pid or handoff.pid,
            "transfer_bytes": handoff.transfer_bytes or decode.transfer_bytes,
            "transfer_pages": handoff.transfer_pages or decode.transfer_pages,
            "recomputed_tokens": max(handoff.recomputed_tokens, decode.recomputed_tokens),
            "transport": handoff.transport or decode.transport,
            "prefill_attempts": self.prefill_attempts,
            "decode_attempts": self.decode_attempts,
            "checksum_s": handoff.checksum_s or decode.checksum_s,
        }

    def wire(self) -> inference_pb2.Ledger:
        return inference_pb2.Ledger(**self.values())  # type: ignore[arg-type]  # names and kinds are the message's

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the worker which ran the prompt did not have to compute: counted once."""
        source = self.prefill if self.prefill_worker != self.decode_worker else self.decode
        return source.cached_tokens


@value
class Outcome:
    """How a request ended well. Everything else is a PdserveError."""

    request_id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ledger: Ledger
