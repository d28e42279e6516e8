"""Choices that leave in mid-answer, at a step's end, with all that is needed to go on elsewhere. Torch-free.

What a step in flight or a copy under way still writes does not leave, and what has no state yet has nothing to give:

| the choice                              | it                                                                |
|-----------------------------------------|-------------------------------------------------------------------|
| decodes                                 | leaves: records folded, one hold on pages and slot                |
| is swapped out, its bytes on the host   | leaves from there                                                 |
| has copies to make, is being moved down | leaves when that is done                                          |
|  or up, loads, or runs its prompt       |                                                                   |
| waits with nothing kept, alone          | fails: another worker computes it no later than this one would    |
| waits with nothing kept, beside others  | stays: the request cannot fail for one choice                     |

The state holds every known token but the newest, as ever, so a choice leaves exactly like a prompt that was computed
for another worker. Its full pages and, for models with a state, the end of it stay in the cache here.
"""

from __future__ import annotations

from engine.api import HandedOver
from engine.memory import Memory
from engine.outcome import Outcome
from engine.sequence import Phase, Request, Sequence
from runtime.errors import Draining


class Departures:
    """The requests of which choices are to leave."""

    def __init__(self, memory: Memory, outcome: Outcome) -> None:
        self._memory = memory
        self._outcome = outcome
        self._requests: list[Request] = []

    def ask(self, request: Request, choice: int) -> None:
        """A choice shall leave when it can."""
        if choice in request.choices() and not request.over:
            request.leaving |= {choice}
            if request not in self._requests:
                self._requests.append(request)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def due(self, busy: set[int]) -> list[Sequence]:
        """Those that can leave now. busy: ids of sequences that a step in flight uses."""
        self._requests = [request for request in self._requests if not request.over]
        return [seq for request in self._requests for seq in request.sequences if self._can(seq, busy)]

    def hopeless(self) -> list[tuple[Request, Draining]]:
        """Requests that have nothing to give and are not about to: they fail, whole."""
        error = Draining("nothing of this request is computed here")
        return [(request, error) for request in self._requests if not request.over and self._idle(request)]

    def leave(self, seq: Sequence) -> bool:
        """Say so, and give back what the sequence held: from here on the event's hold is what holds it. True when it
        was the last choice of its request."""
        request, memory = seq.request, self._memory
        left = memory.depart(seq)
        seq.phase = Phase.DONE
        last = all(other.phase is Phase.DONE for other in request.sequences)
        event = HandedOver(
            request.spec.key,
            seq.choice,
            left.computed,
            seq.tokens[-1],
            left.pages,
            left.slots,
            left.hold,
            last,
            left.below,
        )
        self._outcome.emit(request, event)
        return last

    def _can(self, seq: Sequence, busy: set[int]) -> bool:
        if seq.fanout > 1 or seq.choice not in seq.request.leaving or seq.id in busy or seq.pending:
            return False
        if len(seq.tokens) <= len(seq.request.spec.tokens):
            return False  # nothing has been said here
        if seq.phase is Phase.RUNNING:
            return seq.decoding
        return seq.phase is Phase.WAITING and self._memory.kept_below(seq)

    def _idle(self, request: Request) -> bool:
        """Its one run waits for memory, and has nothing that would have to be computed again elsewhere."""
        lead = request.sequences[0]
        alone = len(request.sequences) == 1 and (lead.fanout == 1 or not request.spec.n - len(request.leaving))
        return alone and lead.phase is Phase.WAITING and not self._memory.moving_below(lead)
