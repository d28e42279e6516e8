"""Tiny random-weight hybrid models with every feature on, ours and transformers' with the same parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.plan import Row, SampleSpec, SamplingParams, StepPlan
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights
from kvtransfer.types import Region

VOCAB = 97
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 80,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_expert_group": 2,
        "topk_group": 1,
        "num_shared_experts": 2,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "model_max_length": 2048,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        **SPECIAL,
    },
}
_QWEN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear", "full")],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    **SPECIAL,
}
_QWEN_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
CONFIGS["qwen3_next"] = {"model_type": "qwen3_next", **_QWEN, **_QWEN_MOE, "mlp_only_layers": [1]}
CONFIGS["qwen3_next-biases"] = {**CONFIGS["qwen3_next"], "attention_bias": True, "norm_topk_prob": False}
CONFIGS["qwen3_5"] = {"model_type": "qwen3_5_text", **_QWEN, "tie_word_embeddings": True}
CONFIGS["qwen3_5-moe"] = {"model_type": "qwen3_5_moe_text", **_QWEN, **_QWEN_MOE}
CONFIGS["granitemoehybrid"] = {
    "model_type": "granitemoehybrid",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "shared_intermediate_size": 40,
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear", "full")],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": True,
    "time_step_limit": (0.01, 0.9),
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "max_position_embeddings": 2048,
    **SPECIAL,
}
CONFIGS["granitemoehybrid-rope"] = {
    **CONFIGS["granitemoehybrid"],
    "position_embedding_type": "rope",
    "num_local_experts": 0,
    "attention_bias": True,
    "mamba_proj_bias": False,
    "tie_word_embeddings": True,
}
CONFIGS["nemotron_h"] = {
    "model_type": "nemotron_h",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "time_step_min": 0.6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 2048,
    **SPECIAL,
}
CONFIGS["nemotron_h-biases"] = {
    **CONFIGS["nemotron_h"],
    "moe_latent_size": None,
    "mlp_bias": True,
    "use_bias": True,
    "n_group": 1,
    "norm_topk_prob": False,
}
CONFIGS["kimi_k3"] = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 80,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "attn_res_block_size": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    },
}
CONFIGS["kimi_linear-query-rank"] = {
    **CONFIGS["kimi_linear"],
    "q_lora_rank": 20,
    "attention_bias": True,
    "num_expert_group": 1,
    "moe_renormalize": False,
    "tie_word_embeddings": True,
}


def config_of(name: str) -> dict[str, Any]:
    """As a checkpoint's config.json has it. transformers knows no Kimi K3."""
    if name == "kimi_k3":
        return CONFIGS[name]
    config: dict[str, Any] = AutoConfig.for_model(**CONFIGS[name]).to_dict()
    return config


def reference(name: str, seed: int = 0) -> Any:
    """transformers' model in fp32 with RandomWeights(seed), buffers that are parameters in all but name included."""
    config = AutoConfig.for_model(**CONFIGS[name])
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    source = RandomWeights(seed)
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for parameter_name, parameter in [*model.named_parameters(), *buffers]:
            parameter.copy_(source.get(parameter_name, tuple(parameter.shape)))
    return model


def runner_of(
    name: str,
    *,
    seed: int = 0,
    pages: int = 64,
    slots: int = 9,
    deterministic: bool = False,
    dtype: str = "float32",
    replay_len: int = 0,
    graph_rows: int = 0,
) -> TorchRunner:
    options = RunnerOptions(
        dtype=dtype,
        device="cpu",
        threads=1,
        deterministic=deterministic,
        replay_len=replay_len,
        graph_rows=graph_rows,
    )
    runner = TorchRunner(config_of(name), RandomWeights(seed), options, (2,))
    runner.allocate(pages, slots)
    return runner


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, length))


def view(region: Region) -> npt.NDArray[np.uint8]:
    """[items, bytes] of a region, from its address, as a transport sees it."""
    raw = (ctypes.c_uint8 * region.length).from_address(region.base)
    return np.ctypeslib.as_array(raw).reshape(-1, region.stride)


def slot_bytes(runner: TorchRunner, slot: int) -> dict[str, bytes]:
    """Every slot component's bytes of one slot."""
    paged = {c.name: c.paged for c in runner.spec().components}
    return {r.component: view(r)[slot].tobytes() for r in runner.regions() if not paged[r.component]}


def page_bytes(runner: TorchRunner, pages: Sequence[int]) -> bytes:
    """Every paged component's bytes of these pages."""
    paged = {c.name for c in runner.spec().components if c.paged}
    return b"".join(view(r)[list(pages)].tobytes() for r in runner.regions() if r.component in paged)


SCORED = SamplingParams(logprobs=True, top_logprobs=VOCAB)


class Walk:
    """One sequence through a runner: every score of a sampled position is recorded."""

    def __init__(self, runner: TorchRunner, tokens: Sequence[int], slot: int = 1, first_page: int = 1) -> None:
        self.runner = runner
        self.tokens = list(tokens)
        self.slot = slot
        self.pages = tuple(range(first_page, first_page + 24))
        self.computed = 0
        self.whole = -1
        self.scores: list[npt.NDArray[np.float64]] = []

    def row(self, end: int, checkpoints: tuple[tuple[int, int], ...] = (), sample: bool = True) -> Row:
        spec = (SampleSpec(SCORED, end, 0),) if sample else ()
        run = tuple(self.tokens[self.computed : end])
        return Row(
            self.slot, run, self.computed, self.pages, self.slot, spec, checkpoints=checkpoints, whole=self.whole
        )

    def take(self, row: Row, result: Any) -> int:
        self.computed += len(row.tokens)
        if not result.tokens:
            return -1
        (scored,) = result.logprobs
        found = dict(scored.top)
        self.scores.append(np.array([found[v] for v in range(VOCAB)]))
        return int(result.tokens[0])

    def run(self, end: int, checkpoints: tuple[tuple[int, int], ...] = ()) -> int:
        """Run up to `end` in one row; the token after it."""
        row = self.row(end, checkpoints)
        return self.take(row, self.runner.run(StepPlan(1, (row,))).rows[0])

    def chunks(self, end: int, size: int = 32) -> int:
        """Run up to `end` in rows that end at multiples of `size`."""
        token = -1
        while self.computed < end:
            token = self.run(min((self.computed // size + 1) * size, end))
        return token

    def decode(self, count: int, token: int) -> list[int]:
        """`count` greedy tokens after `token`, which was sampled last."""
        self.whole = self.computed
        for _ in range(count):
            self.tokens.append(token)
            token = self.run(len(self.tokens))
        return self.tokens

    @property
    def state(self) -> dict[str, bytes]:
        return slot_bytes(self.runner, self.slot)
