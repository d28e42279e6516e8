"""Fail-points of a worker, in place only where the environment allows faults (see runtime/faults.py).

engine.step=delay:0.1      every step takes so much longer; fail: the step fails
pull.landed=corrupt        a byte of what a pull brought is flipped in this worker's memory, before it is verified
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from engine.plan import StepPlan, StepResult
from engine.runner_api import ModelSpec, Runner
from kvtransfer.checksum import wsum64
from kvtransfer.types import Component, Region
from runtime import faults


@dataclass(frozen=True, slots=True)
class FaultyRunner:
    """A runner whose steps can be made slow or made to fail."""

    runner: Runner

    def spec(self) -> ModelSpec:
        return self.runner.spec()

    def allocate(self, num_pages: int, num_slots: int) -> None:
        self.runner.allocate(num_pages, num_slots)

    def regions(self) -> tuple[Region, ...]:
        return self.runner.regions()

    def run(self, plan: StepPlan) -> StepResult:
        faults.strike("engine.step")
        return self.runner.run(plan)

    def close(self) -> None:
        self.runner.close()


def faulty_checksum(region: Region, component: Component, items: tuple[int, ...], valid: tuple[int, ...]) -> list[int]:
    """The checksum of memory that may have been damaged just before."""
    fault = faults.on("pull.landed")
    if fault is not None and fault.action == "corrupt" and items:
        at = region.base + items[-1] * region.stride + int(fault.argument or 0) % region.stride
        ctypes.c_uint8.from_address(at).value ^= 0x40
    return wsum64(region, component, items, valid)
