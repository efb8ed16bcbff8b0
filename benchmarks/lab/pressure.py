"""Pressure: the policy by which SwarmUI distributes requests over its backends.

After its source (`BackendHandler`, commit 062407c). Each backend has one current model. A request goes to a free
backend whose current model is the requested one. For other waiting models, pressure is 10 x requests + seconds since
the first of them; a free backend loads the model with the highest pressure, if no backend is loading it already and it
has waited at least 1.5 s, or only one backend is free; of free backends the least recently used one. LoRAs do not
count. To its advantage: the memory of a backend keeps complete components while they fit (as in ComfyUI; SwarmUI does
not know), each backend keeps the last encoding (ComfyUI's cache of the last prompt), and nothing is lost to polling.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelpool.benchmarks.lab.base import Pulling
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.jobs import PeerJob
from modelpool.scheduler.model.messages import ScheduleTick
from modelpool.scheduler.simulator.machines import SimulatedGpu

LEAST_WAIT_SECONDS = 1.5
SECONDS_PER_REQUEST = 10.0
#: a smaller difference is rounding
ROUNDING_SECONDS = 1e-9


class Pressure(Pulling):
    """Current models first, then the highest pressure."""

    kept_encodes = 1
    encodes_per_worker = True

    def __init__(self, gpus: Iterable[SimulatedGpu]) -> None:
        super().__init__(gpus)
        #: waiting jobs of each model, in order, and since when there have been any
        self._wanted: dict[str, dict[int, PeerJob]] = {}
        self._first_at: dict[str, float] = {}

    def arrived(self, job: PeerJob) -> None:
        """One more request for its model. The first of them is checked again when it may be loaded."""
        super().arrived(job)
        if job.model not in self._wanted:
            self._wanted[job.model] = {}
            self._first_at[job.model] = self.at
            self._out.append(ScheduleTick(LEAST_WAIT_SECONDS))
        self._wanted[job.model][job.number] = job

    def withdrawn(self, job: PeerJob) -> None:
        """One request less. A model without requests has no pressure."""
        super().withdrawn(job)
        wanted = self._wanted.get(job.model, {})
        wanted.pop(job.number, None)
        if not wanted:
            self._wanted.pop(job.model, None)
            self._first_at.pop(job.model, None)

    def choose(self, idle: list[PeerWorker]) -> tuple[PeerWorker, PeerJob] | None:
        """A backend with the requested model, or else the model with the highest pressure."""
        matches = [(worker, job) for worker in idle if (job := self._first(worker.model, worker)) is not None]
        if matches:
            return min(matches, key=lambda match: (match[1].number, match[0].rank))
        loading = {
            worker.model
            for worker in self.fleet.workers.values()
            if worker.job is not None and self._is_loading(worker, worker.job)
        }
        free = [worker for worker in self.fleet.usable() if worker.job is None]
        least_seconds = LEAST_WAIT_SECONDS - ROUNDING_SECONDS if len(free) > 1 else 0.0
        ready = [
            model
            for model, first_at in self._first_at.items()
            if self.at - first_at >= least_seconds and model not in loading
        ]
        for model in sorted(ready, key=lambda model: (-self._pressure(model), next(iter(self._wanted[model])))):
            for worker in sorted(idle, key=lambda worker: (worker.idle_since, worker.rank)):
                job = self._first(model, worker)
                if job is not None:
                    return worker, job
        return None

    def _pressure(self, model: str) -> float:
        return SECONDS_PER_REQUEST * len(self._wanted[model]) + self.at - self._first_at[model]

    def _first(self, model: str, worker: PeerWorker) -> PeerJob | None:
        """The first waiting job of the model that the worker has memory for."""
        wanted = self._wanted.get(model, {}).values()
        return next((job for job in wanted if job.needed_bytes <= worker.gpu.capacity_bytes), None)

    def _is_loading(self, worker: PeerWorker, job: PeerJob) -> bool:
        """Its first task with this model still runs: nothing of the model was there when it began."""
        residency = worker.residency
        there = residency is not None and any(e.component.startswith(f"{worker.model}/") for e in residency.entries)
        return not there and not job.completed
