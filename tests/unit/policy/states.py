"""Small workers and requests to decide about."""

from __future__ import annotations

from typing import Any

from router.policy.index import Hit
from router.policy.pairing import Role
from router.policy.view import RequestView, Work, WorkerView


def worker(name: str, role: Role, bit: int, **account: Any) -> WorkerView:
    return WorkerView(name, role, bit=bit, **account)


def prefill(bit: int, tokens: int = 0, **account: Any) -> WorkerView:
    """p<bit>, with `tokens` of prompt to run."""
    view = worker(f"p{bit}", Role.PREFILL, bit, prefill_tokens=tokens, **account)
    if tokens:
        view.work[(f"earlier-{bit}", 1)] = Work(tokens * 5e-5, tokens, (0.0, bit))
    return view


def decode(bit: int, requests: int = 0, context: int = 0, **account: Any) -> WorkerView:
    """d<bit>, with `requests` that hold `context` tokens in all."""
    return worker(
        f"d{bit}", Role.DECODE, bit, decoding=requests, context_tokens=context, held_tokens=context, **account
    )


def both(bit: int, requests: int = 0, **account: Any) -> WorkerView:
    return worker(f"b{bit}", Role.BOTH, bit, decoding=requests, **account)


def hit(tokens: int, device: int | None = None, host: int | None = None) -> Hit:
    on_device = tokens if device is None else device
    return Hit(tokens, on_device, max(on_device, tokens if host is None else host), tokens)


def request(tokens: int, hits: dict[int, Hit] | None = None, **fields: Any) -> RequestView:
    return RequestView("r", tokens, arrived=0.0, hits=hits or {}, **fields)
