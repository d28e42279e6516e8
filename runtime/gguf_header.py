"""The header of a GGUF file: metadata and tensor directory, without touching the weights.

The `gguf` package's reader maps every tensor and wraps every string in arrays; a router that wants only the tokenizer
would wait seconds for it. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3 and 2).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import InvalidRequest

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 24
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the directory. shape: as stored, fastest dimension first. offset: from the data section's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """length: bytes of the file before the (aligned) data section."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    length: int

    def has_tensor(self, name: str) -> bool:
        return any(tensor.name == name for tensor in self.tensors)


def read_header(path: Path) -> GgufHeader:
    """Parse the header. Raises InvalidRequest (field "model") for what is not a GGUF file of version 2 or 3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except OSError as exc:
        raise InvalidRequest("the GGUF file cannot be read", field="model") from exc
    except (struct.error, ValueError, UnicodeDecodeError) as exc:
        raise InvalidRequest("the file is not a whole GGUF file", field="model") from exc


class _Reader:
    """A cursor over the mapped file. Raises struct.error or ValueError for anything malformed."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise ValueError("magic")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError("version")
        tensor_count, item_count = self._scalar("Q"), self._scalar("Q")
        if tensor_count > _MAX_ITEMS or item_count > _MAX_ITEMS:
            raise ValueError("counts")
        metadata: dict[str, Any] = {}
        for _ in range(item_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        tensors = tuple(self._tensor() for _ in range(tensor_count))
        return GgufHeader(metadata, tensors, self._at)

    def _tensor(self) -> TensorInfo:
        name = self._string()
        dims = self._scalar("I")
        if dims > _MAX_DIMS:
            raise ValueError("dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dims))
        return TensorInfo(name, shape, self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            return self._array(item, count)
        return self._scalar(_scalar_code(kind))

    def _array(self, item: int, count: int) -> list[Any]:
        if count > _MAX_ITEMS:
            raise ValueError("array length")
        if item == _STRING:
            return [self._string() for _ in range(count)]
        if item == _ARRAY:
            raise ValueError("nested array")
        code = _scalar_code(item)
        raw = self._take(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", raw))

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{code}", self._take(size))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ValueError("truncated")
        raw = self._data[self._at : end]
        self._at = end
        return raw


def _scalar_code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError("value type")
    return _SCALARS[kind]
