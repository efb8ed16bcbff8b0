"""Several policies on the same work: which figures are compared, which way is better, and who is best.

Knows names of policies and their figures; not how the figures came about, nor how they are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from modelpool.scheduler.simulator.metrics import Figures

#: values that differ by less than this part are equally good
SAME = 1e-3


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure that policies are compared by."""

    name: str
    of: Callable[[Figures], float]
    more_is_better: bool = False
    #: the figure decides which policy to choose; others say why it is so
    is_headline: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over several seeds."""

    median: float
    least: float
    most: float


MEASURES = (
    Measure("makespan", lambda f: f.makespan_seconds, is_headline=True),
    Measure("jobs/min", lambda f: f.jobs_per_minute, more_is_better=True, is_headline=True),
    Measure("p50", lambda f: f.latency.p50_seconds),
    Measure("p99", lambda f: f.latency.p99_seconds, is_headline=True),
    Measure("found", lambda f: f.resident_share, more_is_better=True),
    Measure("LoRAs/job", lambda f: f.lora_loads_per_job),
    Measure("moved", lambda f: f.uploaded_bytes + f.streamed_bytes),
    Measure("from disk", lambda f: f.storage_bytes),
    Measure("loading", lambda f: f.loading_seconds, is_headline=True),
    Measure("even", lambda f: f.fairness, more_is_better=True),
)


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most; there must be one."""
    return Spread(statistics.median(values), min(values), max(values))


def spreads(measure: Measure, by_policy: Mapping[str, Sequence[Figures]]) -> dict[str, Spread]:
    """The measure of each policy over its seeds."""
    return {name: spread([measure.of(one) for one in seeds]) for name, seeds in by_policy.items()}


def best(measure: Measure, found: Mapping[str, Spread]) -> frozenset[str]:
    """The policies with the best median; several when they are as good. None when all are: there is nothing to tell."""
    if not found:
        return frozenset()
    medians = {name: one.median for name, one in found.items()}
    leading = (max if measure.more_is_better else min)(medians.values())
    names = frozenset(name for name, value in medians.items() if abs(value - leading) <= SAME * abs(leading))
    return frozenset() if len(names) == len(medians) else names


def ratio(value: float, ours: float) -> float | None:
    """`value` as a multiple of ours; None where ours is nothing."""
    return value / ours if ours else None
