"""Arrival times of jobs: steady, all at once, in bursts. Ascending, in seconds from the start."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from random import Random


def all_at_once(count: int) -> Iterator[float]:
    """A batch: every job at time 0."""
    return iter([0.0] * count)


def poisson(count: int, per_second: float, rng: Random) -> Iterator[float]:
    """Independent arrivals at a steady rate."""
    return accumulate(rng.expovariate(per_second) for _ in range(count))


def bursts(count: int, size: int, gap_seconds: float) -> Iterator[float]:
    """Batches of `size` jobs, one every `gap_seconds`."""
    return (number // size * gap_seconds for number in range(count))
