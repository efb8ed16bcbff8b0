"""Policies that ignore residency: random, round-robin, and least-loaded. The Random is passed in.

Their workers keep complete components in LRU order (`WholeComponents`), which is more than their sources promise.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from modelpool.benchmarks.lab.base import Pushing
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.jobs import PeerJob
from modelpool.scheduler.simulator.machines import SimulatedGpu


class ByChance(Pushing):
    """A random worker, all equally likely."""

    def __init__(self, gpus: Iterable[SimulatedGpu], rng: Random) -> None:
        super().__init__(gpus)
        self._rng = rng

    def place(self, job: PeerJob, among: list[PeerWorker]) -> PeerWorker:
        """Return one of them, all equally likely."""
        return self._rng.choice(among)


class RoundRobin(Pushing):
    """Workers in rotation, regardless of their load."""

    def __init__(self, gpus: Iterable[SimulatedGpu]) -> None:
        super().__init__(gpus)
        self._last_rank = -1

    def place(self, job: PeerJob, among: list[PeerWorker]) -> PeerWorker:
        chosen = min(among, key=lambda worker: (worker.rank <= self._last_rank, worker.rank))
        self._last_rank = chosen.rank
        return chosen


class LeastLoaded(Pushing):
    """The worker with the fewest jobs in flight, the first of equals.

    llm-d's rule for diffusion models: it has no signal of residency and uses requests in flight (its guide of August
    2026). Equals go by order, which keeps a lightly loaded pool on few workers, to its advantage.
    """

    def place(self, job: PeerJob, among: list[PeerWorker]) -> PeerWorker:
        return min(among, key=lambda worker: (worker.in_flight, worker.rank))
