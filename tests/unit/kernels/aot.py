"""Compile for a GPU that is not there: launches become compilations to sm_90a with exactly their specialisation
(types, strides divisible by 16, ones as constants), and nothing runs."""

from __future__ import annotations

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


def compile_launches() -> dict[str, dict[str, Any]]:
    """From here on every launch in this process compiles. Returns a dict that fills up: kernel name -> facts."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: dict[str, dict[str, Any]] = {}
    driver.set_active(_NoDevice())
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert len(kernel.asm["cubin"]) > 0
        assert ".target sm_90a" in kernel.asm["ptx"]
        compiled[self.fn.__name__] = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
        return kernel

    JITFunction.run = run
    return compiled
