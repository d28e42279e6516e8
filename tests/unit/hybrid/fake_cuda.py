"""A decode step on a GPU that is not there: tensors have a cuda device, shapes and types and no memory, and Triton
launches are noted. What a CUDA graph cannot hold shows: a wait for the device, or a copy from the host's memory.

python -m tests.unit.hybrid.fake_cuda NAME...     one JSON line a model: {"name", "launches", "operations", "error"}
NAME+waits is the model with a wait at its end, to show that one is noticed.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.delta_chunk_plan import ChunkPlan
from engine.layers import static
from engine.layers.pools import Pools
from engine.layers.static import StaticStep
from engine.models.registry import Model, build, model_config
from engine.weights import RandomWeights
from tests.unit.hybrid.interpreted import LLAMA
from tests.unit.hybrid.models import config_of

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "item", "is_nonzero", "equal")
DEVICE = torch.device("cuda", 0)
SIZE = 4


class NotCapturable(Exception):
    """What would end, or spoil, a capture."""


class Watch(TorchDispatchMode):
    """Counts device operations and refuses those a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in WAITS:
            raise NotCapturable(f"{name} waits for the device")
        out = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in _tensors((args, kwargs, out)) if t.dim()}
        if devices == {"cpu"} or (name in ("copy_", "_to_copy") and "cpu" in devices):
            raise NotCapturable(f"{name} touches host memory")
        self.operations += 1
        return out


class Indexing(TorchFunctionMode):
    """Indexing by slices, numbers and one tensor through the operators themselves: Python's asks for a CUDA build."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not args or not isinstance(args[0], torch.Tensor) or args[0].device.type != "cuda":
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.__getitem__:
            return self.taken(*args)
        if func is torch.Tensor.__setitem__:
            target, index, value = args
            if isinstance(index, torch.Tensor):
                return torch.ops.aten.index_put_.default(target, [index], value)
            return torch.ops.aten.copy_.default(self.taken(target, index), value)
        if func is torch.Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def taken(x: torch.Tensor, index: Any) -> torch.Tensor:
        parts = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in [p for p in parts if not isinstance(p, torch.Tensor)]:
            at = parts.index(Ellipsis)
            named = sum(p is not None for p in parts) - 1
            parts[at : at + 1] = [slice(None)] * (x.dim() - named)
        dim = 0
        for part in parts:
            if part is None:
                x = x.unsqueeze(dim)
            elif isinstance(part, int):
                x = x.select(dim, part)
                continue
            elif isinstance(part, slice):
                x = torch.ops.aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
            else:
                x = torch.ops.aten.index.Tensor(x, [*[None] * dim, part])
            dim += 1
        return x


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return [t for part in value for t in _tensors(part)] if isinstance(value, (list, tuple)) else []


def note_launches() -> list[str]:
    """From here on no kernel is compiled or run. Returns a list that fills with the names of those launched."""
    from triton.runtime.jit import JITFunction

    launched: list[str] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        for tensor in _tensors(args):
            assert isinstance(tensor, FakeTensor)
            if tensor.device.type != "cuda":
                raise NotCapturable(f"{self.fn.__name__} gets host memory")
        launched.append(self.fn.__name__)

    JITFunction.run = run
    return launched


class Twin:
    """The device's half of static._Twin."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)


NO_CHUNKS = ChunkPlan.build((), (), ())


class Plans:
    """The plan of no prompt chunks, made on the host before anything is fake."""

    @staticmethod
    def build(*args: Any, **kwargs: Any) -> ChunkPlan:
        return NO_CHUNKS


def model_of(name: str) -> Model:
    config = model_config(LLAMA if name == "llama" else config_of(name))
    return build(config, RandomWeights(0), torch.bfloat16, DEVICE, 256, lambda _: None, compiled=False)


def step_of(name: str, ring: int = 4) -> Callable[[], torch.Tensor]:
    """The step that a graph is captured over."""
    model = model_of(name)
    pools = Pools(model.groups, 10, 5 if model.groups.state else 0, DEVICE, ring)
    step = StaticStep(model.groups, SIZE, 4096, ring, DEVICE)  # so far that keys are split
    return lambda: model.logits(model.forward(step.batch, pools))


def main() -> None:
    launched = note_launches()
    setattr(static, "_Twin", Twin)  # noqa: B010
    setattr(static, "ChunkPlan", Plans)  # noqa: B010
    for name in sys.argv[1:]:
        launched.clear()
        watch = Watch()
        error = ""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Indexing():
            forward = step_of(name.removesuffix("+waits"))
            try:
                with watch:
                    logits = forward()
                    if name.endswith("+waits"):
                        logits.max().item()
                assert logits.device == DEVICE
                assert len(logits) == SIZE
            except NotCapturable:
                error = traceback.format_exc()
        line = {"name": name, "launches": launched, "operations": watch.operations, "error": error}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
