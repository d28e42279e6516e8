"""Compile for a GPU that is not there: launches become compilations to sm_90a with exactly their specialisation
(types, strides divisible by 16, ones as constants), and nothing runs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

TARGET_ARCH = 90


class _NoDevice:
    """As much of triton's driver as choosing a compilation needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", TARGET_ARCH, 32)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Of a thread: bytes of stack (registers that did not fit), and registers."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    stack, registers = (max(map(int, re.findall(name + r":(\d+)", usage.stdout))) for name in ("STACK", "REG"))
    return stack, registers


def compile_launches() -> dict[str, dict[str, Any]]:
    """From here on every launch in this process compiles. Returns a dict that fills up: kernel name -> largest
    shared memory of a block and stack of a thread, in bytes, and most registers of a block."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: dict[str, dict[str, Any]] = {}
    usages: dict[str, tuple[int, int]] = {}  # of kernels by their hash: to look takes longer than a cached compilation
    driver.set_active(_NoDevice())
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert len(kernel.asm["cubin"]) > 0
        assert ".target sm_90a" in kernel.asm["ptx"]
        name = f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__.strip('_')}"
        facts = compiled.setdefault(name, {"shared": 0, "stack": 0, "registers": 0})
        if kernel.hash not in usages:
            usages[kernel.hash] = _usage(kernel.asm["cubin"])
        stack, registers = usages[kernel.hash]
        facts["shared"] = max(facts["shared"], kernel.metadata.shared)
        facts["stack"] = max(facts["stack"], stack)
        facts["registers"] = max(facts["registers"], registers * 32 * kernel.metadata.num_warps)
        return kernel

    JITFunction.run = run
    return compiled
