"""A StepPlan as bytes and back, for runners in other processes (ranks). JSON: plain values, floats exact."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from engine.plan import Copy, Row, SampleSpec, SamplingParams, StepPlan


def plan_to_bytes(plan: StepPlan) -> bytes:
    return json.dumps(dataclasses.asdict(plan), separators=(",", ":")).encode()


def plan_from_bytes(data: bytes) -> StepPlan:
    """The inverse of plan_to_bytes: equal to the plan it came from."""
    raw = json.loads(data)
    copies = tuple(Copy(**copy) for copy in raw["copies"])
    return StepPlan(raw["step"], tuple(_row(row) for row in raw["rows"]), copies)


def _row(raw: dict[str, Any]) -> Row:
    samples = tuple(_sample(sample) for sample in raw.pop("samples"))
    checkpoints = tuple((length, slot) for length, slot in raw.pop("checkpoints"))
    return Row(samples=samples, checkpoints=checkpoints, **_tuples(raw))


def _sample(raw: dict[str, Any]) -> SampleSpec:
    params = raw.pop("params")
    bias = tuple((token, value) for token, value in params.pop("logit_bias"))
    return SampleSpec(params=SamplingParams(logit_bias=bias, **_tuples(params)), **_tuples(raw))


def _tuples(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
