"""From logits to tokens. A row's token depends on its own logits and SampleSpec only, never on the batch.

Order, as in vLLM: log-probabilities are taken of the raw logits; then bans and bias, penalties (repetition, then
frequency and presence), temperature, min_p, top_k, top_p, and the argmax of logit + Gumbel noise over what is left.
Values that tie with the last one kept by top_k or top_p are kept too, so that no sort order shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.noise import gumbel, keys
from engine.plan import Logprob, SampleSpec

CANDIDATES = 1024
"""Truncation looks at the best so many first, and at the whole vocabulary only where that does not settle it."""

BLOCK = 256


@dataclass(frozen=True, slots=True)
class Sampled:
    """One per spec. finite: False if the row's logits were not numbers; token is then meaningless."""

    token: int
    logprob: Logprob | None
    finite: bool


def sample(logits: torch.Tensor, owner: Sequence[int], specs: Sequence[SampleSpec]) -> list[Sampled]:
    """logits [R, vocab], spec i samples from row owner[i]."""
    plain = [i for i, s in enumerate(specs) if s.params.plain_greedy and not s.banned]
    other = [i for i in range(len(specs)) if i not in set(plain)]
    out: dict[int, Sampled] = {}
    if plain:
        rows = logits if [owner[i] for i in plain] == list(range(len(logits))) else logits[[owner[i] for i in plain]]
        best, tokens = highest(rows.float())
        for i, token, ok in zip(plain, tokens.tolist(), best.isfinite().tolist(), strict=True):
            out[i] = Sampled(token, None, ok)
    if other:
        raw = logits[[owner[i] for i in other]].float()
        out.update(zip(other, _sample_rows(raw, [specs[i] for i in other]), strict=True))
    return [out[i] for i in range(len(specs))]


