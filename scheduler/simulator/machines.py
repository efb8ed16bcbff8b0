"""Simulated GPUs and what a run on one costs: bytes as seconds.

Loading is a pipeline from storage over the machine's memory and the link: it takes as long as its slowest part. Bytes
that stream during a run are read from storage once, if they are not cached. What is on its way for another run is
waited for. Adapters are read where weights get their
patches: when bytes arrive, when patches change, and when patched weights stream; what they need of the link is in the
weights that arrive again. Every byte and every patched component costs the same, whatever policy asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from modelpool.pool.core.errors import unusable_field
from modelpool.pool.plan.preload_plan import AheadPlan, Held, plan_ahead
from modelpool.pool.plan.residency import Residency, ResidencyPlan, needed_bytes
from modelpool.pool.specs.division import choose_division
from modelpool.pool.specs.outlook import NO_OUTLOOK, Outlook
from modelpool.pool.specs.spec import (
    UNPATCHED,
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    Division,
    NodeId,
    RunCost,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from modelpool.scheduler.simulator.batches import Batch
from modelpool.scheduler.simulator.eviction_policies import MemoryQuestion, WorkerMemory
from modelpool.scheduler.simulator.hosts import FileRead, Host, SimulatedNode, StorageReads, summed
from modelpool.scheduler.tables.messages import RunTask, UploadAhead

NOTHING_HELD = Held(frozenset(), 0)
#: a machine of its own
ALONE = NodeId("")


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
    """What a simulated worker runs on.

    speed     divides the prior run seconds of a task
    kind      what sort of GPU it is, for those who compare
    node      the machine whose memory and disks it shares; "" is a machine of its own, with memory for every file and
              storage as fast as the link
    marginal  what each further task of a batch adds, as a part of what one takes: 1 gains nothing
    """

    worker_id: WorkerId
    capacity_bytes: int
    link_bytes_per_second: float
    speed: float = 1.0
    start_seconds: float = 1.0
    kind: str = ""
    node: NodeId = ALONE
    marginal: float = 1.0


@dataclass(frozen=True, slots=True)
class Beside:
    """What is brought beside a run.

    begun_at       when the link is free for it
    patch_seconds  before bytes move: to give what is there other patches
    """

    plan: AheadPlan
    begun_at: float
    patch_seconds: float
    link_bytes_per_second: float

    @property
    def ends_at(self) -> float:
        """When all of it is there."""
        return self.begun_at + self.patch_seconds + self.plan.upload_bytes / self.link_bytes_per_second

    def uploaded_bytes(self, at: float) -> int:
        """What has crossed the link by then."""
        seconds = at - self.begun_at - self.patch_seconds
        return min(self.plan.upload_bytes, int(max(0.0, seconds) * self.link_bytes_per_second))


@dataclass(slots=True)
class Machine:
    """A live simulated worker."""

    gpu: SimulatedGpu
    incarnation: int
    host: Host
    residency: Residency
    #: what runs there, what that holds, and what is brought beside it
    batch: Batch | None = None
    held: Held = NOTHING_HELD
    beside: tuple[Beside, ...] = ()

    @property
    def residency_after(self) -> Residency:
        """What will be there when the run ends as it should."""
        return self.residency if self.batch is None else self._with_beside(self.batch.ends_at)

    def settle(self, at: float) -> int:
        """What was brought beside the run by then is there, and no more comes. Returns its bytes on the link."""
        uploaded_bytes = sum(one.uploaded_bytes(at) for one in self.beside)
        self.residency, self.beside = self._with_beside(at), ()
        return uploaded_bytes

    def _with_beside(self, at: float) -> Residency:
        residency = self.residency
        for one in self.beside:
            residency = one.plan.after(residency, one.uploaded_bytes(at))
        return residency


@dataclass(frozen=True, slots=True)
class Work:
    """What a command to run comes to: bytes, seconds, and the adapters that storage had to give.

    cost          `storage_bytes` are those that were read for this command
    waited_bytes  those that were on their way for others, and that it waits for
    """

    moves: ResidencyPlan
    cost: RunCost
    waited_bytes: int
    adapters_loaded: tuple[ComponentKey, ...]


class Machines:
    """The GPUs that there are, the live workers on them, and the machines that they share. Charges what runs cost."""

    def __init__(
        self,
        gpus: Iterable[SimulatedGpu],
        nodes: Iterable[SimulatedNode],
        memory: WorkerMemory,
        patch_switch_seconds: float,
    ) -> None:
        """Raises UnusableField when a GPU is on a machine that is not among `nodes`, or one name stands for two."""
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

    def spec(self, worker_id: WorkerId, incarnation: int) -> WorkerSpec:
        """A worker as it introduces itself."""
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
        )

    def up(self, spec: WorkerSpec) -> None:
        """The worker is there, with nothing on its GPU. What its machine's memory keeps is still there."""
        gpu = self.gpus[spec.worker_id]
        self.live[spec.worker_id] = Machine(gpu, spec.incarnation, self._host(gpu), Residency(spec.capacity_bytes))

    def work(
        self,
        now: float,
        command: RunTask,
        tasks: Sequence[TaskSpec],
        specs: Mapping[ComponentKey, ComponentSpec],
        factor: float,
    ) -> Work:
        """What the command comes to on that worker, whose residency is afterwards what it will be.

        `tasks` are that of the command and its mates, which need the same weights; the seconds of the computation are
        those of the longest of them, times `factor`.
        """
        machine, number = self.live[command.worker_id], len(tasks)
        gpu, uses = machine.gpu, tasks[0].uses
        room_bytes = (gpu.capacity_bytes - needed_bytes(uses, 0)) // number
        longest = max(tasks, key=lambda task: task.run_seconds)
        hungriest = max(tasks, key=lambda task: task.activation_bytes)
        way = choose_division(hungriest, room_bytes)
        working_bytes = way.activation_bytes * number
        before = Residency(gpu.capacity_bytes) if command.fresh else machine.residency
        outlook = Outlook(command.needed_next) if command.needed_next else NO_OUTLOOK
        moves = self._memory.moves(MemoryQuestion(command.worker_id, before, uses, working_bytes, outlook), specs)
        machine.residency = moves.after
        machine.held = Held(frozenset(use.component for use in uses), working_bytes + needed_bytes(uses, 0))
        loading, streaming = _reads(uses, moves, specs)
        adapters = {adapter for use in uses for adapter in use.adapters}
        reading = machine.host.read(now, command.worker_id, loading, _united(loading, streaming))
        load_seconds = max(moves.upload_bytes / gpu.link_bytes_per_second, reading.loaded_at - now)
        load_seconds += len(moves.switched) * self._patch_switch_seconds
        run_seconds = longest.run_seconds * way.slowdown / gpu.speed * factor * (1.0 + (number - 1) * gpu.marginal)
        run_seconds += max(moves.streamed_bytes / gpu.link_bytes_per_second, reading.streamed_at - reading.loaded_at)
        cost = RunCost(
            load_seconds=load_seconds,
            run_seconds=run_seconds,
            uploaded_bytes=moves.upload_bytes,
            streamed_bytes=moves.streamed_bytes,
            peak_bytes=moves.after.used_bytes + working_bytes,
            resident=moves.all_resident,
            patch_switches=len(moves.switched),
            division=_division(way, hungriest),
            rungs=command.rungs,
            storage_bytes=sum(reading.missing.values()),
            batched=number,
        )
        return Work(moves, cost, reading.waited_bytes, tuple(sorted(adapters & reading.missing.keys())))

    def bring_ahead(
        self, now: float, command: UploadAhead, tasks: Iterable[TaskSpec], specs: Mapping[ComponentKey, ComponentSpec]
    ) -> None:
        """Weights of these tasks come one after the other beside the run there, when that has loaded its own. Nothing
        beside one that streams: it has the link to itself. Nothing that is not in the machine's memory, where its disk
        is slower than the link: a run does not wait for it."""
        machine = self.live[command.worker_id]
        if machine.batch is None or machine.batch.moves.streamed_bytes:
            return
        outlook = Outlook(command.needed_next) if command.needed_next else NO_OUTLOOK
        link_bytes_per_second = machine.gpu.link_bytes_per_second
        at, there = max(now, machine.batch.loaded_at), machine.residency
        held = Held(machine.held.components.union(command.kept), machine.held.run_bytes)
        for task in tasks:
            way = choose_division(task, machine.gpu.capacity_bytes - needed_bytes(task.uses, 0))
            plan = plan_ahead(there, held, task.uses, specs, way.activation_bytes, outlook)
            files = [(one.use.component, one.upload_bytes) for one in plan.arrive]
            files += [(key, specs[key].upload_bytes) for one in plan.arrive for key in one.use.adapters if key in specs]
            is_slow = machine.host.storage_bytes_per_second < link_bytes_per_second
            if not files or (is_slow and not all(machine.host.uses(now, key, size) for key, size in files)):
                continue
            beside = Beside(plan, at, plan.switches * self._patch_switch_seconds, link_bytes_per_second)
            machine.beside += (beside,)
            at, there = beside.ends_at, plan.after(there)
            held = Held(held.components.union(use.component for use in task.uses), held.run_bytes)

    def storage(self, now: float) -> StorageReads:
        """What has come from the storage of all machines."""
        return summed(host.reads(now) for host in self._hosts.values())

    def _host(self, gpu: SimulatedGpu) -> Host:
        if gpu.node:
            return self._hosts[gpu.node]
        return self._hosts.setdefault(gpu.worker_id, Host(None, gpu.link_bytes_per_second))


def _division(way: Division, task: TaskSpec) -> Division | None:
    return way if way in task.divisions else None


def _reads(
    uses: Sequence[ComponentUse], moves: ResidencyPlan, specs: Mapping[ComponentKey, ComponentSpec]
) -> tuple[dict[ComponentKey, FileRead], dict[ComponentKey, FileRead]]:
    """What is wanted of each file before the run, and during it (the bytes of one pass)."""
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
    """What streams, with what was loaded of the same file before it."""
    return {
        key: FileRead(read.bytes + (loading[key].bytes if key in loading else 0), read.file_bytes)
        for key, read in streaming.items()
    }
