"""`PinnedLoads`: keeps pinned sets of components resident: loads them on idle workers that lack them.

Rules
1. A set counts as resident on a worker that stays and has all of it in full, idle or busy. A worker that is loading it
   counts too. While there are fewer than `replicas` of them, idle workers are sent a load.
2. A load is for idle workers without a task: a run that starts there ends it. What had arrived stays.
3. Of the workers that can hold the whole set, the one with the fewest bytes of other pinned sets is chosen, so that
   sets spread; then the one that loads it soonest, by the costs of all tiers; then by name.
4. Pinned components of which there are no more than required are not evicted for another set. Others are, but only
   after the worker was idle for `SETTLED_SECONDS`: a task may come for them.
5. A load that failed, or that found less memory than assumed, is not repeated there within `RETRY_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf

from modelpool.pool.values.specs.spec import ComponentKey, ComponentUse, Stage, TaskId, TaskSpec, WorkerId
from modelpool.pool.weights.plan.preload_plan import RunningLease
from modelpool.pool.weights.plan.preload_plan import plan_preload as plan_preload_moves
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.costs.predict import predict
from modelpool.scheduler.model.cost_classes import CostClass, new_cost_class
from modelpool.scheduler.model.messages import Command, LoadWeights, LoadWhy, WeightsLoaded
from modelpool.scheduler.model.run_kinds import RunKind
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import PendingLoad, Worker, WorkerTable

#: idle time of a worker before weights are evicted there for a pinned set. An assumption: longer than the gaps of a
#: batch, shorter than a user waits for a pinned model
SETTLED_SECONDS = 5.0
#: time before a failed load is tried again on the same worker. An assumption
RETRY_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class PinnedSet:
    """Components that must be resident together on `replicas` workers."""

    components: tuple[ComponentKey, ...]
    replicas: int
    #: of a run that uses them and computes nothing: for estimates
    cost_class: CostClass
    #: workers on which a load failed, and when it may be tried again
    refused_until: dict[WorkerId, float] = field(default_factory=dict)


class PinnedLoads:
    """The pinned sets, and the loads that keep them resident. Appends its commands to `out`."""

    def __init__(self, costs: Costs, worker_table: WorkerTable, story: Story, out: list[Command]) -> None:
        self._costs = costs
        self._worker_table = worker_table
        self._story = story
        self._out = out
        #: by components
        self.sets: dict[tuple[ComponentKey, ...], PinnedSet] = {}
        #: component -> workers that must hold it, over all sets
        self.replicas: dict[ComponentKey, int] = {}

    def pin(self, components: tuple[ComponentKey, ...], replicas: int, file_names: tuple[str, ...] = ()) -> None:
        """Keep this set resident on so many workers; 0 withdraws it. `file_names` as in `TaskSpec`."""
        known = self.sets.pop(components, None)
        if replicas > 0 and components:
            if known is None or known.cost_class.pattern.file_names != file_names:
                known = PinnedSet(components, replicas, _cost_class(components, file_names))
            known.replicas = replicas
            self.sets[components] = known
        self.replicas.clear()
        for pinned in self.sets.values():
            for key in pinned.components:
                self.replicas[key] = max(self.replicas.get(key, 0), pinned.replicas)

    def sizes_changed(self) -> None:
        """Forget estimates: a component has another size."""
        for pinned in self.sets.values():
            pinned.cost_class.forget_sizes()

    def plan(self, at: float) -> float:
        """Send the loads that are missing; return when to look again, unless something happens before."""
        next_at = inf
        for pinned in self.sets.values():
            next_at = min(next_at, self._plan_set(pinned, at))
        return next_at

    def ended(self, worker: Worker, event: WeightsLoaded, at: float) -> None:
        """A load ended on `worker`, or it took more memory. Its residency is believed if no run has started since."""
        pending, worker.loading = worker.loading, None
        if pending is None:
            if worker.is_idle:
                self._worker_table.assume(worker, event.residency)
            return
        if not worker.is_idle or worker.totals.runs != pending.runs:
            return  # a run ended it
        self._worker_table.assume(worker, event.residency)
        pinned = self.sets.get(pending.components)
        if pinned is not None and (event.error is not None or not self._is_complete(pinned, worker)):
            pinned.refused_until[worker.worker_id] = at + RETRY_SECONDS
        if event.error is not None:
            self._story.note(worker, f"a pinned load failed: {event.error.message}")

    def holders(self, pinned: PinnedSet) -> list[Worker]:
        """The workers that stay and have the whole set."""
        found = self._worker_table.worker_index.holders.get(pinned.components[0], {})
        return [worker for worker in found if _stays(worker) and self._is_complete(pinned, worker)]

    def loading(self, pinned: PinnedSet) -> list[Worker]:
        """The workers that load the set now."""
        return [
            worker
            for worker in self._worker_table.workers.values()
            if worker.is_idle and worker.loading is not None and worker.loading.components == pinned.components
        ]

    def obstacle(self, pinned: PinnedSet, at: float) -> str:
        """Why the set is on fewer workers than required, and not being loaded; "" if it is neither."""
        if len(self.holders(pinned)) + len(self.loading(pinned)) >= pinned.replicas:
            return ""
        if not self._is_known(pinned):
            return "the sizes of its files are not known"
        staying = [worker for worker in self._worker_table.workers.values() if worker.live and _stays(worker)]
        if not staying:
            return "no worker is up"
        lacking = [worker for worker in staying if not self._is_complete(pinned, worker)]
        if not lacking:
            return "all workers that stay have it"
        weight_bytes = sum(self._costs.components[key].weight_bytes for key in pinned.components)
        if all((worker.capacity_bytes or 0) < weight_bytes for worker in lacking):
            return "it is larger than the memory of any other worker"
        if not any(worker.is_idle for worker in lacking):
            return "no other worker is idle"
        if any(until > at for until in pinned.refused_until.values()):
            return "loading it failed, and is tried again"
        if any(self._begins_at(pinned, worker, at) < inf for worker in lacking if worker.is_idle):
            return "idle workers hold other weights, which may be needed soon"
        return "no other idle worker has room next to pinned weights, or its machine lacks a file"

    def _plan_set(self, pinned: PinnedSet, at: float) -> float:
        missing = pinned.replicas - len(self.holders(pinned))
        if missing <= 0 or not self._is_known(pinned):
            return inf
        missing -= len(self.loading(pinned))
        pinned.refused_until = {name: until for name, until in pinned.refused_until.items() if until > at}
        next_at = min(pinned.refused_until.values(), default=inf)
        found = [(self._begins_at(pinned, worker, at), worker) for worker in self._idle_without(pinned)]
        now = [worker for begins_at, worker in found if begins_at <= at]
        for worker in sorted(now, key=partial(self._rank, pinned))[: max(0, missing)]:
            self._send(pinned, worker)
        return min(next_at, min((begins_at for begins_at, _ in found if begins_at > at), default=inf))

    def candidates(self, pinned: PinnedSet, at: float) -> list[Worker]:
        """The idle workers that could load the set now."""
        if not self._is_known(pinned):
            return []
        return [w for w in self._idle_without(pinned) if self._begins_at(pinned, w, at) <= at]

    def _rank(self, pinned: PinnedSet, worker: Worker) -> tuple[int, float, WorkerId]:
        """The smallest is the best place for the set."""
        return self._pinned_bytes(pinned, worker), self._load_of(pinned, worker)[0], worker.worker_id

    def _idle_without(self, pinned: PinnedSet) -> Iterator[Worker]:
        for worker in self._worker_table.worker_index.idle_workers():
            if _stays(worker) and worker.loading is None and not self._is_complete(pinned, worker):
                yield worker

    def _begins_at(self, pinned: PinnedSet, worker: Worker, at: float) -> float:
        """When the set can be loaded on an idle worker; infinity if not as it is now."""
        if worker.worker_id in pinned.refused_until and at < pinned.refused_until[worker.worker_id]:
            return inf
        assert worker.residency is not None, f"{worker.name} is not up"
        node = self._costs.nodes.of(worker.spec)
        if node is not None and node.unavailable_of(pinned.cost_class.files, at) is not None:
            return inf
        if node is not None and node.differing_of(pinned.cost_class.files) is not None:
            return inf
        held = RunningLease(frozenset(self._kept(pinned, worker)), 0)
        moves = plan_preload_moves(worker.residency, held, pinned.cost_class.uses, self._costs.components, 0)
        after = {entry.component: entry.resident_bytes for entry in moves.after(worker.residency).entries}
        if any(after.get(key, 0) < self._costs.components[key].weight_bytes for key in pinned.components):
            return inf
        return worker.idle_since + SETTLED_SECONDS if moves.evict else at

    def _load_of(self, pinned: PinnedSet, worker: Worker) -> tuple[float, int]:
        """Seconds and bytes on the bus of the load there."""
        capacity_bytes = worker.capacity_bytes or 0
        entries = tuple([worker.entries.get(key) for key in pinned.components])
        load = predict(pinned.cost_class, entries, capacity_bytes, self._costs.components)
        return self._costs.seconds_of(load, worker), load.upload_bytes

    def _send(self, pinned: PinnedSet, worker: Worker) -> None:
        seconds, upload_bytes = self._load_of(pinned, worker)
        why = LoadWhy(pinned.replicas, len(self.holders(pinned)), upload_bytes, seconds)
        worker.loading = PendingLoad(pinned.components, worker.totals.runs)
        self._story.note(worker, why.words)
        kept = self._kept(pinned, worker)
        self._out.append(LoadWeights(worker.worker_id, worker.incarnation, pinned.components, kept, why))

    def _kept(self, pinned: PinnedSet, worker: Worker) -> tuple[ComponentKey, ...]:
        """Components that must not leave the worker for the set: no more workers than required have them."""
        holders = self._worker_table.worker_index.holders
        return tuple(
            key
            for key in worker.entries
            if key in self.replicas and key not in pinned.components and len(holders[key]) <= self.replicas[key]
        )

    def _pinned_bytes(self, pinned: PinnedSet, worker: Worker) -> int:
        """Bytes of other pinned sets there."""
        return sum(
            entry.resident_bytes
            for key, entry in worker.entries.items()
            if key in self.replicas and key not in pinned.components
        )

    def _is_known(self, pinned: PinnedSet) -> bool:
        return all(key in self._costs.components for key in pinned.components)

    def _is_complete(self, pinned: PinnedSet, worker: Worker) -> bool:
        components, entries = self._costs.components, worker.entries
        for key in pinned.components:
            entry, spec = entries.get(key), components.get(key)
            if entry is None or spec is None or entry.resident_bytes < spec.weight_bytes:
                return False
        return True


def _stays(worker: Worker) -> bool:
    return worker.takes_tasks and worker.drain_deadline is None


def _cost_class(components: tuple[ComponentKey, ...], file_names: tuple[str, ...]) -> CostClass:
    uses = tuple(ComponentUse(key, 0) for key in components)
    task = TaskSpec(TaskId("pinned"), Stage.SAMPLE, uses, 0, 0.0, file_names=file_names)
    return new_cost_class(task, RunKind(task.stage, components))
