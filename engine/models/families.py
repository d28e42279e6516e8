"""Which checkpoints are computed, and what their configuration alone says. Torch-free: `pdserve up` asks before it
starts anything, and a worker before it reads a weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from runtime.errors import InvalidRequest, Unsupported

FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "kimi_k3": "kimi_k3",
    "kimi_linear": "kimi_linear",
    "granitemoehybrid": "granite_hybrid",
    "nemotron_h": "nemotron_h",
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_next",
    "qwen3_5_text": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_next",
}
"""Model type -> the file beside this one that computes it."""


def family_of(config: Mapping[str, Any]) -> str:
    """Of a Hugging Face style config. Raises Unsupported naming the model type and what is supported."""
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise Unsupported(f"model type {kind!r} is not supported (known: {known})", field="model")
    return FAMILIES[kind]


@contextmanager
def readable() -> Iterator[None]:
    """Around what reads a model's config: what is missing there or no number is InvalidRequest."""
    try:
        yield
    except KeyError as error:
        raise InvalidRequest(f"the model's config has no {error.args[0]}", field="model") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InvalidRequest(f"the model's config is malformed: {error}", field="model") from error


def check_together(family: str, *, compiled: bool, replayed: bool, deterministic: bool) -> None:
    """Raises Unsupported for options that exclude each other, or this family."""
    if compiled and deterministic:
        raise Unsupported("compile and deterministic exclude each other", field="compile")
    if replayed and deterministic:
        # when a ring is folded depends on the slot, and so do the last bits of what is read from it
        raise Unsupported("replay_ssm and deterministic exclude each other", field="replay_ssm")
    if compiled and family != "llama":
        raise Unsupported("compile is for models of the Llama family", field="compile")
