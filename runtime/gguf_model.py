"""What a GGUF header says, in Hugging Face terms: a config dict and a tokenizers.Tokenizer.

Kept: llama, mistral, qwen2 and qwen3 architectures; byte-level BPE vocabularies ("gpt2"). Anything else is refused by
name. Pre-tokenizer patterns are those of llama.cpp (src/llama-vocab.cpp) and of the models' own tokenizer.json.
"""

from __future__ import annotations

import struct
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from runtime.errors import Unsupported
from runtime.gguf_header import GgufHeader

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_CONTROL, _USER_DEFINED = 3, 4
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3, "falcon3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN,
}  # fmt: skip
_DIGIT_WISE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_PLAIN = ("gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo")
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken")


def config_of(header: GgufHeader) -> dict[str, Any]:
    """HF-style keys of the model's config.json. Raises Unsupported for other architectures and rope scalings.

    `rope_factors_tensor` names a tensor with per-frequency divisors (llama3 scaling in GGUF), if there is one.
    """
    meta = header.metadata
    arch = str(meta.get("general.architecture", ""))
    if arch not in ARCHITECTURES:
        raise Unsupported(f"GGUF architecture {arch!r} is not supported", field="model", limit=", ".join(ARCHITECTURES))
    model_type, cls = ARCHITECTURES[arch]

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise Unsupported(f"the GGUF file lacks {arch}.{key}", field="model")
        return value

    hidden, heads = int(get("embedding_length")), int(get("attention.head_count"))
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [cls],
        "hidden_size": hidden,
        "intermediate_size": int(get("feed_forward_length")),
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": int(get("attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(get("context_length")),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(meta, arch),
        "vocab_size": int(get("vocab_size", len(meta.get("tokenizer.ggml.tokens", ())))),
        "tie_word_embeddings": not header.has_tensor("output.weight"),
        "attention_bias": header.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": header.has_tensor("blk.0.ffn_gate.bias"),
    }
    if header.has_tensor("rope_freqs.weight"):
        config["rope_factors_tensor"] = "rope_freqs.weight"
    window = meta.get(f"{arch}.attention.sliding_window")
    if window:
        config["sliding_window"] = int(window)
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        value = meta.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            config[name] = int(value)
    return config


def eos_ids(header: GgufHeader) -> tuple[int, ...]:
    """Ids that end a turn: those the file names, and the well-known end-of-turn tokens among its control tokens."""
    meta = header.metadata
    found = {int(meta[key]) for key in (f"tokenizer.ggml.{n}_token_id" for n in ("eos", "eot", "eom")) if key in meta}
    for token_id, (token, kind) in enumerate(_typed_tokens(header)):
        if kind == _CONTROL and token in _TURN_ENDS:
            found.add(token_id)
    return tuple(sorted(found))


def sampling_defaults(header: GgufHeader) -> dict[str, Any]:
    """generation_config keys from `general.sampling.*`, {} for the many files without them."""
    names = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    meta = header.metadata
    found = {name: meta.get(f"general.sampling.{key}") for key, name in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """bos_token, eos_token, unk_token, pad_token: the strings a chat template refers to, where the file has them."""
    meta = header.metadata
    tokens: list[str] = meta.get("tokenizer.ggml.tokens", [])
    found: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            found[f"{name}_token"] = tokens[token_id]
    return found


def tokenizer_of(header: GgufHeader) -> Tokenizer:
    """The byte-level BPE tokenizer of the file. Raises Unsupported for other kinds of vocabulary."""
    meta = header.metadata
    kind, pre = str(meta.get("tokenizer.ggml.model", "")), str(meta.get("tokenizer.ggml.pre", "default"))
    if kind != "gpt2" or "tokenizer.ggml.merges" not in meta:
        raise Unsupported(f"GGUF tokenizer {kind!r} is not supported", field="model", limit="gpt2 (byte-level BPE)")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [_pair(merge) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _IGNORE_MERGES))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in _typed_tokens(header):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    tokenizer.post_processor = _post_processor(meta, tokens)
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGIT_WISE:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in _PLAIN:
        return byte_level
    raise Unsupported(f"GGUF pre-tokenizer {pre!r} is not supported", field="model")


def _post_processor(meta: dict[str, Any], tokens: list[str]) -> processors.PostProcessor | None:
    """What `add_special_tokens` adds: BOS and EOS as the file's flags say."""
    before: list[str] = []
    after: list[str] = []
    named: list[tuple[str, int]] = []
    for flag, key, side in (("add_bos_token", "bos", before), ("add_eos_token", "eos", after)):
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if meta.get(f"tokenizer.ggml.{flag}", False) and token_id is not None:
            side.append(tokens[token_id])
            named.append((tokens[token_id], int(token_id)))
    if not named:
        return None
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=named)


def _rope_scaling(meta: dict[str, Any], arch: str) -> dict[str, Any] | None:
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise Unsupported(f"GGUF rope scaling {kind!r} is not supported", field="model", limit="linear, yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(meta[f"{arch}.rope.scaling.factor"])}
    original = meta.get(f"{arch}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _typed_tokens(header: GgufHeader) -> list[tuple[str, int]]:
    meta = header.metadata
    return list(zip(meta.get("tokenizer.ggml.tokens", ()), meta.get("tokenizer.ggml.token_type", ()), strict=False))


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _shortest(value: float) -> float:
    """The decimal a float32 was written from: 9.999999747e-06 is 1e-05."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return float(value)