def highest(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Best value and its index [R] of each row [R, n]: the lowest of equal ones, a NaN before all.

    On a CPU `max` with an index is not vectorised and takes eleven times as long as `amax` at [8, 49152]; so there the
    block that holds the best is found first.
    """
    count = rows.shape[1]
    whole = count - count % BLOCK
    if rows.device.type != "cpu" or not whole:
        best, at = rows.max(-1)
        return best, at
    tops = rows[:, :whole].view(len(rows), whole // BLOCK, BLOCK).amax(-1)
    if whole < count:
        tops = torch.cat([tops, rows[:, whole:].amax(-1, keepdim=True)], 1)
    start = tops.argmax(-1) * BLOCK
    inside = torch.arange(BLOCK, device=rows.device)
    best, at = rows.gather(1, (start[:, None] + inside).clamp_(max=count - 1)).max(-1)
    return best, start + at


def _sample_rows(raw: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
    finite = raw.amax(-1).isfinite().tolist()
    raw = torch.where(torch.tensor(finite, device=raw.device)[:, None], raw, 0.0)
    edited = _edit(raw, specs)
    _, tokens = highest(edited)
    drawn = [i for i, s in enumerate(specs) if s.params.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(edited[drawn], [specs[i] for i in drawn])
    wanted = [i for i, s in enumerate(specs) if s.params.logprobs]
    found: dict[int, Logprob] = {}
    if wanted:
        tops = [specs[i].params.top_logprobs for i in wanted]
        found = dict(zip(wanted, logprobs(raw[wanted], tokens[wanted], tops), strict=True))
    return [Sampled(t, found.get(i), finite[i]) for i, t in enumerate(tokens.tolist())]


def logprobs(logits: torch.Tensor, targets: torch.Tensor, tops: Sequence[int]) -> list[Logprob]:
    """Log-probabilities of targets [R] under fp32 logits [R, vocab], their ranks, and the tops[i] best of each row."""
    scores = torch.log_softmax(logits, -1)
    chosen = scores.gather(1, targets[:, None])
    ranks = (scores > chosen).sum(-1) + 1
    values, ids = scores.topk(max(1, min(max(tops), scores.shape[1])), dim=-1)
    rows = zip(
        targets.tolist(), chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), tops, strict=True
    )
    return [Logprob(t, p, r, tuple(zip(i[:n], v[:n], strict=True))) for t, p, r, i, v, n in rows]


def _edit(raw: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Bans, bias and penalties, on a copy where there are any."""
    out = raw
    for i, spec in enumerate(specs):
        p = spec.params
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        if not (spec.banned or p.logit_bias or penalised):
            continue
        if out is raw:
            out = raw.clone()
        if spec.banned:
            out[i, list(spec.banned)] = -torch.inf
        if p.logit_bias:
            ids, values = zip(*p.logit_bias, strict=True)
            bias = torch.tensor(values, dtype=torch.float32, device=raw.device)
            out[i].index_add_(0, torch.tensor(ids, device=raw.device), bias)
        if penalised:
            _penalise(out[i], spec)
    return out


def _penalise(row: torch.Tensor, spec: SampleSpec) -> None:
    p = spec.params
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*spec.prompt, *spec.output}), dtype=torch.int64, device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if spec.output and (p.frequency_penalty or p.presence_penalty):
        output = torch.tensor(spec.output, dtype=torch.int64, device=row.device)
        ids, counts = torch.unique(output, return_counts=True)
        row[ids] -= p.frequency_penalty * counts + p.presence_penalty


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Tokens [E] drawn from edited logits [E, vocab]."""
    logits = logits / _column([s.params.temperature for s in specs], logits)
    events = [keys(s.params.seed, s.choice, s.position) for s in specs]
    tokens = torch.zeros(len(specs), dtype=torch.int64, device=logits.device)
    whole = [i for i, s in enumerate(specs) if not _truncates(s)]
    if whole:
        ids = torch.arange(logits.shape[1], dtype=torch.int64, device=logits.device)[None, :]
        _, tokens[whole] = highest(logits[whole] + gumbel([events[i] for i in whole], ids))
    left = [i for i, s in enumerate(specs) if _truncates(s)]
    for width in (min(CANDIDATES, logits.shape[1]), logits.shape[1]):
        if left:
            values, ids, settled = _truncate(logits[left], [specs[i] for i in left], width)
            best = (values + gumbel([events[i] for i in left], ids)).argmax(-1, keepdim=True)
            tokens[left] = ids.gather(1, best)[:, 0]  # those not settled are drawn again from all
            left = [i for i, ok in zip(left, settled, strict=True) if not ok]
    return tokens


def _truncates(spec: SampleSpec) -> bool:
    p = spec.params
    return p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0


def _truncate(
    logits: torch.Tensor, specs: Sequence[SampleSpec], width: int
) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """The `width` best of each row, best first, with -inf where min_p, top_k or top_p cut; and whether all that
    survives is among them."""
    values, ids = logits.topk(width, dim=-1, sorted=True)
    min_p = _column([s.params.min_p for s in specs], logits)
    keep = values >= values[:, :1] + min_p.log()
    k = torch.tensor([[min(s.params.top_k, width) or width] for s in specs], device=logits.device)
    keep &= values >= values.gather(1, k - 1)
    probabilities = _normalised(logits, values, keep, specs)
    before = probabilities.cumsum(-1) - probabilities
    nucleus = (before < _column([s.params.top_p for s in specs], logits)) | (before <= 0)
    last = torch.where(keep & nucleus, values, torch.inf).amin(-1, keepdim=True)
    keep &= values >= last
    whole = torch.tensor([width == logits.shape[1]] * len(specs), device=logits.device)
    over = torch.tensor([s.params.top_k > width for s in specs], device=logits.device)
    settled = whole | ~(keep[:, -1] | over)
    return values.masked_fill(~keep, -torch.inf), ids, settled.tolist()


def _normalised(
    logits: torch.Tensor, values: torch.Tensor, keep: torch.Tensor, specs: Sequence[SampleSpec]
) -> torch.Tensor:
    """Probabilities of the kept candidates among all that min_p and top_k keep; where those two cut nothing, the
    normaliser is the whole row's."""
    among = torch.softmax(values.masked_fill(~keep, -torch.inf), -1)
    uncut = [s.params.top_k == 0 and s.params.min_p == 0.0 for s in specs]
    if not any(uncut):
        return among
    top = torch.log_softmax(logits, -1).amax(-1, keepdim=True)
    overall = (values - values[:, :1] + top).exp()
    return torch.where(torch.tensor(uncut, device=logits.device)[:, None], overall, among)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
