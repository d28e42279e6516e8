"""Where parameters come from: a safetensors folder, a GGUF file, or a seed. Never a pickle.

A source hands out one parameter at a time by its Hugging Face name, so that a model can convert and pack it before the
next is read. A shape that is not the one asked for is refused: a checkpoint is input from outside.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import safe_open

from runtime.errors import InvalidRequest, Unsupported
from runtime.gguf_header import TensorInfo, read_header

Shape = tuple[int, ...]
Floats = npt.NDArray[np.float32]

INDEX = "model.safetensors.index.json"


class WeightSource(Protocol):
    def get(self, name: str, shape: Shape) -> torch.Tensor:
        """The parameter, on the CPU, in the checkpoint's type. Raises InvalidRequest if missing or misshapen."""
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a parameter of that name."""
        ...

    def shape(self, name: str) -> Shape | None:
        """The parameter's shape as stored; None where it has none of its own (random weights) or is missing."""
        ...

    def dtype(self) -> torch.dtype:
        """The type most of the checkpoint is in (what `dtype: auto` follows)."""
        ...

    def rope_divisors(self) -> torch.Tensor | None:
        """Per-frequency divisors a GGUF may carry in place of a named RoPE scaling."""
        ...


def open_weights(path: Path, kind: str, config: Mapping[str, Any], load_format: str, seed: int) -> WeightSource:
    """kind: hf or gguf (what lies at `path`); load_format: auto, safetensors, gguf or random."""
    if load_format == "random":
        return RandomWeights(seed)
    wanted = {"hf": "safetensors"}.get(kind, kind)
    if load_format not in ("auto", wanted):
        raise InvalidRequest(f"load_format {load_format} does not fit a model of kind {kind}", field="load_format")
    if kind == "gguf":
        return GgufWeights(path, config)
    return SafetensorsWeights(path)


def _misshapen(name: str, found: Shape, wanted: Shape) -> InvalidRequest:
    return InvalidRequest(f"weight {name} has shape {list(found)}, the config says {list(wanted)}", field="model")


def _missing(name: str) -> InvalidRequest:
    return InvalidRequest(f"the checkpoint lacks weight {name}", field="model")


