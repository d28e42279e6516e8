"""Parameters under whichever of several names a checkpoint has them, in the type and on the device they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from engine.weights import WeightSource
from runtime.errors import InvalidRequest

Shape = tuple[int, ...]


class Params:
    """Names are relative to `prefix`. aliases: (part of a name, other spellings of that part), tried in order."""

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        aliases: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._source = source
        self._prefix = prefix
        self._aliases = dict(aliases or {})

    def under(self, prefix: str) -> Params:
        """The same checkpoint, names relative to a longer prefix."""
        return Params(self._source, self.dtype, self.device, self._prefix + prefix, self._aliases)

    def spelled(self, name: str) -> str | None:
        """The full name the checkpoint has the parameter under, or None."""
        return next((n for n in self._candidates(self._prefix + name) if self._source.has(n)), None)

    def has(self, name: str) -> bool:
        return self.spelled(name) is not None

    def stored(self, name: str) -> bool:
        """Like has(), but false of random weights, which have a name for everything: for parameters a config does not
        announce and a checkpoint may bring."""
        found = self.spelled(name)
        return found is not None and self._source.shape(found) is not None

    def size(self, name: str) -> int | None:
        """Numbers in the parameter as stored; None of random weights, and where there is none."""
        found = self.spelled(name)
        shape = None if found is None else self._source.shape(found)
        return None if shape is None else math.prod(shape)

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The parameter as `dtype` (default: the model's). A checkpoint's axes of length one are dropped or added as
        `shape` has them. Raises InvalidRequest if it is missing or has another shape."""
        return self.raw(name, *shape).to(dtype=dtype or self.dtype, device=self.device, copy=True)

    def fp32(self, name: str, *shape: int) -> torch.Tensor:
        return self.get(name, *shape, dtype=torch.float32)

    def raw(self, name: str, *shape: int) -> torch.Tensor:
        """As the checkpoint has it, on the CPU."""
        found = self.spelled(name) or self._prefix + name
        stored = self._source.shape(found)
        if stored is not None and _squeezed(stored) == _squeezed(shape):
            return self._source.get(found, stored).reshape(shape)
        return self._source.get(found, shape)

    def cat(self, names: Iterable[str], rows: Iterable[int], *rest: int) -> torch.Tensor:
        """Several parameters one below the other: [rows_i, *rest] each."""
        return torch.cat([self.get(name, n, *rest) for name, n in zip(names, rows, strict=True)])

    def _candidates(self, name: str) -> Iterable[str]:
        """The name itself, then with each alias applied, alone and after those before it."""
        found = [name]
        for part, others in self._aliases.items():
            found += [n.replace(part, other) for n in found if part in n for other in others]
        return found


def _squeezed(shape: Iterable[int]) -> Shape:
    return tuple(n for n in shape if n != 1)


def require(condition: bool, text: str, field: str) -> None:
    """Refuse a config that cannot be right."""
    if not condition:
        raise InvalidRequest(text, field=field)


Progress = Callable[[float], None]
