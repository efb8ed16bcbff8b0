"""How long a plan takes: pure arithmetic over bytes and speeds. Torch-free.

Knows nothing of devices; speeds are measured or learnt elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.plan.residency import ResidencyPlan


@dataclass(frozen=True, slots=True)
class PlanSeconds:
    """What a plan is expected to take.

    load_seconds          before the run
    run_seconds           the run itself, weights that stream included
    resident_run_seconds  the run with every weight resident
    """

    load_seconds: float
    run_seconds: float
    resident_run_seconds: float

    @property
    def slowdown(self) -> float:
        """The run as a multiple of the resident one; 1 when that takes no time."""
        return self.run_seconds / self.resident_run_seconds if self.resident_run_seconds > 0 else 1.0


def expected_seconds(
    plan: ResidencyPlan, resident_run_seconds: float, link_bytes_per_second: float, overlaps: bool
) -> PlanSeconds:
    """What `plan` takes over a link of this speed; copies are hidden behind computing where the device `overlaps`."""
    streaming_seconds = plan.streamed_bytes / link_bytes_per_second
    run_seconds = max(resident_run_seconds, streaming_seconds) if overlaps else resident_run_seconds + streaming_seconds
    return PlanSeconds(plan.upload_bytes / link_bytes_per_second, run_seconds, resident_run_seconds)
