"""What the engine asks of a runner: memory for pages and slots, and one step at a time. Torch-free.

A runner is a function of the StepPlan and of its page and slot memory; it keeps nothing else between steps. The engine
calls allocate() once and run() from one thread only; spec() and regions() may be called from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.plan import StepPlan, StepResult
from kvtransfer.types import Component, Region


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine must know of a loaded model.

    components: what one page (paged) and one state slot (not paged) hold; no slot component = a model without state.
    max_model_len: the longest sequence in tokens, prompt and output together.
    token_flops, pair_flops: of a prompt token, and of it with each token it attends to; 1 and 0 = counted in tokens.
    record_bytes: beside each slot, never moved: decode steps leave records there and rewrite the slot now and then.
    """

    vocab_size: int
    max_model_len: int
    components: tuple[Component, ...]
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    record_bytes: int = 0
    token_flops: float = 1.0
    pair_flops: float = 0.0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all paged components."""
        return sum(c.item_bytes for c in self.components if c.paged)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot; 0 = the model has no recurrent state."""
        return sum(c.item_bytes for c in self.components if not c.paged)

    @property
    def slot_memory(self) -> int:
        """Bytes a state slot takes with all that lies beside it."""
        return self.slot_bytes + self.record_bytes

    def flops(self, start: int, end: int) -> float:
        """Of a prefill of the positions [start, end) on top of those before."""
        return (end - start) * (self.token_flops + self.pair_flops * (start + end) / 2)

    @property
    def has_state(self) -> bool:
        return any(not c.paged for c in self.components)


class RowsFailed(Exception):
    """Raised by Runner.run when some rows cannot be computed and the others could.

    seqs: Row.seq of the rows that failed (these requests fail alone). result: the rows that did not. Any other
    exception out of run() fails every request of the step, and the engine after several such steps in a row.
    """

    def __init__(self, seqs: tuple[int, ...], result: StepResult) -> None:
        super().__init__(f"{len(seqs)} rows failed")
        self.seqs = seqs
        self.result = result


class Runner(Protocol):
    """Runs a model over paged memory."""

    def spec(self) -> ModelSpec: ...

    def allocate(self, num_pages: int, num_slots: int) -> None:
        """Make the pools, once. Indices run from 0; page 0 and slot 0 are null (counted in num_*, written by padding
        rows, read by nobody). num_slots is 0 for a model without state."""
        ...

    def regions(self) -> tuple[Region, ...]:
        """The pools as registered memory, one or more regions per component; valid after allocate() until close().
        Item i of a region is page (or slot) i."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Do the copies in order, then the rows. One RowResult per row, in row order.

        When it returns, every write of the step is complete and visible to a reader of the regions. RowResult.tokens
        has one token per SampleSpec of the row, sampled from the last position's logits. Raises RowsFailed.
        """
        ...

    def close(self) -> None:
        """Free the pools. Nothing may read the regions any more."""
        ...
