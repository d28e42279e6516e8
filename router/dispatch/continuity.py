"""What is left of a request when a worker fails it: decided here, purely; the dispatch only carries it out.

Before the first token everything is done again elsewhere. After it, each choice that has not ended goes on alone from
the tokens the router has accepted: same seed, same positions, so greedy and seeded answers are the ones an undisturbed
run would have given. A choice that has all its tokens already ends here; nobody is asked for a budget of nothing.

Retries are bounded three ways: so many per request, a share of the traffic (or a fleet that is failing would be asked
for ever more), and the request's own deadline.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.text.progress import Choice
from runtime.errors import Cancelled, DeadlineExceeded, PdserveError
from runtime.values import value


@value
class Piece:
    """What one passage through the fleet computes. tokens: prompt and what is known of the answer. choices: who gets
    tokens; one of several choices alone is a request of its own to workers. retry: failures behind it."""

    request_id: str
    tokens: tuple[int, ...]
    prompt_len: int
    choices: tuple[int, ...]
    retry: int = 0

    @property
    def first_sequence(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def choice(self) -> int:
        """As WorkRequest wants it: the index of a choice that is alone, else 0."""
        return self.choices[0] if len(self.choices) == 1 else 0


def whole(request_id: str, prompt: tuple[int, ...], n: int) -> Piece:
    """The request as it came."""
    return Piece(request_id, prompt, len(prompt), tuple(range(n)))


def pieces(failed: Piece, request_id: str, prompt: tuple[int, ...], choices: Sequence[Choice]) -> list[Piece]:
    """What has to be computed again, elsewhere, after `failed` did not come to its end."""
    left = [choices[index] for index in failed.choices if choices[index].finish is None]
    if not left:
        return []
    if any(not choice.tokens for choice in left):  # nobody has anything yet: choices share one prefill
        return [Piece(failed.request_id, failed.tokens, failed.prompt_len, failed.choices, failed.retry + 1)]
    return [
        Piece(
            _name(request_id, choices, choice.index),
            prompt + tuple(choice.tokens),
            len(prompt),
            (choice.index,),
            failed.retry + 1,
        )
        for choice in left
    ]


def onward(of: Piece, request_id: str, prompt: tuple[int, ...], choices: Sequence[Choice], index: int) -> Piece:
    """What a choice that leaves its worker goes on with at another, from what the first one has computed: every known
    token but the newest, exactly as after a prompt. That is no failure, so it is no retry."""
    tokens = prompt + tuple(choices[index].tokens[:-1])
    return Piece(_name(request_id, choices, index), tokens, len(prompt), (index,), of.retry)


def _name(request_id: str, choices: Sequence[Choice], index: int) -> str:
    """One of several choices alone is a request of its own to workers."""
    return request_id if len(choices) == 1 else f"{request_id}.{index}"


def exhausted(choices: Sequence[Choice], indices: Sequence[int], max_tokens: int, room: int) -> list[int]:
    """Of these choices, those that go on and yet have every token they may have. room: tokens the context leaves."""
    limit = min(max_tokens, room)
    return [index for index in indices if choices[index].finish is None and choices[index].next_sequence >= limit]


def worth_it(error: PdserveError, piece: Piece, retries: int) -> bool:
    """Whether another worker could do better: not for what the client asked wrongly, called off or ran out of."""
    if isinstance(error, Cancelled | DeadlineExceeded):
        return False
    return error.row.retryable and piece.retry < retries


class RetryBudget:
    """At most `share` extra over the requests of late, and a floor for quiet times.

    The first loss of a stream is not charged: a worker that died lost what it ran, once, and cannot do it again.
    """

    def __init__(self, share: float = 0.1, floor: float = 10.0, most: float = 100.0, refill_s: float = 60.0) -> None:
        self._share = share
        self._floor = floor
        self._most = most
        self._refill_s = refill_s
        self._credit = floor
        self._at = 0.0

    def request(self) -> None:
        """A new request earns its share of a retry."""
        self._credit = min(self._credit + self._share, self._most)

    def take(self, now: float) -> bool:
        """Spend one retry. False: there is none left. The floor comes back within refill_s, however quiet it is."""
        if self._credit < self._floor:
            self._credit = min(self._credit + (now - self._at) * self._floor / self._refill_s, self._floor)
        self._at = now
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True
