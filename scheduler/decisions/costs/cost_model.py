"""Cost of a task on a worker in seconds and bytes: predicted with `pool.weights.plan.eviction_plan.plan`, learned from
reports.

Completion time = wait + extra seconds + resident seconds. Extra are upload, patch switches, streaming and the slowdown
of a divided run; resident is the prior estimate of the run times a learned ratio (`scheduler.model.run_kinds`).
Weights come from host memory over the link, or from disks (`scheduler.model.nodes`); both overlap, so the slower one
counts. Files of sources are fetched before that, from another machine or the source (`scheduler.model.fetched_files`).
LoRAs are read when a patch set is applied. The estimate of a cost class on a worker is cached until the worker
changes (`Worker.version`) or, if files have to be read, its machine (`Node.version`). A worker with little memory
divides a task in the mode that the worker itself will choose (`pool.values.specs.execution_modes`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    NodeId,
    PastRun,
    RunCost,
    TaskReport,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency, plan
from modelpool.pool.weights.plan.peer_shares import exchange_seconds
from modelpool.scheduler.decisions.costs.demand_rates import DemandRates
from modelpool.scheduler.decisions.costs.predict import predict
from modelpool.scheduler.model.cost_classes import (
    CachedEstimate,
    CostClass,
    CostClassKey,
    LoadEstimate,
    cost_class_key,
    new_cost_class,
)
from modelpool.scheduler.model.estimates import Estimate
from modelpool.scheduler.model.fetched_files import FetchedFiles
from modelpool.scheduler.model.gang_times import GangTimes, prior_seconds, speedup
from modelpool.scheduler.model.nodes import ExpectedReads, Node, Nodes, Reads
from modelpool.scheduler.model.pool_memory import RememberedPatches
from modelpool.scheduler.model.run_kinds import RunKinds, gpu_name, size_class
from modelpool.scheduler.model.workers import Worker

#: weight of the newest measurement in an exponential average. An assumption: about the last five count
NEWEST = 0.3
#: one load moves that average no further than a load this many times as fast or as slow as the average
MOST_STEP = 2.0
#: smaller loads measure latency rather than the link
LEAST_LOAD_BYTES = 1 << 20
#: a smaller relative change is noise, and not worth computing every prediction again
LEAST_DIFFERENCE = 0.02
#: a run that streams is assumed to compute for at least this part of its time: copies and kernels overlap
LEAST_COMPUTING = 0.1
#: a load with more than this part of its bytes from disks measures little of the link
MOST_FROM_STORAGE = 0.1
#: a load this many times as long as its link needs was limited by the disk
HELD_UP = 1.2
#: measured patch switches of one kind of GPU before they replace the configured value
LEAST_SWITCHES = 3
#: patching is never free, to prefer equal patches among equal uploads
LEAST_PATCH_SECONDS = 0.001
#: a smaller relative change of the patch seconds is not worth computing every prediction again
LEAST_PATCH_DIFFERENCE = 0.1
#: a run on a machine that is drained must be expected to take at most the time left divided by this, after
#: DRAIN_SECONDS for sending its result. Assumptions
DRAIN_MARGIN = 1.2
DRAIN_SECONDS = 0.5
#: cost classes without tasks that are remembered
SPARE_COST_CLASSES = 256
#: workers for which such a cost class keeps its estimates
MOST_SPARE_ESTIMATES = 64


def times_prior(
    task: TaskSpec, cost: RunCost, link_bytes_per_second: float, exchange_seconds: float = 0.0
) -> float | None:
    """Run time as a multiple of its prior estimate, for an undivided run of all steps without streaming over this link,
    without the exchange of weights with others that share it, and the wait for these. None if one of the two is
    unknown."""
    run_seconds = cost.run_seconds - cost.meeting_seconds
    if task.run_seconds <= 0 or run_seconds <= 0:
        return None
    streaming_seconds = cost.streamed_bytes / link_bytes_per_second + exchange_seconds
    computing_seconds = max(run_seconds - streaming_seconds, LEAST_COMPUTING * run_seconds)
    slowdown = 1.0 if cost.division is None else cost.division.slowdown
    return computing_seconds / (task.run_seconds * cost.remaining * slowdown)


class Costs:
    """Known sizes and learned seconds."""

    def __init__(self, patch_switch_seconds: float) -> None:
        self._cost_classes: dict[CostClassKey, CostClass] = {}
        #: cost classes without tasks, the first to be forgotten first
        self._spare: OrderedDict[CostClass, None] = OrderedDict()
        self.components: dict[ComponentKey, ComponentSpec] = {}
        #: the current time
        self.at = 0.0
        #: LoRAs that were used before their sizes were known
        self._unsized: set[ComponentKey] = set()
        self.nodes = Nodes()
        #: files of sources on the machines' disks
        self.fetched = FetchedFiles()
        #: by worker, what its current run fetches
        self._brought: dict[WorkerId, Reads] = {}
        self.run_kinds = RunKinds()
        self.gang_times = GangTimes()
        #: how often each component is needed
        self.rates = DemandRates()
        #: by worker, the expected reads of its current run
        self._expected: dict[WorkerId, tuple[Node, ExpectedReads]] = {}
        #: workers with a link that was measured without patches
        self._measured_links: set[WorkerId] = set()
        self._prior_patch_seconds = patch_switch_seconds
        #: by kind of GPU: measured seconds of switches, and the value in use
        self._patch_estimates: dict[str, Estimate] = {}
        self._patch_seconds: dict[str, float] = {}

    def know(self, components: tuple[ComponentSpec, ...]) -> None:
        """Take in sizes. New sizes of a known component apply from now on."""
        for spec in components:
            if self.components.get(spec.key, spec) != spec or spec.key in self._unsized:
                self._unsized.discard(spec.key)
                for cost_class in self._cost_classes.values():
                    cost_class.forget_sizes()
            self.components[spec.key] = spec
        self.fetched.know(components)

    def prune(self, held: Iterable[ComponentKey]) -> None:
        """Forget components that no live task uses, except those in `held`."""
        kept = set(held)
        for cost_class in self._cost_classes.values():
            if cost_class.tasks:
                kept.update(use.component for use in cost_class.uses)
                kept.update(cost_class.adapters)
            else:
                cost_class.forget_sizes()  # its components may come back with other sizes
        self.components = {key: spec for key, spec in self.components.items() if key in kept}
        self.fetched.prune(self.components)

    def acquire(self, spec: TaskSpec) -> CostClass:
        """Return the cost class of a task; to be released with `release`."""
        key = cost_class_key(spec)
        cost_class = self._cost_classes.get(key)
        if cost_class is None:
            kind = self.run_kinds.kind(spec.stage, tuple(use.component for use in spec.uses))
            cost_class = self._cost_classes[key] = new_cost_class(spec, kind)
            self._unsized.update(cost_class.adapters.difference(self.components))
        elif cost_class.tasks == 0:
            del self._spare[cost_class]
        cost_class.tasks += 1
        cost_class.prior_seconds += spec.run_seconds
        cost_class.arrived_seconds += spec.run_seconds
        self.rates.arrived(cost_class.components, self.at)
        return cost_class

    def release(self, cost_class: CostClass) -> None:
        """A task of the class is forgotten. The latest classes without tasks are kept for later tasks."""
        cost_class.tasks -= 1
        self.rates.ended(cost_class.components, self.at)
        if cost_class.tasks == 0:
            cost_class.prior_seconds = 0.0  # without the rounding errors of the sum
            self._spare[cost_class] = None
            if len(cost_class.cached) > MOST_SPARE_ESTIMATES:
                cost_class.cached.clear()
            if len(self._spare) > SPARE_COST_CLASSES:
                oldest, _ = self._spare.popitem(last=False)
                del self._cost_classes[cost_class_key(oldest.pattern)]

    def cost_classes(self) -> Iterable[CostClass]:
        """All cost classes, including some without tasks."""
        return self._cost_classes.values()

    def extra_seconds(self, task: TaskSpec, cost_class: CostClass, worker: Worker) -> float | None:
        """Seconds in addition to waiting and the undivided run with all weights resident; None if the worker cannot
        run it: it does not fit there, a file is unavailable or another one on its machine, or it would end after the
        deadline of a machine that is drained."""
        cached = cost_class.cached.get(worker)
        # `CachedEstimate.holds`, inlined: this is called more often than anything else
        if (
            cached is None
            or cached.version != worker.version
            or (cached.files is not None and cached.files.version != cached.files_version)
        ):
            cached = self._estimate(cost_class, worker, cached)
            if cached is None:
                return None
        seconds = cached.seconds
        if task.divisions:
            slowdown = cost_class.mode(cached.capacity_bytes).slowdown
            seconds += (slowdown - 1.0) * self.resident_seconds(task, cost_class, worker)
        if worker.drain_deadline is not None and not self._ends_in_time(task, cost_class, worker, seconds):
            return None
        return seconds

    def _ends_in_time(self, task: TaskSpec, cost_class: CostClass, worker: Worker, extra_seconds: float) -> bool:
        """Whether a run that starts now should end before the machine of `worker` does. A run of unknown length
        should not."""
        deadline = worker.drain_deadline
        if deadline is None:
            return True
        if cost_class.kind.ratio is None:
            return False
        run_seconds = extra_seconds + self.resident_seconds(task, cost_class, worker)
        return self.at + DRAIN_MARGIN * run_seconds + DRAIN_SECONDS <= deadline

    def _estimate(self, cost_class: CostClass, worker: Worker, cached: CachedEstimate | None) -> CachedEstimate | None:
        """Compute the load estimate of a run there now, and its seconds; `cached` is the worker's previous one. None if
        it does not fit there, or reads a file that is unavailable there."""
        capacity_bytes, link_bytes_per_second = worker.capacity_bytes, worker.link_bytes_per_second
        assert capacity_bytes is not None, f"{worker.worker_id} never was up"
        if cost_class.needed_bytes > capacity_bytes:
            return None
        spec, load, entries = worker.spec, None, worker.entries
        node = self.nodes.of(spec) if spec is not None and spec.node else None
        if node is not None and node.differing and node.differing_of(cost_class.files) is not None:
            cost_class.cached.pop(worker, None)
            return None
        if node is not None and node.unavailable and node.refused_of(cost_class.files, self.at) is not None:
            cost_class.cached.pop(worker, None)
            return None
        if (
            cached is not None
            and cached.capacity_bytes == capacity_bytes
            and cached.matches_entries(cost_class, entries)
        ):
            if (
                cached.link_bytes_per_second == link_bytes_per_second
                and cached.node is node
                and (cached.files is None or cached.files.version == cached.files_version)
            ):
                cached.version = worker.version  # the change does not concern this cost class
                return cached
            load, used_entries = cached.load, cached.used_entries
        else:
            used_entries = tuple([entries.get(key) for key in cost_class.components])
            load = predict(cost_class, used_entries, capacity_bytes, self.components)
        if node is not None and node.unavailable:
            unavailable = node.unavailable_of(cost_class.files_of(load.reads), self.at)
            if unavailable is not None:
                cost_class.cached.pop(worker, None)
                return None
        cached = cost_class.cached[worker] = CachedEstimate(
            worker.version,
            link_bytes_per_second,
            capacity_bytes,
            used_entries,
            load,
            self._loading_seconds(load, worker, node),
            node,
            node if load.reads else None,
            0 if node is None else node.version,
        )
        return cached

    def seconds_of(self, load: LoadEstimate, worker: Worker) -> float:
        """Seconds to load missing weights, to patch and to stream."""
        return self._loading_seconds(load, worker, self.nodes.of(worker.spec))

    def _loading_seconds(self, load: LoadEstimate, worker: Worker, node: Node | None) -> float:
        switches = load.switches
        moving_seconds = (load.upload_bytes + load.streamed_bytes) / worker.link_bytes_per_second
        if node is not None and load.reads:
            reading_seconds = node.missing_bytes(load.reads) / node.storage_bytes_per_second
            if reading_seconds > moving_seconds:
                moving_seconds = reading_seconds
            if self.fetched.sets and worker.spec is not None:
                moving_seconds += self.fetched.seconds(worker.spec, load.reads)
        return moving_seconds + switches * self.patch_seconds(worker) if switches else moving_seconds

    def patch_seconds(self, worker: Worker) -> float:
        """Seconds, besides moving bytes, for giving a resident component other patches on `worker`."""
        return self._patch_seconds.get(gpu_name(worker.spec), self._prior_patch_seconds)

    def load_estimate(self, cost_class: CostClass, worker: Worker) -> LoadEstimate | None:
        """The transfers on a live worker once its current run is over; None if it does not fit there."""
        cached = cost_class.cached.get(worker)
        if cached is None or cached.version != worker.version:
            cached = self._estimate(cost_class, worker, cached)
        return None if cached is None else cached.load

    def makes_room(self, cost_class: CostClass, worker: Worker) -> bool:
        """Whether weights of other components would have to be evicted from a live worker that it fits on."""
        load = self.load_estimate(cost_class, worker)
        return load is not None and worker.used_bytes - load.present_bytes > load.room_bytes

    def residency_after(self, cost_class: CostClass, worker: Worker, hints: EvictionHints = NO_HINTS) -> Residency:
        """The residency that `pool.weights.plan.eviction_plan.plan` leaves on a live worker; computed directly if
        nothing is evicted."""
        now, load = worker.residency, self.load_estimate(cost_class, worker)
        assert now is not None, f"{worker.worker_id} is not up"
        assert load is not None, f"the task does not fit on {worker.worker_id}"
        if worker.used_bytes - load.present_bytes > load.room_bytes:
            return plan(now, cost_class.uses, self.components, load.mode.activation_bytes, hints=hints).after
        used = cost_class.components
        others = [entry for entry in now.entries if entry.component not in used]
        return Residency(now.capacity_bytes, (*others, *load.arrived))

    def resident_seconds(self, task: TaskSpec, cost_class: CostClass, worker: Worker) -> float:
        """Seconds of the run on `worker` with all weights resident."""
        spec = worker.spec
        ratio = cost_class.ratios.get("" if spec is None else spec.device_name)
        if ratio is None:
            ratio = self.run_kinds.ratio(cost_class.kind, gpu_name(spec), cost_class.size)
        return task.run_seconds * ratio

    def gang_seconds(
        self, task: TaskSpec, cost_class: CostClass, worker: Worker, degree: int, remaining: float
    ) -> float:
        """Seconds of the run on `degree` GPUs like `worker`'s with all weights resident; it computes the fraction
        `remaining` of the steps."""
        if degree > 1:
            measured = self.gang_times.ratio(cost_class.kind, gpu_name(worker.spec), cost_class.size, degree)
            if measured is not None:
                return task.run_seconds * measured
        return prior_seconds(task, self.resident_seconds(task, cost_class, worker), degree, remaining)

    def knows_length(self, cost_class: CostClass, worker: Worker, degree: int) -> bool:
        """Whether runs of this class were measured: on one GPU, or on so many."""
        if cost_class.kind.ratio is not None:
            return True
        gpu = gpu_name(worker.spec)
        return self.gang_times.ratio(cost_class.kind, gpu, cost_class.size, degree) is not None

    def is_fastest(self, cost_class: CostClass, worker: Worker, devices: Iterable[str]) -> bool:
        """Return whether runs of this class take no longer on `worker` than on any of these devices."""
        own = self._ratio_on(cost_class, gpu_name(worker.spec))
        return min([self._ratio_on(cost_class, device) for device in devices], default=own) >= own

    def _ratio_on(self, cost_class: CostClass, device: str) -> float:
        ratio = cost_class.ratios.get(device)
        return self.run_kinds.ratio(cost_class.kind, device, cost_class.size) if ratio is None else ratio

    def batch_seconds(self, task: TaskSpec, cost_class: CostClass, worker: Worker, members: int) -> float:
        """Seconds of one run on `worker` of this many tasks like this one, with all weights resident."""
        if task.batch_size > 1:
            return self.resident_seconds(task, cost_class, worker)
        share = self.run_kinds.batch_share(cost_class.kind, gpu_name(worker.spec), members, cost_class.size)
        return members * share * self.resident_seconds(task, cost_class, worker)

    def batch_runs(self, cost_class: CostClass, worker: Worker, members: int) -> int:
        """Number of measured runs of this many such tasks on GPUs like the one of `worker`."""
        return self.run_kinds.batch_runs(cost_class.kind, gpu_name(worker.spec), members, cost_class.size)

    def run_started(self, cost_class: CostClass, worker: Worker) -> None:
        """A run is placed on `worker`: its files will be in host memory.
        Call once per run, before the residency after it is assumed."""
        self._expected.pop(worker.worker_id, None)
        self._brought.pop(worker.worker_id, None)
        node = self.nodes.of(worker.spec)
        load = None if node is None else self.load_estimate(cost_class, worker)
        if node is not None and load is not None and load.reads:
            self._expected[worker.worker_id] = (node, node.expect(load.reads, self.at))
            if self.fetched.sets and worker.spec is not None:
                self._brought[worker.worker_id] = self.fetched.expect(worker.spec, load.reads)
                if self._brought[worker.worker_id]:
                    self._fetches_changed()

    def run_failed(self, worker: Worker) -> None:
        """The current run of `worker` failed: its files may not have arrived on the machine's disk."""
        brought = self._brought.pop(worker.worker_id, ())
        if brought and worker.spec is not None and self.fetched.forget(worker.spec, brought):
            self._fetches_changed()

    def worker_up(self, spec: WorkerSpec) -> None:
        """Take in the files on the disk of a machine where a worker started."""
        self.fetched.disk_of(spec)
        self._fetches_changed()

    def keep_disks(self, nodes: Container[NodeId]) -> None:
        """Forget the disks of all other machines: nothing can be fetched from them."""
        gone = [node for node in self.fetched.disks if node not in nodes]
        if sum(self.fetched.node_gone(node) for node in gone):
            self._fetches_changed()

    def _fetches_changed(self) -> None:
        """Files came to, or left, a disk: other machines can get them from there, or not any more."""
        for node in self.nodes.nodes.values():
            node.version += 1

    def reads(self, worker: Worker) -> Reads:
        """The expected reads of the current run of `worker`."""
        cached = self._expected.get(worker.worker_id)
        return () if cached is None else cached[1].reads

    def learn(self, task: TaskSpec, cost_class: CostClass, worker: Worker, report: TaskReport) -> None:
        """Learn from a run that succeeded."""
        cost = report.cost
        self._learn_storage(worker, cost)
        self._learn_moving(worker, cost)
        measured = times_prior(task, cost, worker.link_bytes_per_second)
        if measured is not None:
            self.run_kinds.learn(cost_class.kind, gpu_name(worker.spec), cost_class.size, measured, cost.batched)

    def learn_share(self, task: TaskSpec | None, worker: Worker, report: TaskReport, degree: int) -> None:
        """Learn from the part of `worker` in a run on `degree` GPUs that succeeded; of `task`
        (None for all but the first worker) how long it took."""
        cost, node = report.cost, self.nodes.of(worker.spec)
        self._learn_storage(worker, cost)
        self._learn_moving(worker, cost)
        link = cost.gang_link_bytes_per_second
        if link > 0.0 and node is not None:
            node.gang_links[degree] = link
        exchanging = exchange_seconds(cost.exchanged_bytes, degree, link)
        measured = None if task is None else times_prior(task, cost, worker.link_bytes_per_second, exchanging)
        if task is not None and measured is not None:
            kind = self.run_kinds.kind(task.stage, tuple([use.component for use in task.uses]))
            gpu, size = gpu_name(worker.spec), size_class(task)
            self.gang_times.learn(kind, gpu, size, degree, measured)
            if kind.ratio is None:  # until one has run alone, published figures tell how long that takes
                self.run_kinds.learn(kind, gpu, size, measured * speedup(task, degree, cost.remaining))

    def learn_past(self, past: PastRun, worker: WorkerSpec) -> None:
        """Learn how long a run took that a worker has done for an earlier controller."""
        task = past.task
        measured = times_prior(task, past.cost, max(worker.link_bytes_per_second, 1.0))
        if measured is not None:
            kind = self.run_kinds.kind(task.stage, tuple(use.component for use in task.uses))
            self.run_kinds.learn(kind, gpu_name(worker), size_class(task), measured, past.cost.batched)

    def _learn_storage(self, worker: Worker, cost: RunCost) -> None:
        """Learn which files were in host memory, and how fast the others were read."""
        node, expected = self._expected.pop(worker.worker_id, (None, None))
        if node is None or expected is None:
            return
        if cost.fetch_seconds and worker.spec is not None and self.fetched.learn(worker.spec, cost):
            node.version += 1
        # a process also reads its libraries when it first uses them
        storage_bytes = min(cost.storage_bytes * cost.batched, sum(wanted_bytes for _, wanted_bytes in expected.reads))
        node.confirm(expected, storage_bytes, self.at)
        seconds = cost.batched * cost.load_seconds - cost.patch_switches * self.patch_seconds(worker)
        if storage_bytes < LEAST_LOAD_BYTES or cost.streamed_bytes or seconds <= 0:
            return
        link_seconds = cost.batched * cost.uploaded_bytes / worker.link_bytes_per_second
        unshared_seconds = seconds - expected.wait_seconds
        if unshared_seconds > HELD_UP * link_seconds:
            node.learn_storage(storage_bytes / unshared_seconds)
        elif storage_bytes / seconds > node.storage_bytes_per_second:
            node.learn_storage(storage_bytes / seconds)
        # otherwise it waited for the link, or for other reads of the disk: the disk may be faster

    def _learn_moving(self, worker: Worker, cost: RunCost) -> None:
        """Learn the speed of the link and the seconds of a patch switch. One report contains their sum: once loads
        without patches have measured the link, those with patches measure patches."""
        if cost.uploaded_bytes < LEAST_LOAD_BYTES or cost.storage_bytes > MOST_FROM_STORAGE * cost.uploaded_bytes:
            return
        if cost.patch_switches and cost.batched > 1:
            return  # its share of the switches is not a number of switches
        if cost.patch_switches and worker.worker_id in self._measured_links:
            switch_seconds = cost.load_seconds - cost.uploaded_bytes / worker.link_bytes_per_second
            self._learn_patches(gpu_name(worker.spec), switch_seconds / cost.patch_switches)
            return
        if not cost.patch_switches:
            self._measured_links.add(worker.worker_id)
        link_seconds = cost.load_seconds - cost.patch_switches * self.patch_seconds(worker)
        if link_seconds > 0:
            cached = worker.link_bytes_per_second
            measured = min(max(cost.uploaded_bytes / link_seconds, cached / MOST_STEP), cached * MOST_STEP)
            if abs(measured - cached) > LEAST_DIFFERENCE * measured:
                worker.learn_link(NEWEST, measured)

    def remembered_patches(self) -> tuple[RememberedPatches, ...]:
        """Return the measured seconds of switches of patches."""
        return tuple(RememberedPatches(gpu, each.measurements) for gpu, each in self._patch_estimates.items())

    def remember_patches(self, patches: Iterable[RememberedPatches]) -> None:
        """Take over what an earlier core has measured, where nothing was measured since."""
        for each in patches:
            if each.device_name not in self._patch_estimates:
                for seconds in each.seconds:
                    self._learn_patches(each.device_name, seconds)

    def _learn_patches(self, gpu: str, seconds: float) -> None:
        estimate = self._patch_estimates.setdefault(gpu, Estimate())
        estimate.add(max(seconds, LEAST_PATCH_SECONDS))
        value = estimate.value
        if value is None or len(estimate) < LEAST_SWITCHES:
            return
        cached = self._patch_seconds.get(gpu, self._prior_patch_seconds)
        if abs(value - cached) > LEAST_PATCH_DIFFERENCE * value:
            self._patch_seconds[gpu] = value
            for cost_class in self._cost_classes.values():
                cost_class.cached.clear()


def least_extra_seconds(
    costs: Costs, task: TaskSpec, cost_class: CostClass, workers: Iterable[Worker], most_seconds: float
) -> float:
    """Return the least of `most_seconds` and the extra seconds on each of these workers that it fits on."""
    least_seconds, known_there = most_seconds, cost_class.cached
    for worker in workers:
        cached = known_there.get(worker)
        there: float | None
        if cached is not None and cached.version == worker.version and cached.files is None and not task.divisions:
            there = cached.seconds  # the result of `extra_seconds` for most of these, without the call
        else:
            there = costs.extra_seconds(task, cost_class, worker)
        if there is not None and there < least_seconds:
            least_seconds = there
            if not there:
                break
    return least_seconds
