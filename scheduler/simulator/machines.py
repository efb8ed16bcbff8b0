"""Simulated GPUs and the cost of a run on one: bytes as seconds.

Loading is a pipeline from storage over host memory and the link: it takes as long as its slowest part. Bytes that
stream during a run are read from storage once, if they are not cached. A run waits for bytes that are being read for
another run. Adapters are read when weights get their patches: when bytes arrive, when patches change, and when patched
weights stream; their share of the link is included in the weights that arrive again. Every byte and every patched
component costs the same under every policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.execution_modes import choose_mode
from modelpool.pool.values.specs.spec import (
    NO_NODE,
    UNPATCHED,
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    ExecutionMode,
    NodeId,
    RunCost,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency, ResidencyPlan, needed_bytes
from modelpool.pool.weights.plan.peer_shares import PeerLink, exchanged_in_run, run_share
from modelpool.pool.weights.plan.preload_plan import PreloadPlan, RunningLease, plan_preload
from modelpool.scheduler.model.messages import LoadWeights, Preload, RunTask
from modelpool.scheduler.simulator.batches import RunningBatch
from modelpool.scheduler.simulator.eviction_policies import EvictionQuery, WorkerMemory
from modelpool.scheduler.simulator.hosts import FileRead, Host, SimulatedNode, StorageReads, summed

NOTHING_HELD = RunningLease(frozenset(), 0)


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
    """The GPU of a simulated worker.

    speed     divides the prior run seconds of a task
    kind      its kind of GPU, for comparisons
    node      it shares the memory and disks of this machine; "" is a separate machine, with memory for every file and
              storage as fast as the link
    marginal  time of each further task of a batch, as a fraction of one task: 1 gains nothing
    gang_link_bytes_per_second  to other GPUs of its machine, which hold weights for each other in runs that they share;
                                0: they do not
    resume_seconds  to begin a run from the state of an earlier one, with saving that
    """

    worker_id: WorkerId
    capacity_bytes: int
    link_bytes_per_second: float
    speed: float = 1.0
    start_seconds: float = 1.0
    kind: str = ""
    node: NodeId = NO_NODE
    marginal: float = 1.0
    gang_link_bytes_per_second: float = 0.0
    resume_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OverlappedPreload:
    """A preload that overlaps a run.

    begun_at       when the link is free for it
    patch_seconds  before bytes move: for changing patches of resident components
    """

    plan: PreloadPlan
    begun_at: float
    patch_seconds: float
    link_bytes_per_second: float

    @property
    def ends_at(self) -> float:
        """The time at which it is complete."""
        return self.begun_at + self.patch_seconds + self.plan.upload_bytes / self.link_bytes_per_second

    def uploaded_bytes(self, at: float) -> int:
        """Bytes that have crossed the link by then."""
        seconds = at - self.begun_at - self.patch_seconds
        return min(self.plan.upload_bytes, int(max(0.0, seconds) * self.link_bytes_per_second))


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """A load of weights on an idle worker.

    number  of the event that ends it; 0 before that is posted
    """

    plan: PreloadPlan
    began_at: float
    ends_at: float
    number: int = 0

    def uploaded_bytes(self, at: float) -> int:
        """Bytes that have arrived by then, if it proceeds evenly."""
        if at >= self.ends_at:
            return self.plan.upload_bytes
        return int(self.plan.upload_bytes * (at - self.began_at) / (self.ends_at - self.began_at))


@dataclass(slots=True)
class Machine:
    """A live simulated worker."""

    gpu: SimulatedGpu
    incarnation: int
    host: Host
    residency: Residency
    #: the current run, the memory that it holds, and the preloads during it
    batch: RunningBatch | None = None
    #: what it starts after that run, in order
    queue: list[RunTask] = field(default_factory=list)
    held: RunningLease = NOTHING_HELD
    preload: tuple[OverlappedPreload, ...] = ()
    #: a load without a run
    load: SimulatedLoad | None = None

    @property
    def residency_after(self) -> Residency:
        """The residency when the run ends as planned."""
        return self.residency if self.batch is None else self._with_preload(self.batch.ends_at)

    def settle(self, at: float) -> int:
        """Apply the preloads up to this time and end them. Returns their bytes on the link."""
        uploaded_bytes = sum(one.uploaded_bytes(at) for one in self.preload)
        self.residency, self.preload = self._with_preload(at), ()
        return uploaded_bytes

    def _with_preload(self, at: float) -> Residency:
        residency = self.residency
        for one in self.preload:
            residency = one.plan.after(residency, one.uploaded_bytes(at))
        return residency


@dataclass(frozen=True, slots=True)
class SimulatedWork:
    """The cost of a run command: bytes, seconds, and the adapters read from storage.

    cost          `storage_bytes` are those that were read for this command
    waited_bytes  those that were being read for other runs, and that it waits for
    computing_seconds, moving_seconds  of the run, without the weights that stream, and of these
    share_seconds  to read what it holds for the other members of its gang, once these are there
    """

    moves: ResidencyPlan
    cost: RunCost
    waited_bytes: int
    adapters_loaded: tuple[ComponentKey, ...]
    computing_seconds: float
    moving_seconds: float
    share_seconds: float


class Machines:
    """All GPUs, the live workers on them, and the machines that they share. Computes the cost of runs."""

    def __init__(
        self,
        gpus: Iterable[SimulatedGpu],
        nodes: Iterable[SimulatedNode],
        memory: WorkerMemory,
        patch_switch_seconds: float,
    ) -> None:
        """Raises UnusableField if a GPU is on a machine that is not in `nodes`, or a name is used twice."""
        self.gpus: dict[WorkerId, SimulatedGpu] = {}
        self.live: dict[WorkerId, Machine] = {}
        self._memory = memory
        self._patch_switch_seconds = patch_switch_seconds
        self._nodes = {node.node: node for node in nodes}
        self._hosts: dict[NodeId | WorkerId, Host] = {
            node.node: Host(node.host_bytes, node.storage_bytes_per_second) for node in self._nodes.values()
        }
        for gpu in gpus:
            if gpu.worker_id in self.gpus:
                raise unusable_field("gpus", gpu.worker_id, "each name once")
            if gpu.node and gpu.node not in self._nodes:
                raise unusable_field(f"{gpu.worker_id}: node", gpu.node, f"one of {sorted(self._nodes)}")
            self.gpus[gpu.worker_id] = gpu

    def add_node(self, node: SimulatedNode) -> None:
        """A machine exists from now on, with nothing in its memory."""
        self._nodes[node.node] = node
        self._hosts[node.node] = Host(node.host_bytes, node.storage_bytes_per_second)

    def add_gpu(self, gpu: SimulatedGpu) -> None:
        """A GPU exists from now on, on a known machine."""
        self.gpus[gpu.worker_id] = gpu

    def spec(self, worker_id: WorkerId, incarnation: int) -> WorkerSpec:
        """The introduction of a worker."""
        gpu = self.gpus[worker_id]
        node = self._nodes.get(gpu.node)
        return WorkerSpec(
            worker_id,
            incarnation,
            gpu.capacity_bytes,
            gpu.link_bytes_per_second,
            gpu.kind or "simulated",
            gpu.node,
            0 if node is None else node.host_bytes,
            0.0 if node is None else node.storage_bytes_per_second,
            holds_shares=gpu.gang_link_bytes_per_second > 0.0,
            gang_link_bytes_per_second=gpu.gang_link_bytes_per_second,
        )

    def up(self, spec: WorkerSpec) -> None:
        """The worker is up, with nothing on its GPU. Its machine's page cache is unchanged."""
        gpu = self.gpus[spec.worker_id]
        self.live[spec.worker_id] = Machine(gpu, spec.incarnation, self._host(gpu), Residency(spec.capacity_bytes))

    def work(
        self,
        now: float,
        command: RunTask,
        tasks: Sequence[TaskSpec],
        specs: Mapping[ComponentKey, ComponentSpec],
        factor: float,
        degree: int = 1,
    ) -> SimulatedWork:
        """Return the cost of the command on that worker, and set the worker's residency to the one after it.

        `tasks` are the task of the command and its mates, which need the same weights; the computation takes the
        seconds of the longest of them, times `factor`. With a `degree`, the worker is one of so many equal members, and
        holds a share of the weights for them if that is faster; the computation is as on one GPU.
        """
        machine, number = self.live[command.worker_id], tasks[0].multiple(len(tasks))
        gpu, uses = machine.gpu, tasks[0].uses
        room_bytes = (gpu.capacity_bytes - needed_bytes(uses, 0)) // number
        longest = max(tasks, key=lambda task: task.run_seconds)
        largest_task = max(tasks, key=lambda task: task.activation_bytes)
        mode = choose_mode(largest_task, room_bytes)
        working_bytes = mode.activation_bytes * number
        before = Residency(gpu.capacity_bytes) if command.fresh else machine.residency
        hints = EvictionHints(command.needed_next) if command.needed_next else NO_HINTS
        share_bytes = _share_bytes(gpu, uses, specs, working_bytes, degree)
        needed = working_bytes + share_bytes
        moves = self._memory.moves(EvictionQuery(command.worker_id, before, uses, needed, hints), specs)
        exchanged_bytes = _exchanged_bytes(uses, specs, moves.after, share_bytes, degree)
        streamed_bytes = max(0, moves.streamed_bytes - exchanged_bytes)
        machine.residency = moves.after
        machine.held = RunningLease(frozenset(use.component for use in uses), needed + needed_bytes(uses, 0))
        loading, streaming = _reads(uses, moves, specs)
        adapters = {adapter for use in uses for adapter in use.adapters}
        reading = machine.host.read(now, command.worker_id, loading, _united(loading, streaming))
        load_seconds = max(moves.upload_bytes / gpu.link_bytes_per_second, reading.loaded_at - now)
        load_seconds += len(moves.switched) * self._patch_switch_seconds
        load_seconds += gpu.resume_seconds if command.resume else 0.0
        computing_seconds = longest.run_seconds * mode.slowdown / gpu.speed * factor
        computing_seconds *= 1.0 + (number - 1) * gpu.marginal
        moving_seconds = max(streamed_bytes / gpu.link_bytes_per_second, reading.streamed_at - reading.loaded_at)
        if exchanged_bytes:
            moving_seconds += exchanged_bytes / gpu.gang_link_bytes_per_second
        cost = RunCost(
            load_seconds=load_seconds,
            run_seconds=computing_seconds + moving_seconds,
            uploaded_bytes=moves.upload_bytes,
            streamed_bytes=streamed_bytes,
            peak_bytes=moves.after.used_bytes + needed,
            resident=moves.all_resident,
            patch_switches=len(moves.switched),
            division=_division(mode, largest_task),
            oom_steps=command.oom_steps,
            storage_bytes=sum(reading.missing.values()),
            batched=max(number, tasks[0].batch_size),
            share_bytes=share_bytes,
            exchanged_bytes=exchanged_bytes * (degree - 1) // degree,
            gang_link_bytes_per_second=gpu.gang_link_bytes_per_second if degree > 1 else 0.0,
        )
        found = tuple(sorted(adapters & reading.missing.keys()))
        share_seconds = share_bytes / gpu.link_bytes_per_second
        return SimulatedWork(moves, cost, reading.waited_bytes, found, computing_seconds, moving_seconds, share_seconds)

    def row_seconds(self, command: RunTask, task: TaskSpec, factor: float) -> float:
        """Return the seconds of `task` in the pass that its worker runs, times `factor`."""
        return task.run_seconds / self.live[command.worker_id].gpu.speed * factor

    def start_preload(
        self, now: float, command: Preload, tasks: Iterable[TaskSpec], specs: Mapping[ComponentKey, ComponentSpec]
    ) -> None:
        """Preload the weights of these tasks one after the other during the run there, once that has loaded its
        weights. Nothing during a run that streams: it uses the whole link. Nothing that is not in host memory, if
        its disk is slower than the link: a run does not wait for it."""
        machine = self.live[command.worker_id]
        if machine.batch is None or machine.batch.moves.streamed_bytes:
            return
        hints = EvictionHints(command.needed_next) if command.needed_next else NO_HINTS
        link_bytes_per_second = machine.gpu.link_bytes_per_second
        at, there = max(now, machine.batch.loaded_at), machine.residency
        held = RunningLease(machine.held.components.union(command.kept), machine.held.run_bytes)
        for task in tasks:
            mode = choose_mode(task, machine.gpu.capacity_bytes - needed_bytes(task.uses, 0))
            plan = plan_preload(there, held, task.uses, specs, mode.activation_bytes, hints)
            files = [(one.use.component, one.upload_bytes) for one in plan.arrive]
            files += [(key, specs[key].upload_bytes) for one in plan.arrive for key in one.use.adapters if key in specs]
            is_slow = machine.host.storage_bytes_per_second < link_bytes_per_second
            if not files or (is_slow and not all(machine.host.uses(now, key, size) for key, size in files)):
                continue
            preload = OverlappedPreload(plan, at, plan.switches * self._patch_switch_seconds, link_bytes_per_second)
            machine.preload += (preload,)
            at, there = preload.ends_at, plan.after(there)
            held = RunningLease(held.components.union(use.component for use in task.uses), held.run_bytes)

    def start_load(
        self, now: float, command: LoadWeights, specs: Mapping[ComponentKey, ComponentSpec]
    ) -> SimulatedLoad:
        """Begin a load on an idle worker: files are read from its machine's storage, then cross the link."""
        machine = self.live[command.worker_id]
        uses = [ComponentUse(key, 0) for key in command.components]
        held = RunningLease(frozenset(command.kept), 0)
        plan = plan_preload(machine.residency, held, uses, specs, 0)
        reads = {
            one.use.component: FileRead(one.upload_bytes, specs[one.use.component].upload_bytes) for one in plan.arrive
        }
        reading = machine.host.read(now, command.worker_id, reads, {})
        ends_at = max(now + plan.upload_bytes / machine.gpu.link_bytes_per_second, reading.loaded_at)
        machine.load = SimulatedLoad(plan, now, ends_at)
        return machine.load

    def storage(self, now: float) -> StorageReads:
        """Bytes read from the storage of all machines."""
        return summed(host.reads(now) for host in self._hosts.values())

    def _host(self, gpu: SimulatedGpu) -> Host:
        if gpu.node:
            return self._hosts[gpu.node]
        return self._hosts.setdefault(gpu.worker_id, Host(None, gpu.link_bytes_per_second))


