"""Seconds and bytes: what a task would cost on a worker. Predicts with `pool.plan.residency.plan`, learns from reports.

Completion time = wait + extra seconds + resident seconds; extra are upload, patch switches, streaming and what running
in parts adds, resident is the prior estimate of the run times a learnt ratio (`scheduler.tables.run_kinds`). Weights
come from the machine's memory over the link, or from its disks (`scheduler.tables.nodes`); both go on at once, so the
slower one counts. LoRAs are read where a patch set is applied anew. What tasks of one signature would move on a worker
is remembered until the worker changes (`Worker.version`) or, where files have to be read for it, its machine
(`Node.version`). A worker with little room runs a task in parts; the way is the one that the worker itself will choose
(`pool.specs.division`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from modelpool.pool.plan.residency import Residency, plan
from modelpool.pool.specs.outlook import NO_OUTLOOK, Outlook
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, RunCost, TaskReport, TaskSpec, WorkerId
from modelpool.scheduler.costs.predict import predict
from modelpool.scheduler.tables.cost_classes import Known, Setup, Signature, SignatureKey, new_signature, signature_key
from modelpool.scheduler.tables.estimates import Estimate
from modelpool.scheduler.tables.nodes import Expected, Node, Nodes, Reads
from modelpool.scheduler.tables.run_kinds import RunKinds, gpu_name
from modelpool.scheduler.tables.workers import Worker

#: weight of the newest measurement in an exponential average. An assumption: about the last five count
NEWEST = 0.3
#: one load moves that average no further than one that was so many times as fast or as slow as usual would
MOST_STEP = 2.0
#: loads below this say more about latency than about the link
LEAST_LOAD_BYTES = 1 << 20
#: a smaller difference from what is known is noise, and not worth computing every prediction again
LEAST_DIFFERENCE = 0.02
#: a run that streams is taken to compute for at least this part of its time: copies and kernels overlap
LEAST_COMPUTING = 0.1
#: a load that brings more than this part of its bytes from disks says little of the link
MOST_FROM_STORAGE = 0.1
#: a load that takes so much longer than its link needs was held up by the disk
HELD_UP = 1.2
#: measured patch switches of one kind of GPU before they count instead of what the configuration says
LEAST_SWITCHES = 3
#: patching is never free, so that equal bytes prefer equal patches
LEAST_PATCH_SECONDS = 0.001
#: patch seconds that differ by less are not worth computing every prediction again
LEAST_PATCH_DIFFERENCE = 0.1
#: signatures that are remembered when no task has them
SPARE_SIGNATURES = 256
#: workers for which such a signature keeps what it would move there
MOST_SPARE_KNOWN = 64


def times_prior(task: TaskSpec, cost: RunCost, link_bytes_per_second: float) -> float | None:
    """What a run took as a multiple of its prior estimate: as if whole, and without what streams over this link. None
    where one of the two is not known."""
    if task.run_seconds <= 0 or cost.run_seconds <= 0:
        return None
    streaming_seconds = cost.streamed_bytes / link_bytes_per_second
    computing_seconds = max(cost.run_seconds - streaming_seconds, LEAST_COMPUTING * cost.run_seconds)
    slowdown = 1.0 if cost.division is None else cost.division.slowdown
    return computing_seconds / (task.run_seconds * slowdown)


class Costs:
    """The sizes that are known and the seconds that were learnt."""

    def __init__(self, patch_switch_seconds: float) -> None:
        self._signatures: dict[SignatureKey, Signature] = {}
        #: signatures that no task has, the first to be forgotten first
        self._spare: OrderedDict[Signature, None] = OrderedDict()
        self.components: dict[ComponentKey, ComponentSpec] = {}
        #: the time now
        self.at = 0.0
        #: LoRAs that were asked for before their sizes were known
        self._unsized: set[ComponentKey] = set()
        self.nodes = Nodes()
        self.run_kinds = RunKinds()
        #: by worker, what the run that it is at was expected to read
        self._expected: dict[WorkerId, tuple[Node, Expected]] = {}
        #: workers whose link was seen without patches
        self._seen_links: set[WorkerId] = set()
        self._prior_patch_seconds = patch_switch_seconds
        #: by kind of GPU: what switches took, and what is taken for true
        self._patch_estimates: dict[str, Estimate] = {}
        self._patch_seconds: dict[str, float] = {}

    def know(self, components: tuple[ComponentSpec, ...]) -> None:
        """Take in sizes. New sizes for a known component hold from now on."""
        for spec in components:
            if self.components.get(spec.key, spec) != spec or spec.key in self._unsized:
                self._unsized.discard(spec.key)
                for signature in self._signatures.values():
                    signature.forget_sizes()
            self.components[spec.key] = spec

    def acquire(self, spec: TaskSpec) -> Signature:
        """The signature of a task; to be given back by `release`."""
        key = signature_key(spec)
        signature = self._signatures.get(key)
        if signature is None:
            kind = self.run_kinds.kind(spec.stage, tuple(use.component for use in spec.uses))
            signature = self._signatures[key] = new_signature(spec, kind)
            self._unsized.update(signature.adapters.difference(self.components))
        elif signature.tasks == 0:
            del self._spare[signature]
        signature.tasks += 1
        return signature

    def release(self, signature: Signature) -> None:
        """A task that had it is forgotten. The last signatures without a task are kept for tasks to come."""
        signature.tasks -= 1
        if signature.tasks == 0:
            self._spare[signature] = None
            if len(signature.known) > MOST_SPARE_KNOWN:
                signature.known.clear()
            if len(self._spare) > SPARE_SIGNATURES:
                oldest, _ = self._spare.popitem(last=False)
                del self._signatures[signature_key(oldest.pattern)]

    def extra_seconds(self, task: TaskSpec, signature: Signature, worker: Worker) -> float | None:
        """Time beside waiting and the undivided run with all weights resident; None when it does not fit there."""
        known = signature.known.get(worker)
        # `Known.holds`, written out: this is asked more often than anything else
        if (
            known is None
            or known.version != worker.version
            or (known.files is not None and known.files.version != known.files_version)
        ):
            known = self._look(signature, worker, known)
            if known is None:
                return None
        if not task.divisions:
            return known.seconds
        slowdown = signature.way(known.capacity_bytes).slowdown
        return known.seconds + (slowdown - 1.0) * self.resident_seconds(task, signature, worker)

    def _look(self, signature: Signature, worker: Worker, known: Known | None) -> Known | None:
        """What a run would move there now, and how long that takes; `known` is what held for the worker before. None
        when it does not fit there."""
        capacity_bytes, link_bytes_per_second = worker.capacity_bytes, worker.link_bytes_per_second
        assert capacity_bytes is not None, f"{worker.worker_id} never was up"
        if signature.needed_bytes > capacity_bytes:
            return None
        spec, setup, entries = worker.spec, None, worker.entries
        node = self.nodes.of(spec) if spec is not None and spec.node else None
        if known is not None and known.capacity_bytes == capacity_bytes and known.has_seen(signature, entries):
            if (
                known.link_bytes_per_second == link_bytes_per_second
                and known.node is node
                and (known.files is None or known.files.version == known.files_version)
            ):
                known.version = worker.version  # what changed there does not concern this signature
                return known
            setup, seen = known.setup, known.seen
        else:
            seen = tuple([entries.get(key) for key in signature.components])
            setup = predict(signature, seen, capacity_bytes, self.components)
        known = signature.known[worker] = Known(
            worker.version,
            link_bytes_per_second,
            capacity_bytes,
            seen,
            setup,
            self._setup_seconds(setup, worker, node),
            node,
            node if setup.reads else None,
            0 if node is None else node.version,
        )
        return known

    def seconds_of(self, setup: Setup, worker: Worker) -> float:
        """Time to bring what is missing, to patch anew and to stream."""
        return self._setup_seconds(setup, worker, self.nodes.of(worker.spec))

    def _setup_seconds(self, setup: Setup, worker: Worker, node: Node | None) -> float:
        switches = setup.switches
        moving_seconds = (setup.upload_bytes + setup.streamed_bytes) / worker.link_bytes_per_second
        if node is not None and setup.reads:
            reading_seconds = node.missing_bytes(setup.reads) / node.storage_bytes_per_second
            if reading_seconds > moving_seconds:
                moving_seconds = reading_seconds
        return moving_seconds + switches * self.patch_seconds(worker) if switches else moving_seconds

    def patch_seconds(self, worker: Worker) -> float:
        """Time beside moving bytes that it takes `worker` to give a resident component other patches."""
        return self._patch_seconds.get(gpu_name(worker.spec), self._prior_patch_seconds)

    def setup(self, signature: Signature, worker: Worker) -> Setup | None:
        """What to move on a live worker once its present run is over; None when it does not fit there."""
        known = signature.known.get(worker)
        if known is None or known.version != worker.version:
            known = self._look(signature, worker, known)
        return None if known is None else known.setup

    def makes_room(self, signature: Signature, worker: Worker) -> bool:
        """Whether weights of other components would have to leave a live worker that it fits on."""
        setup = self.setup(signature, worker)
        return setup is not None and worker.used_bytes - setup.own_bytes > setup.room_bytes

    def residency_after(self, signature: Signature, worker: Worker, outlook: Outlook = NO_OUTLOOK) -> Residency:
        """What `pool.plan.residency.plan` leaves on a live worker; without asking it when nothing has to make room."""
        now, setup = worker.residency, self.setup(signature, worker)
        assert now is not None, f"{worker.worker_id} is not up"
        assert setup is not None, f"the task does not fit on {worker.worker_id}"
        if worker.used_bytes - setup.own_bytes > setup.room_bytes:
            return plan(now, signature.uses, self.components, setup.way.activation_bytes, outlook=outlook).after
        used = signature.components
        others = [entry for entry in now.entries if entry.component not in used]
        return Residency(now.capacity_bytes, (*others, *setup.arrived))

    def resident_seconds(self, task: TaskSpec, signature: Signature, worker: Worker) -> float:
        """Time of the run on `worker` with all weights resident."""
        spec = worker.spec
        ratio = signature.ratios.get("" if spec is None else spec.device_name)
        if ratio is None:
            ratio = self.run_kinds.ratio(signature.kind, gpu_name(spec), signature.size)
        return task.run_seconds * ratio

    def batch_seconds(self, task: TaskSpec, signature: Signature, worker: Worker, members: int) -> float:
        """Time of one run on `worker` of so many tasks like this one, with all weights resident."""
        share = self.run_kinds.batch_share(signature.kind, gpu_name(worker.spec), members, signature.size)
        return members * share * self.resident_seconds(task, signature, worker)

    def batch_runs(self, signature: Signature, worker: Worker, members: int) -> int:
        """How many runs of so many such tasks were measured on GPUs like that of `worker`."""
        return self.run_kinds.batch_runs(signature.kind, gpu_name(worker.spec), members, signature.size)

    def run_started(self, signature: Signature, worker: Worker) -> None:
        """A run is placed on `worker`, whose residency is still that of before: its files will be in the memory of the
        machine. Once a run, before what it leaves is assumed."""
        self._expected.pop(worker.worker_id, None)
        node = self.nodes.of(worker.spec)
        setup = None if node is None else self.setup(signature, worker)
        if node is not None and setup is not None and setup.reads:
            self._expected[worker.worker_id] = (node, node.expect(setup.reads, self.at))

    def reads(self, worker: Worker) -> Reads:
        """What the run that `worker` is at was expected to read."""
        known = self._expected.get(worker.worker_id)
        return () if known is None else known[1].reads

    def learn(self, task: TaskSpec, signature: Signature, worker: Worker, report: TaskReport) -> None:
        """Take in what a run that ended well took."""
        cost = report.cost
        self._learn_storage(worker, cost)
        self._learn_moving(worker, cost)
        measured = times_prior(task, cost, worker.link_bytes_per_second)
        if measured is not None:
            self.run_kinds.learn(signature.kind, gpu_name(worker.spec), signature.size, measured, cost.batched)

    def _learn_storage(self, worker: Worker, cost: RunCost) -> None:
        """Which files were in the machine's memory, and how fast the others came."""
        node, expected = self._expected.pop(worker.worker_id, (None, None))
        if node is None or expected is None:
            return
        # a process reads its libraries too, the first time that it uses them
        storage_bytes = min(cost.storage_bytes * cost.batched, sum(wanted_bytes for _, wanted_bytes in expected.reads))
        node.confirm(expected, storage_bytes, self.at)
        seconds = cost.batched * cost.load_seconds - cost.patch_switches * self.patch_seconds(worker)
        if storage_bytes < LEAST_LOAD_BYTES or cost.streamed_bytes or seconds <= 0:
            return
        link_seconds = cost.batched * cost.uploaded_bytes / worker.link_bytes_per_second
        own_seconds = seconds - expected.wait_seconds
        if own_seconds > HELD_UP * link_seconds:
            node.learn_storage(storage_bytes / own_seconds)
        elif storage_bytes / seconds > node.storage_bytes_per_second:
            node.learn_storage(storage_bytes / seconds)
        # else the link was what it waited for, or others at the disk: that may be faster

    def _learn_moving(self, worker: Worker, cost: RunCost) -> None:
        """The speed of the link and the seconds of a patch switch. One report says only what both took together: once
        loads without patches have shown the link, those with patches tell of patches."""
        if cost.uploaded_bytes < LEAST_LOAD_BYTES or cost.storage_bytes > MOST_FROM_STORAGE * cost.uploaded_bytes:
            return
        if cost.patch_switches and cost.batched > 1:
            return  # its share of the switches is no number of switches
        if cost.patch_switches and worker.worker_id in self._seen_links:
            beside_seconds = cost.load_seconds - cost.uploaded_bytes / worker.link_bytes_per_second
            self._learn_patches(gpu_name(worker.spec), beside_seconds / cost.patch_switches)
            return
        if not cost.patch_switches:
            self._seen_links.add(worker.worker_id)
        link_seconds = cost.load_seconds - cost.patch_switches * self.patch_seconds(worker)
        if link_seconds > 0:
            known = worker.link_bytes_per_second
            measured = min(max(cost.uploaded_bytes / link_seconds, known / MOST_STEP), known * MOST_STEP)
            if abs(measured - known) > LEAST_DIFFERENCE * measured:
                worker.learn_link(NEWEST, measured)

    def _learn_patches(self, gpu: str, seconds: float) -> None:
        estimate = self._patch_estimates.setdefault(gpu, Estimate())
        estimate.add(max(seconds, LEAST_PATCH_SECONDS))
        value = estimate.value
        if value is None or len(estimate) < LEAST_SWITCHES:
            return
        known = self._patch_seconds.get(gpu, self._prior_patch_seconds)
        if abs(value - known) > LEAST_PATCH_DIFFERENCE * value:
            self._patch_seconds[gpu] = value
            for signature in self._signatures.values():
                signature.known.clear()


def least_extra_seconds(
    costs: Costs, task: TaskSpec, signature: Signature, workers: Iterable[Worker], most_seconds: float
) -> float:
    """The least of `most_seconds` and the extra seconds on each of these workers that it fits on."""
    least_seconds, known_there = most_seconds, signature.known
    for worker in workers:
        known = known_there.get(worker)
        there: float | None
        if known is not None and known.version == worker.version and known.files is None and not task.divisions:
            there = known.seconds  # what `extra_seconds` answers to most of these, without asking it
        else:
            there = costs.extra_seconds(task, signature, worker)
        if there is not None and there < least_seconds:
            least_seconds = there
            if not there:
                break
    return least_seconds
