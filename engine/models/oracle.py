"""A model made of hashes: what it says next follows from the content of its pages, and from nothing else.

Every token slot of a page holds, for each (unit, layer), a digest of position, token and the digest before it, read
back from page memory. Logits are a hash of all digests of the sequence in order. So a page that is missing, stale, torn
or another request's changes every later token, and a run that equals the undisturbed one has moved every byte right:
reliability tests need no GPU and no weights. With `state` it also keeps such a digest in a recurrent slot.

Sampling is real (temperature, truncation, penalties, bias, bans, log-probabilities), only small and slow.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.plan import Copy, Logprob, Row, RowResult, SampleSpec, StepPlan, StepResult
from engine.runner_api import ModelSpec
from kvtransfer.types import PAGE_TOKENS, Component, Region

UNITS, LAYERS, DIGEST = 2, 2, 32
LOGIT_SCALE = 16.0

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


class OracleRunner:
    """Implements engine.runner_api.Runner.

    step_s and token_s: seconds every step and every token run takes, for tests of timing and faults.
    """

    def __init__(
        self,
        vocab_size: int = 259,
        max_model_len: int = 8192,
        eos_token_ids: tuple[int, ...] = (),
        state: bool = False,
        step_s: float = 0.0,
        token_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        components = [Component("kv", True, UNITS, LAYERS, 1, PAGE_TOKENS, DIGEST, "uint8")]
        if state:
            components.append(Component("state", False, UNITS, LAYERS, 1, 1, DIGEST, "uint8"))
        self._spec = ModelSpec(vocab_size, max_model_len, tuple(components), eos_token_ids, dtype="uint8")
        self._step_s, self._token_s, self._sleep = step_s, token_s, sleep
        self._pages: Bytes = np.zeros((0, UNITS, LAYERS, PAGE_TOKENS, DIGEST), np.uint8)
        self._slots: Bytes = np.zeros((0, UNITS, LAYERS, DIGEST), np.uint8)

    def spec(self) -> ModelSpec:
        return self._spec

    def allocate(self, num_pages: int, num_slots: int) -> None:
        self._pages = np.zeros((num_pages, *self._pages.shape[1:]), np.uint8)
        if self._spec.has_state:
            self._slots = np.zeros((num_slots, *self._slots.shape[1:]), np.uint8)

    def regions(self) -> tuple[Region, ...]:
        pools = [self._pages, self._slots] if self._spec.has_state else [self._pages]
        return tuple(
            Region(
                region_id=index,
                component=component.name,
                base=pool.ctypes.data,
                length=pool.nbytes,
                stride=component.item_bytes,
                first_unit=0,
                units=UNITS,
            )
            for index, (component, pool) in enumerate(zip(self._spec.components, pools, strict=True))
        )

    def run(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self._copy(copy)
        results = tuple(self._run_row(row) for row in plan.rows)
        delay = self._step_s + self._token_s * sum(len(row.tokens) for row in plan.rows)
        if delay > 0:
            self._sleep(delay)
        return StepResult(plan.step, results)

    def close(self) -> None:
        """The memory goes with the last reference to this runner."""

    # --- memory -----------------------------------------------------------------------------------------------------

    def _copy(self, copy: Copy) -> None:
        pool = self._pages if copy.paged else self._slots
        pool[copy.target] = pool[copy.source]

    def _run_row(self, row: Row) -> RowResult:
        end = row.start + len(row.tokens)
        assert 0 not in row.pages, "the null page in a page table"
        assert len(row.pages) * PAGE_TOKENS >= end, "a page table that is too short"
        self._write(row)
        if self._spec.has_state:
            self._advance_state(row)
        contents = self._contents(row, end)
        prompt = tuple(self._prompt_scores(row, contents))
        if not row.samples:
            return RowResult(row.seq, prompt=prompt)
        logits = self._logits(hashlib.sha256(contents), row.slot)
        sampled = [sample(logits, spec) for spec in row.samples]
        return RowResult(row.seq, tuple(t for t, _ in sampled), tuple(p for _, p in sampled), prompt)

    def _write(self, row: Row) -> None:
        """Extend the digest chain of each (unit, layer) over the row's tokens."""
        positions = np.arange(row.start, row.start + len(row.tokens))
        pages = np.asarray(row.pages)[positions // PAGE_TOKENS]
        digests = np.empty((UNITS, LAYERS, len(row.tokens), DIGEST), np.uint8)
        for unit in range(UNITS):
            for layer in range(LAYERS):
                before = self._before(row, unit, layer)
                chain = b"".join(_chain(before, row.start, row.tokens, unit, layer))
                digests[unit, layer] = np.frombuffer(chain, np.uint8).reshape(-1, DIGEST)
        self._pages[pages, :, :, positions % PAGE_TOKENS] = digests.transpose(2, 0, 1, 3)

    def _before(self, row: Row, unit: int, layer: int) -> bytes:
        if row.start == 0:
            return bytes(DIGEST)
        page, offset = divmod(row.start - 1, PAGE_TOKENS)
        return bytes(self._pages[row.pages[page], unit, layer, offset])

    def _advance_state(self, row: Row) -> None:
        """A fresh sequence begins from zeros, whatever the slot held."""
        assert row.slot > 0, "a state without a slot"
        for unit in range(UNITS):
            for layer in range(LAYERS):
                before = bytes(DIGEST) if row.start == 0 else self._slots[row.slot, unit, layer].tobytes()
                states = list(_chain(before, row.start, row.tokens, unit + UNITS, layer))
                for length, slot in ((row.start + len(row.tokens), row.slot), *row.checkpoints):
                    self._slots[slot, unit, layer] = np.frombuffer(states[length - row.start - 1], np.uint8)

    def _contents(self, row: Row, end: int) -> bytes:
        """All digests of the first `end` tokens, token by token."""
        held = self._pages[list(row.pages)].transpose(0, 3, 1, 2, 4)
        return held.reshape(-1, UNITS * LAYERS * DIGEST)[:end].tobytes()

    # --- logits -------------------------------------------------------------------------------------------------------

    def _logits(self, content: Any, slot: int) -> Floats:
        """[vocab] in [0, LOGIT_SCALE), from a running SHA-256 over the content."""
        seed = content.copy()
        if self._spec.has_state:
            seed.update(self._slots[slot].tobytes())
        return LOGIT_SCALE * _uniform(seed.digest(), self._spec.vocab_size)

    def _prompt_scores(self, row: Row, contents: bytes) -> Iterator[Logprob]:
        token_bytes = UNITS * LAYERS * DIGEST
        content = hashlib.sha256(contents[: row.start * token_bytes])
        for index, target in enumerate(row.prompt_targets):
            at = (row.start + index) * token_bytes
            content.update(contents[at : at + token_bytes])
            logits = LOGIT_SCALE * _uniform(content.digest(), self._spec.vocab_size)
            yield _logprob(logits, target, row.prompt_top)


def _chain(before: bytes, start: int, tokens: tuple[int, ...], unit: int, layer: int) -> Iterator[bytes]:
    for position, token in enumerate(tokens, start):
        before = hashlib.sha256(before + struct.pack("<4I", position, token, unit, layer)).digest()
        yield before


def _uniform(seed: bytes, count: int) -> Floats:
    """`count` numbers in (0, 1), a function of the seed alone."""
    words = np.frombuffer(hashlib.shake_256(seed).digest(4 * count), "<u4")
    return (words.astype(np.float64) + 0.5) / 2.0**32


def sample(logits: Floats, spec: SampleSpec) -> tuple[int, Logprob | None]:
    """One token by `spec`; noise = f(seed, choice, position, token id)."""
    params = spec.params
    scores = _penalised(logits, spec)
    if params.temperature > 0:
        scores = _truncated(scores / params.temperature, spec)
        noise = _uniform(struct.pack("<3Q", params.seed, spec.choice, spec.position), len(scores))
        scores = scores - np.log(-np.log(noise))
    token = int(np.argmax(scores))
    return token, _logprob(logits, token, params.top_logprobs) if params.logprobs else None


def _penalised(logits: Floats, spec: SampleSpec) -> Floats:
    params = spec.params
    scores = logits.copy()
    seen = np.unique(np.asarray(spec.prompt + spec.output, np.int64))
    if params.repetition_penalty != 1.0 and len(seen):
        held = scores[seen]
        scores[seen] = np.where(held > 0, held / params.repetition_penalty, held * params.repetition_penalty)
    tokens, counts = np.unique(np.asarray(spec.output, np.int64), return_counts=True)
    scores[tokens] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in params.logit_bias:
        scores[token] += bias
    scores[list(spec.banned)] = -np.inf
    return scores


def _truncated(scores: Floats, spec: SampleSpec) -> Floats:
    """top_k, then top_p, then min_p, over softmax(scores)."""
    params = spec.params
    order = np.argsort(-scores, kind="stable")
    probabilities = np.exp(scores[order] - scores[order[0]])
    probabilities /= probabilities.sum()
    keep = np.cumsum(probabilities) - probabilities < params.top_p
    keep &= probabilities >= params.min_p * probabilities[0]
    if params.top_k:
        keep &= np.arange(len(order)) < params.top_k
    kept = np.full_like(scores, -np.inf)
    kept[order[keep]] = scores[order[keep]]
    return kept


def _logprob(logits: Floats, token: int, top: int) -> Logprob:
    log_z = float(np.log(np.exp(logits - logits.max()).sum()) + logits.max())
    rank = int((logits > logits[token]).sum()) + 1
    best = np.argsort(-logits, kind="stable")[:top]
    alternatives = tuple((int(t), float(logits[t]) - log_z) for t in best)
    return Logprob(token, float(logits[token]) - log_z, rank, alternatives)
