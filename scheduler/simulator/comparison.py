"""Compares several policies on the same workload: the measures, their better direction, and the best policy.

Knows names of policies and their figures; neither simulation nor display.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from modelpool.scheduler.simulator.metrics import Figures

#: values with a smaller relative difference are equally good
SAME = 1e-3


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure that policies are compared by."""

    name: str
    of: Callable[[Figures], float]
    more_is_better: bool = False
    #: the figure decides which policy to choose; the others explain it
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
    """Return median, least and most; needs at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def spreads(measure: Measure, by_policy: Mapping[str, Sequence[Figures]]) -> dict[str, Spread]:
    """Return the measure of each policy over its seeds."""
    return {name: spread([measure.of(one) for one in seeds]) for name, seeds in by_policy.items()}


def best(measure: Measure, found: Mapping[str, Spread]) -> frozenset[str]:
    """Return the policies with the best median, several if equally good. None if all are equal."""
    if not found:
        return frozenset()
    medians = {name: one.median for name, one in found.items()}
    leading = (max if measure.more_is_better else min)(medians.values())
    names = frozenset(name for name, value in medians.items() if abs(value - leading) <= SAME * abs(leading))
    return frozenset() if len(names) == len(medians) else names


def ratio(value: float, ours: float) -> float | None:
    """`value` as a multiple of the default policy's value; None if that is 0."""
    return value / ours if ours else None