class SafetensorsWeights:
    """model.safetensors, or the shards named by model.safetensors.index.json."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = self._index()
        self._open: dict[str, Any] = {}

    def _index(self) -> dict[str, str]:
        index = self._folder / INDEX
        if not index.exists():
            single = self._folder / "model.safetensors"
            if not single.exists():
                raise InvalidRequest("the model folder has no safetensors weights", field="model")
            with safe_open(single, framework="pt", device="cpu") as f:
                return dict.fromkeys(f.keys(), single.name)
        found: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for shard in set(found.values()):
            if Path(shard).name != shard or not (self._folder / shard).exists():
                raise InvalidRequest("the weight index names a shard that is not in the folder", field="model")
        return found

    def _file(self, shard: str) -> Any:
        if shard not in self._open:
            self._open[shard] = safe_open(self._folder / shard, framework="pt", device="cpu")
        return self._open[shard]

    def get(self, name: str, shape: Shape) -> torch.Tensor:
        if name not in self._file_of:
            raise _missing(name)
        value: torch.Tensor = self._file(self._file_of[name]).get_tensor(name)
        if tuple(value.shape) != shape:
            raise _misshapen(name, tuple(value.shape), shape)
        return value

    def has(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> Shape | None:
        return tuple(self._file(self._file_of[name]).get_slice(name).get_shape()) if self.has(name) else None

    def dtype(self) -> torch.dtype:
        name = next(n for n in self._file_of if n.endswith(("embed_tokens.weight", "embeddings.weight")))
        value: torch.Tensor = self._file(self._file_of[name]).get_tensor(name)
        return value.dtype

    def rope_divisors(self) -> torch.Tensor | None:
        return None


_GGUF_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufWeights:
    """A GGUF file, dequantised on load. Quantised checkpoints count as bf16 for `dtype: auto`."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        header = read_header(path)
        self._tensors = {t.name: t for t in header.tensors}
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        alignment = int(header.metadata.get("general.alignment", 32))
        self._start = -(-header.length // alignment) * alignment
        # llama.cpp stores q and k of this architecture with the two halves of each head interleaved
        self._interleaved = header.metadata.get("general.architecture") == "llama"
        heads = int(config["num_attention_heads"])
        self._heads = {"q": heads, "k": int(config.get("num_key_value_heads") or heads)}

    def _name(self, name: str) -> str:
        if name in _GGUF_GLOBAL:
            return _GGUF_GLOBAL[name]
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        if match is None or match[2] not in _GGUF_LAYER:
            raise Unsupported(f"weight {name} has no GGUF name", field="model")
        return f"blk.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"

    def get(self, name: str, shape: Shape) -> torch.Tensor:
        tensor = self._tensors.get(self._name(name))
        if tensor is None:
            raise _missing(name)
        values = self._dequantised(tensor)
        if tensor.shape[::-1] != shape:
            raise _misshapen(name, tensor.shape[::-1], shape)
        projection = re.search(r"self_attn\.([qk])_proj\.", name)
        if projection and self._interleaved:
            values = _unpermute(values, self._heads[projection[1]])
        return torch.from_numpy(values)

    def _dequantised(self, tensor: TensorInfo) -> Floats:
        try:
            kind = GGMLQuantizationType(tensor.ggml_type)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as exc:
            raise Unsupported(f"GGUF type {tensor.ggml_type} of {tensor.name} is not supported", field="model") from exc
        begin = self._start + tensor.offset
        end = begin + math.prod(tensor.shape) // block * block_bytes
        if end > len(self._data) or tensor.shape[0] % block:
            raise InvalidRequest("the GGUF file is shorter than its directory says", field="model")
        # rows are merged: the package works through 16 of them at a time, which is slow for short ones
        rows = math.prod(tensor.shape[1:])
        data = self._data[begin:end].reshape(rows // math.gcd(rows, 32), -1)
        try:
            values = dequantize(data, kind)
        except NotImplementedError as exc:
            raise Unsupported(f"GGUF type {kind.name} of {tensor.name} is not supported", field="model") from exc
        return np.array(values, dtype=np.float32).reshape(tensor.shape[::-1])

    def has(self, name: str) -> bool:
        return self._name(name) in self._tensors

    def shape(self, name: str) -> Shape | None:
        tensor = self._tensors.get(self._name(name))
        return None if tensor is None else tensor.shape[::-1]

    def dtype(self) -> torch.dtype:
        kind = self._tensors["token_embd.weight"].ggml_type
        return torch.float32 if kind == GGMLQuantizationType.F32 else torch.bfloat16

    def rope_divisors(self) -> torch.Tensor | None:
        tensor = self._tensors.get("rope_freqs.weight")
        return None if tensor is None else torch.from_numpy(self._dequantised(tensor))


def _unpermute(w: Floats, heads: int) -> Floats:
    """Undo llama.cpp's interleaving of a head's two rotary halves along the rows (works for biases too)."""
    half = w.shape[0] // heads // 2
    return np.ascontiguousarray(w.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(w.shape))


class RandomWeights:
    """Normal with standard deviation 0.1 (norm weights: around 1; decay rates of a state: around e^-2, so that it
    remembers as trained ones do), a function of (seed, name) alone. Has every name.

    0.1 on purpose: such a model reacts to nearly any fault in its cache, where small trained ones hide most.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def get(self, name: str, shape: Shape) -> torch.Tensor:
        # the CPU generator looks at the low 32 bits of its seed only
        generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
        value = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * 0.1
        if name.endswith("A_log"):
            return value - 2.0
        return value + 1.0 if name.endswith(("norm.weight", "norm_f.weight")) else value

    def has(self, name: str) -> bool:
        return True

    def shape(self, name: str) -> Shape | None:
        return None

    def dtype(self) -> torch.dtype:
        return torch.float32

    def rope_divisors(self) -> torch.Tensor | None:
        return None
