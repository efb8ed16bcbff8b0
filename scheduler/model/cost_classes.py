"""Cost classes: tasks that cost the same to load on a worker, and estimates of what loading moves.

One object for all waiting and running tasks of a class, so that each estimate is computed once for all. Pure byte
arithmetic over `pool.weights.plan.eviction_plan.plan`; seconds are in `scheduler.decisions.costs.cost_model`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from modelpool.pool.values.specs.execution_modes import choose_mode
from modelpool.pool.values.specs.spec import (
    ANY_FILE,
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    ExecutionMode,
    ReadFile,
    Stage,
    TaskSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Resident, needed_bytes
from modelpool.scheduler.model.nodes import Node, Reads
from modelpool.scheduler.model.run_kinds import RunKind, size_class
from modelpool.scheduler.model.workers import Worker

#: stage, uses, activation bytes and divisions: the identity of a cost class
CostClassKey: TypeAlias = tuple[Stage, tuple[ComponentUse, ...], int, tuple[ExecutionMode, ...], tuple[str, ...]]
#: a component with its patch set
Use: TypeAlias = tuple[ComponentKey, str]
#: capacity, entries of the used components, number of members, and the speeds of the links from the host and among them
PeerLoadKey: TypeAlias = tuple[int, tuple[Resident | None, ...], int, float, float]
#: later stages bring an image nearer to its end; operations take little time, and other tasks wait for them
STAGE_RANK: Mapping[Stage, int] = {Stage.ENCODE: 0, Stage.SAMPLE: 1, Stage.DECODE: 2, Stage.OPERATE: 2}
LAST_RANK = max(STAGE_RANK.values())
#: predictions that one cost class remembers; partly evicted components create many
MOST_PREDICTIONS = 64


@dataclass(slots=True)
class LoadEstimate:
    """The transfers of a run on a worker. One is created for every worker that a task is compared with.

    present_bytes       bytes of the used components that are resident now
    room_bytes          bytes that the weights of other components may keep while the task runs
    self_evicted_bytes  bytes of the used components that are evicted
    arrived             the used components as they are during the run
    mode                execution mode: full or divided
    reads               files that weights and patches come from, and bytes of each; empty if everything is on the GPU
    """

    upload_bytes: int
    streamed_bytes: int
    switches: int
    present_bytes: int
    room_bytes: int
    self_evicted_bytes: int
    arrived: tuple[Resident, ...]
    mode: ExecutionMode
    reads: Reads

    def evicted_bytes(self, worker: Worker) -> int:
        """Bytes of weights that would be evicted from `worker`."""
        return max(0, worker.used_bytes - self.present_bytes - self.room_bytes) + self.self_evicted_bytes


@dataclass(slots=True, eq=False)
class PeerLoad:
    """The transfers of a member of a gang that holds weights for the others, and gets weights from these.

    load             as of a run alone; the share is part of `upload_bytes`, and `streamed_bytes` are from the host
    share_bytes      of the GPU, held during the run
    exchanged_bytes  over the link among members during the run
    """

    load: Final[LoadEstimate]
    share_bytes: Final[int]
    exchanged_bytes: Final[int]


@dataclass(slots=True, eq=False)
class FullyResident:
    """The components of a cost class, fully resident with its patches.

    parts    its uses, the sizes of their components, and the LoRAs of their patches with the bytes read of each
    arrived  their entries then
    """

    weight_bytes: Final[int]
    parts: Final[tuple[tuple[ComponentUse, ComponentSpec, Mapping[ComponentKey, int]], ...]]
    arrived: Final[tuple[Resident, ...]]


@dataclass(slots=True, eq=False)
class CachedEstimate:
    """The cached load estimate of a cost class on a worker, its extra seconds, and the state that both are valid for.

    link_bytes_per_second, capacity_bytes  of the worker, as `load` and `seconds` were computed with
    used_entries  entries of the used components
    node          the machine of the worker
    files         the same if `seconds` depends on which files it has in memory, as of `files_version`
    """

    version: int
    link_bytes_per_second: float
    capacity_bytes: int
    used_entries: tuple[Resident | None, ...]
    load: LoadEstimate
    seconds: float
    node: Node | None
    files: Node | None
    files_version: int

    def matches_entries(self, cost_class: CostClass, entries: dict[ComponentKey, Resident]) -> bool:
        """Whether the entries of the used components are unchanged."""
        for place, key in enumerate(cost_class.components):
            there, before = entries.get(key), self.used_entries[place]
            if there is not before and (there is None or before is None or there != before):
                return False
        return True

    def holds(self, worker: Worker) -> bool:
        """Whether it is still valid for that worker."""
        return self.version == worker.version and (self.files is None or self.files.version == self.files_version)


@dataclass(slots=True, eq=False)
class CostClass:
    """Tasks that cost the same to load on a worker. One object for all waiting and running tasks of the class."""

    stage: Stage
    uses: tuple[ComponentUse, ...]
    #: of `uses`
    components: tuple[ComponentKey, ...]
    #: the first of `uses`; None for a task that uses no component
    first_use: Use | None
    #: LoRAs of the patch sets of `uses`
    adapters: frozenset[ComponentKey]
    #: both: all that is read from files, each with its file
    files: tuple[ReadFile, ...]
    #: a task of the class: its sizes and divisions hold for all of them
    pattern: TaskSpec
    #: `sizes_of` that task
    sizes: Hashable
    #: besides weights and activations
    scratch_bytes: int
    #: the smallest budget that it runs in, in its most divided mode
    needed_bytes: int
    kind: RunKind
    rank: int
    #: size class that its run times are learned for
    size: int
    #: `RunKind.ratios` of that size class
    ratios: dict[str, float]
    #: number of its tasks that workers have
    on_workers: int = 0
    #: number of all its tasks, and the sum of their prior estimates
    tasks: int = 0
    prior_seconds: float = 0.0
    #: the same of all tasks that were added since autoscaling looked
    arrived_seconds: float = 0.0
    #: capacity -> execution mode on a worker of that capacity
    modes: dict[int, ExecutionMode] = field(default_factory=dict)
    #: its components if there is room for all of them; computed on first use
    fully_resident: FullyResident | None = None
    #: capacity -> estimate with nothing of it resident: the case of most workers of a large pool
    cold: dict[int, LoadEstimate] = field(default_factory=dict)
    #: capacity -> estimate with everything resident as needed
    warm: dict[int, LoadEstimate] = field(default_factory=dict)
    #: (capacity, entries of the used components) -> estimate where there is less room
    predictions: dict[tuple[int, tuple[Resident | None, ...]], LoadEstimate] = field(default_factory=dict)
    #: the same of members of gangs; None where they hold nothing for each other
    peer_loads: dict[PeerLoadKey, PeerLoad | None] = field(default_factory=dict)
    cached: dict[Worker, CachedEstimate] = field(default_factory=dict)

    def mode(self, capacity_bytes: int) -> ExecutionMode:
        """The execution mode on a worker of this capacity."""
        mode = self.modes.get(capacity_bytes)
        if mode is None:
            mode = self.modes[capacity_bytes] = choose_mode(self.pattern, capacity_bytes - self.scratch_bytes)
        return mode

    def files_of(self, reads: Reads) -> list[ReadFile]:
        """The files of these components."""
        names = dict(self.files)
        return [(key, names.get(key, ANY_FILE)) for key, _ in reads]

    def forget_sizes(self) -> None:
        """Drop all estimates: sizes of components changed."""
        self.fully_resident = None
        self.cold.clear()
        self.warm.clear()
        self.predictions.clear()
        self.peer_loads.clear()
        self.cached.clear()

    def working_bytes(self, capacity_bytes: int) -> int:
        """Bytes that a run on a worker of this capacity needs besides weights."""
        return self.mode(capacity_bytes).activation_bytes + self.scratch_bytes


def cost_class_key(spec: TaskSpec) -> CostClassKey:
    """The identity of the task's cost class."""
    return (spec.stage, spec.uses, spec.activation_bytes, spec.divisions, spec.file_names)


def sizes_of(spec: TaskSpec) -> Hashable:
    """Stage, components and patches of a task: besides activations, what its memory depends on."""
    return (spec.stage, tuple([(use.component, use.patch_digest) for use in spec.uses]))


def new_cost_class(spec: TaskSpec, kind: RunKind) -> CostClass:
    """Create the cost class of this task, with no tasks yet."""
    return CostClass(
        stage=spec.stage,
        uses=spec.uses,
        components=kind.components,
        first_use=(spec.uses[0].component, spec.uses[0].patch_digest) if spec.uses else None,
        adapters=frozenset([adapter for use in spec.uses for adapter in use.adapters]),
        files=spec.files,
        pattern=spec,
        sizes=sizes_of(spec),
        scratch_bytes=needed_bytes(spec.uses, 0),
        needed_bytes=needed_bytes(spec.uses, spec.least_activation_bytes),
        kind=kind,
        rank=STAGE_RANK[spec.stage],
        size=size_class(spec),
        ratios=kind.ratios_of(size_class(spec)),
    )
