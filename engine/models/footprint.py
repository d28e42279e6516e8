"""What a page and a state slot of a model take at least, from its configuration alone: so that a pool nothing fits into
is refused before anything is started. Torch-free; tests compare it with what the models themselves say, family by
family.

"At least": with `dtype` auto the checkpoint decides, and two bytes a number is the least it can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.families import family_of, readable
from engine.runner_api import ModelSpec
from kvtransfer.types import PAGE_TOKENS, Component
from runtime.config import Config
from runtime.errors import InvalidRequest

FP32 = 4
_ITEM = {"auto": 2, "bfloat16": 2, "float32": FP32}
_Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Of one linear layer. gates: decay rates per head; channels: of all its convolutions, which keep `rows` rows."""

    heads: int
    key: int
    value: int
    gates: int
    channels: int
    rows: int

    def slot(self, item: int) -> int:
        return self.heads * self.key * self.value * FP32 + self.channels * self.rows * item

    def records(self, length: int) -> int:
        return self.heads * length * (self.key + self.value + self.gates) * FP32 if length > 1 else 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """attention: layers with pages, of `row` numbers per token each; linear: layers with a state."""

    attention: int
    row: int
    linear: int = 0
    recurrence: Recurrence | None = None


def least_spec(model: Mapping[str, Any], config: Config) -> ModelSpec:
    """Of a model with this Hugging Face style config, in a worker with this configuration: the sizes of pages and slots
    (of one component each), no more. Raises Unsupported for what is not
    computed, InvalidRequest when its config lacks what it must say."""
    item, read = _ITEM[config.dtype], _READERS[family_of(model)]
    with readable():
        print_ = read(model.get("text_config") or model)
    if print_.attention < 1:
        raise InvalidRequest("a model without attention has no pages to serve from", field="layer_types")
    components = [_component("pages", True, print_.attention * print_.row * PAGE_TOKENS * item)]
    records = 0
    if print_.linear and print_.recurrence is not None:
        components.append(_component("state", False, print_.linear * print_.recurrence.slot(item)))
        records = print_.linear * print_.recurrence.records(config.replay_len if config.replay_ssm else 1)
    return ModelSpec(0, 0, tuple(components), record_bytes=records)


def _component(name: str, paged: bool, size: int) -> Component:
    return Component(name, paged, units=1, layers=1, rows=1, tokens=1, token_bytes=size, dtype="uint8")


def _llama(config: _Raw) -> Footprint:
    return Footprint(int(config["num_hidden_layers"]), _kv_row(config))


def _kv_row(config: _Raw) -> int:
    heads = int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return 2 * int(config.get("num_key_value_heads") or heads) * dim


def _kimi(config: _Raw) -> Footprint:
    nested = config.get("linear_attn_config") or {}
    total = int(config["num_hidden_layers"])
    if config.get("layer_types"):
        linear = list(config["layer_types"]).count("linear_attention")
    else:
        linear = len(set(nested.get("kda_layers") or ()))
    heads = int(nested.get("num_heads") or config["linear_num_heads"])
    dim = int(nested.get("head_dim") or config["linear_head_dim"])
    width = int(nested.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"])
    row = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    return Footprint(total - linear, row, linear, Recurrence(heads, dim, dim, dim, 3 * heads * dim, width - 1))


def _qwen3_next(config: _Raw) -> Footprint:
    total = int(config["num_hidden_layers"])
    if config.get("layer_types"):
        linear = list(config["layer_types"]).count("linear_attention")
    else:
        linear = total - total // int(config.get("full_attention_interval") or 4)
    keys, values = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    channels, rows = 2 * keys * key + values * value, int(config["linear_conv_kernel_dim"]) - 1
    return Footprint(total - linear, _kv_row(config), linear, Recurrence(values, key, value, 1, channels, rows))


def _granite_hybrid(config: _Raw) -> Footprint:
    kinds = list(config.get("layer_types") or config.get("layers_block_type") or ())
    linear = sum(kind in ("mamba", "linear_attention") for kind in kinds)
    heads = int(config["mamba_n_heads"])
    dim = int(config.get("mamba_expand", 2)) * int(config["hidden_size"]) // heads
    mamba = _mamba(heads, dim, int(config["mamba_n_groups"]), int(config["mamba_d_state"]), int(config["mamba_d_conv"]))
    return Footprint(len(kinds) - linear, _kv_row(config), linear, mamba)


def _nemotron_h(config: _Raw) -> Footprint:
    raw = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern") or ()
    linear = sum(kind in ("M", "mamba", "linear_attention") for kind in raw)
    attention = sum(kind in ("*", "attention", "full_attention") for kind in raw)
    heads, dim = int(config["mamba_num_heads"]), int(config["mamba_head_dim"])
    mamba = _mamba(heads, dim, int(config["n_groups"]), int(config["ssm_state_size"]), int(config["conv_kernel"]))
    return Footprint(attention, _kv_row(config), linear, mamba)


def _mamba(heads: int, dim: int, groups: int, state: int, width: int) -> Recurrence:
    return Recurrence(heads, state, dim, 1, heads * dim + 2 * groups * state, width - 1)


_READERS = {
    "llama": _llama,
    "kimi_k3": _kimi,
    "kimi_linear": _kimi,
    "granite_hybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _qwen3_next,
}
