"""Sticky routing by model id: the policy of Ray Serve for deployments with `@serve.multiplexed`.

After its documentation on model multiplexing and the behaviour of its request router. The rule, for each request:
1. of the replicas that have the model and fewer than `max_ongoing_requests` (default 5), the less busy of two drawn at
   random. A replica has a model from when it is asked to load it until three others have been used since (at most three
   models per replica, LRU);
2. if no replica has it, the same among those with the fewest models;
3. if all that have it are full, wait for one of them: a second (RAY_SERVE_MULTIPLEXED_MODEL_ID_MATCHING_TIMEOUT_S; it
   draws between one and two), then use those with the fewest models, and if these are full too, any with room;
4. if none has room, wait. A replica that has room again first gets the first request for a model that it has, then the
   first of all. For `@serve.multiplexed` the id names the base model only. Ray Serve LLM multiplexes adapters like
   this: there the id is the model with its LoRAs, and a replica has more of them (`with_loras`, `MOST_LORA_IDS`; its
   memory is bounded by bytes). To its advantage: replicas know at once which requests others got, nothing is lost to
   probing and back-off, and of replicas that have the model the least busy of all is taken, not of two.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from random import Random

from modelpool.benchmarks.lab.base import Pushing
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.jobs import PeerJob
from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.model.messages import ScheduleTick
from modelpool.scheduler.simulator.machines import SimulatedGpu

#: Ray Serve's defaults
MOST_MODELS = 3
MOST_ONGOING = 5
#: ids with LoRAs per replica. Ray Serve LLM leaves it to the user
MOST_LORA_IDS = 10
MATCHING_SECONDS = 1.0
#: a smaller difference is rounding
ROUNDING_SECONDS = 1e-9


def base_model(job: PeerJob) -> str:
    """The base model as routing id; LoRAs do not count."""
    return job.model


def with_loras(job: PeerJob) -> str:
    """The model with all LoRAs of the job as routing id."""
    loras = dict.fromkeys(key for task in job.job.tasks for use in task.uses for key in use.adapters)
    return "+".join([job.model, *loras])


class Sticky(Pushing):
    """Requests stay with the replicas that have their model, as far as these have room."""

    def __init__(
        self,
        gpus: Iterable[SimulatedGpu],
        rng: Random,
        most_ids: int = MOST_MODELS,
        id_of: Callable[[PeerJob], str] = base_model,
    ) -> None:
        super().__init__(gpus)
        self._rng = rng
        self._most_ids = most_ids
        self._id_of = id_of
        #: models of each replica, least recently used first
        self._models: dict[WorkerId, OrderedDict[str, None]] = {}
        #: requests that wait for room, in order: all, and those for each model
        self._pending: dict[int, PeerJob] = {}
        self._pending_of: dict[str, dict[int, PeerJob]] = {}
        #: until when each of them waits for a replica that has its model, soonest first
        self._matching: deque[tuple[float, PeerJob]] = deque()
        #: replicas that may have room again
        self._freed: dict[WorkerId, PeerWorker] = {}

    def arrived(self, job: PeerJob) -> None:
        """Route the request, or let it wait for room."""
        self._pending[job.number] = job
        self._pending_of.setdefault(self._id_of(job), {})[job.number] = job
        if not self._route(job, self.at + MATCHING_SECONDS):
            self._matching.append((self.at + MATCHING_SECONDS, job))
            self._out.append(ScheduleTick(MATCHING_SECONDS))

    def place(self, job: PeerJob, among: list[PeerWorker]) -> PeerWorker:
        """Of replicas with room those that have the model, else the less busy of two random ones of those with the
        fewest."""
        having = [worker for worker in among if self._id_of(job) in self._models_of(worker)]
        if having:
            return min(having, key=lambda worker: (worker.in_flight, worker.rank))
        fewest = min(len(self._models_of(worker)) for worker in among)
        candidates = [worker for worker in among if len(self._models_of(worker)) == fewest]
        two = self._rng.sample(candidates, min(2, len(candidates)))
        return min(two, key=lambda worker: worker.in_flight)

    def give(self, worker: PeerWorker, job: PeerJob) -> None:
        """Give the job to the worker, which has its model from now on, and evicts the least recently used id."""
        models = self._models_of(worker)
        models[self._id_of(job)] = None
        models.move_to_end(self._id_of(job))
        if len(models) > self._most_ids:
            models.popitem(last=False)
        super().give(worker, job)

    def withdrawn(self, job: PeerJob) -> None:
        """Remove from the router or the queue of a replica."""
        if job.number in self._pending:
            self._no_longer_pending(job)
        else:
            super().withdrawn(job)

    def freed(self, worker: PeerWorker) -> None:
        """Requests that wait in the router may have room there."""
        super().freed(worker)
        self._freed[worker.worker_id] = worker

    def dispatch(self) -> None:
        """Route those that have waited long enough for their model, and those for which there is room now."""
        super().dispatch()
        while self._matching and self._matching[0][0] <= self.at + ROUNDING_SECONDS:
            _, job = self._matching.popleft()
            if job.number in self._pending:
                self._route(job, self.at)
        freed, self._freed = self._freed, {}
        for worker in freed.values():
            self._fill(worker)
        super().dispatch()

    def _models_of(self, worker: PeerWorker) -> OrderedDict[str, None]:
        return self._models.setdefault(worker.worker_id, OrderedDict())

    def _no_longer_pending(self, job: PeerJob) -> None:
        del self._pending[job.number]
        del self._pending_of[self._id_of(job)][job.number]

    def _fill(self, worker: PeerWorker) -> None:
        """First requests for models that the replica has, then any that may go there."""
        if not worker.given_up:
            while worker.in_flight < MOST_ONGOING:
                firsts = [
                    next(iter(self._pending_of.get(model, {}).values()), None) for model in self._models_of(worker)
                ]
                able = [job for job in firsts if job is not None and job.needed_bytes <= worker.gpu.capacity_bytes]
                if not able:
                    break
                job = min(able, key=lambda job: job.number)
                self._no_longer_pending(job)
                self.give(worker, job)
        for job in list(islice(self._pending.values(), MOST_ONGOING)):
            self._route(job, job.arrived_at + MATCHING_SECONDS)

    def _route(self, job: PeerJob, matching_until: float) -> bool:
        """Give the job away if it may go somewhere now; until `matching_until` only to a replica that has its model, if
        any has."""
        fitting = self.fitting(job)
        among = [worker for worker in fitting if worker.in_flight < MOST_ONGOING]
        if not among:
            return False
        having = [worker for worker in among if self._id_of(job) in self._models_of(worker)]
        is_early = self.at < matching_until - ROUNDING_SECONDS
        if not having and is_early and any(self._id_of(job) in self._models_of(worker) for worker in fitting):
            return False
        self._no_longer_pending(job)
        self.give(self.place(job, having or among), job)
        return True