def _share_bytes(
    gpu: SimulatedGpu,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    working_bytes: int,
    degree: int,
) -> int:
    """What a GPU holds for the other members of a gang of equal ones."""
    if degree < 2 or not gpu.gang_link_bytes_per_second:
        return 0
    room_bytes = gpu.capacity_bytes - working_bytes - needed_bytes(uses, 0)
    link = PeerLink(gpu.gang_link_bytes_per_second)
    return run_share(uses, specs, room_bytes, degree, gpu.link_bytes_per_second, link)


def _exchanged_bytes(
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    after: Residency,
    share_bytes: int,
    degree: int,
) -> int:
    """What goes over the link among the members during a run."""
    if not share_bytes:
        return 0
    resident = after.of(uses[0].component)
    resident_bytes = 0 if resident is None else resident.resident_bytes
    return exchanged_in_run(uses[0], specs[uses[0].component], resident_bytes, share_bytes, degree)


def _division(mode: ExecutionMode, task: TaskSpec) -> ExecutionMode | None:
    return mode if mode in task.divisions else None


def _reads(
    uses: Sequence[ComponentUse], moves: ResidencyPlan, specs: Mapping[ComponentKey, ComponentSpec]
) -> tuple[dict[ComponentKey, FileRead], dict[ComponentKey, FileRead]]:
    """Reads of each file before the run, and during it (the bytes of one pass)."""
    uploads = {move.component: move.bytes for move in moves.upload}
    loading: dict[ComponentKey, FileRead] = {}
    streaming: dict[ComponentKey, FileRead] = {}
    for use in uses:
        key, spec = use.component, specs[use.component]
        resident = moves.after.of(key)
        away_bytes = spec.weight_bytes - (0 if resident is None else resident.resident_bytes)
        pass_bytes = -(-away_bytes * spec.upload_bytes // spec.weight_bytes) if moves.streamed_bytes else 0
        if key in uploads:
            loading[key] = FileRead(uploads[key], spec.upload_bytes)
        if pass_bytes:
            streaming[key] = FileRead(pass_bytes, spec.upload_bytes)
        if use.patch_digest != UNPATCHED and (key in uploads or key in moves.switched or pass_bytes):
            for adapter in use.adapters:
                adapter_bytes = specs[adapter].upload_bytes
                loading[adapter] = FileRead(adapter_bytes, adapter_bytes)
    return loading, streaming


def _united(
    loading: Mapping[ComponentKey, FileRead], streaming: Mapping[ComponentKey, FileRead]
) -> dict[ComponentKey, FileRead]:
    """The streamed reads, joined with the loaded bytes of the same files."""
    return {
        key: FileRead(read.bytes + (loading[key].bytes if key in loading else 0), read.file_bytes)
        for key, read in streaming.items()
    }
