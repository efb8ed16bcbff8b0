"""Expected time of a plan: pure arithmetic over bytes and speeds. Torch-free.

Speeds are measured or learned elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.weights.plan.eviction_plan import ResidencyPlan


@dataclass(frozen=True, slots=True)
class PlanSeconds:
    """Expected times of a plan.

    load_seconds          before the run
    run_seconds           the run, including streamed weights
    resident_run_seconds  the run with all weights resident
    """

    load_seconds: float
    run_seconds: float
    resident_run_seconds: float

    @property
    def slowdown(self) -> float:
        """Run time relative to the fully resident run; 1 if that takes no time."""
        return self.run_seconds / self.resident_run_seconds if self.resident_run_seconds > 0 else 1.0


def expected_seconds(
    plan: ResidencyPlan, resident_run_seconds: float, link_bytes_per_second: float, overlaps: bool
) -> PlanSeconds:
    """Return the times of `plan` over a link of this speed; copies overlap with compute if the device `overlaps`."""
    streaming_seconds = plan.streamed_bytes / link_bytes_per_second
    run_seconds = max(resident_run_seconds, streaming_seconds) if overlaps else resident_run_seconds + streaming_seconds
    return PlanSeconds(plan.upload_bytes / link_bytes_per_second, run_seconds, resident_run_seconds)
