"""Decode steps of a GPU as CUDA graphs: one launch for a step whose kernels are too short to be launched one by one.

A graph is captured at the first step of its size (sizes are powers of two, a step is padded to the next one) and reach
(attention is launched for the longest sequence that the buffers have room for: with one graph for all lengths, short
steps would start thousands of programs that end at once), and then replayed over the same buffers
(engine.layers.static). Capturing and warming up run on padding rows alone, so nothing that anybody reads is written.
Other threads copy and register memory meanwhile: only this thread's calls are captured.

Without a GPU (Triton's interpreter) the same step runs call by call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.ops import uses_triton
from engine.layers.pools import Pools
from engine.layers.static import StaticStep
from engine.models.registry import Model
from engine.plan import Row

WARM_UP = 2
"""Runs before a capture: kernels are compiled and libraries make their workspaces in the first."""

SHORT, LONGER = 4096, 4
"""Tokens of the longest sequence of a step: a graph reaches so far, or this many times further as often as it takes."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Captured:
    """graph: None = run call by call. logits [size, vocab]: what a replay fills."""

    step: StaticStep
    graph: Any = None
    logits: torch.Tensor | None = None


class DecodeGraphs:
    """most: rows of the largest step it takes."""

    def __init__(self, model: Model, pools: Pools, max_len: int, ring: int, device: torch.device, most: int) -> None:
        assert uses_triton(device), "the CPU's kernels read their plans on the host"
        self.most = most
        self._model, self._pools = model, pools
        self._max_len, self._ring, self._device = max_len, ring, device
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._beside: Any = None  # one for all captures: libraries keep a workspace for each stream they have seen
        self._memory: Any = None  # shared by all graphs: they run one at a time, and logits are used up in between
        self.works = True

    def takes(self, rows: Sequence[Row]) -> bool:
        return self.works and len(rows) <= self.most and all(r.is_decode and not r.prompt_targets for r in rows)

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """[len(rows), vocab], valid until the next call."""
        size = 1 << (len(rows) - 1).bit_length()
        reach = self._reach(rows)
        held = self._captured.get((size, reach))
        if held is None:
            held = self._captured[size, reach] = self._made(size, reach)
        held.step.fill(rows)
        if held.graph is None:
            return self._forward(held.step)[: len(rows)]
        held.graph.replay()
        assert held.logits is not None
        return held.logits[: len(rows)]

    def _reach(self, rows: Sequence[Row]) -> int:
        longest, reach = max(row.start for row in rows) + 1, SHORT
        while reach < longest:
            reach *= LONGER
        return min(reach, self._max_len)

    def _forward(self, step: StaticStep) -> torch.Tensor:
        return self._model.logits(self._model.forward(step.batch, self._pools))

    def _made(self, size: int, reach: int) -> _Captured:
        """Captured where there is a GPU. A device that cannot be captured on serves without, and says so once; where
        others have been captured (its memory is full by now), these steps alone run call by call."""
        made = _Captured(StaticStep(self._model.groups, size, reach, self._ring, self._device))
        made.step.fill(())
        if self._device.type != "cuda":
            return made
        try:
            self._capture(made)
        except RuntimeError as error:
            _log.warning("decode steps are not captured, they will take longer", extra={"why": str(error)})
            made.graph = None
            self.works = any(held.graph is not None for held in self._captured.values())
        return made

    def _capture(self, made: _Captured) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._beside is None:
            self._beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside = self._beside
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP):
                self._forward(made.step)
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=beside, capture_error_mode="thread_local"):
            made.logits = self._forward(made.step)
        if self._memory is None:
            self._memory = graph.pool()
        made.graph = graph
