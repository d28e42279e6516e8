"""The engine's fail-point, in place only where the environment allows faults (see runtime/faults.py).

engine.step=delay:0.1      every step takes so much longer
engine.step=fail           the step fails
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import StepPlan, StepResult
from engine.runner_api import ModelSpec, Runner
from kvtransfer.types import Region
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
