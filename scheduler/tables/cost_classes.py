"""What tasks have in common that cost the same to set up, and what setting them up would move. Pure byte arithmetic.

A signature is one object for all tasks that wait or run with it, so that what is reckoned for one holds for all. Asks
`pool.plan.residency.plan`; knows no seconds (`scheduler.costs.cost_model`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from modelpool.pool.plan.residency import Resident, needed_bytes
from modelpool.pool.specs.division import choose_division
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Division, Stage, TaskSpec
from modelpool.scheduler.tables.nodes import Node, Reads
from modelpool.scheduler.tables.run_kinds import RunKind, size_class
from modelpool.scheduler.tables.workers import Worker

#: stage, uses, activation bytes and divisions: what a signature stands for
SignatureKey: TypeAlias = tuple[Stage, tuple[ComponentUse, ...], int, tuple[Division, ...]]
#: a component with its patch set
Use: TypeAlias = tuple[ComponentKey, str]
#: later stages bring an image nearer to its end
STAGE_RANK: Mapping[Stage, int] = {Stage.ENCODE: 0, Stage.SAMPLE: 1, Stage.DECODE: 2}
LAST_RANK = max(STAGE_RANK.values())
#: predictions that one signature remembers; partly evicted components make many
MOST_PREDICTIONS = 64


@dataclass(slots=True, init=False)
class Setup:
    """What a run would move on a worker. Made for every worker that a task is held against: its `__init__` is
    written out because the one that a dataclass gets is never compiled.

    own_bytes       what of the used components is resident now
    room_bytes      what the weights of other components may keep while the task runs
    shrunk_bytes    what the used components themselves give up
    arrived         the used components as they are when it runs
    way             whole, or in which parts
    reads           files that weights and patches come from, and bytes of each; empty when all is on the GPU
    """

    upload_bytes: int
    streamed_bytes: int
    switches: int
    own_bytes: int
    room_bytes: int
    shrunk_bytes: int
    arrived: tuple[Resident, ...]
    way: Division
    reads: Reads

    def __init__(
        self,
        upload_bytes: int,
        streamed_bytes: int,
        switches: int,
        own_bytes: int,
        room_bytes: int,
        shrunk_bytes: int,
        arrived: tuple[Resident, ...],
        way: Division,
        reads: Reads,
    ) -> None:
        self.upload_bytes = upload_bytes
        self.streamed_bytes = streamed_bytes
        self.switches = switches
        self.own_bytes = own_bytes
        self.room_bytes = room_bytes
        self.shrunk_bytes = shrunk_bytes
        self.arrived = arrived
        self.way = way
        self.reads = reads

    def evicted_bytes(self, worker: Worker) -> int:
        """Bytes of weights that would leave `worker`."""
        return max(0, worker.used_bytes - self.own_bytes - self.room_bytes) + self.shrunk_bytes


@dataclass(slots=True, init=False, eq=False)
class Whole:
    """The components of a signature when all of them are whole and carry its patches.

    parts    its uses, the sizes of their components, and the LoRAs that their patches are made of, as they are read
    arrived  how they are then
    """

    weight_bytes: Final[int]
    parts: Final[tuple[tuple[ComponentUse, ComponentSpec, Mapping[ComponentKey, int]], ...]]
    arrived: Final[tuple[Resident, ...]]

    def __init__(
        self,
        weight_bytes: int,
        parts: tuple[tuple[ComponentUse, ComponentSpec, Mapping[ComponentKey, int]], ...],
        arrived: tuple[Resident, ...],
    ) -> None:
        self.weight_bytes = weight_bytes
        self.parts = parts
        self.arrived = arrived


@dataclass(slots=True, eq=False, init=False)
class Known:
    """What a signature would move on a worker, the extra seconds of that, and what both hold for.

    link_bytes_per_second, capacity_bytes   of the worker, as `setup` and `seconds` were reckoned with
    seen    entries of the used components
    node    the machine of the worker
    files   the same where `seconds` depends on which files it has in memory, as they were at `files_version`
    """

    version: int
    link_bytes_per_second: float
    capacity_bytes: int
    seen: tuple[Resident | None, ...]
    setup: Setup
    seconds: float
    node: Node | None
    files: Node | None
    files_version: int

    def __init__(
        self,
        version: int,
        link_bytes_per_second: float,
        capacity_bytes: int,
        seen: tuple[Resident | None, ...],
        setup: Setup,
        seconds: float,
        node: Node | None,
        files: Node | None,
        files_version: int,
    ) -> None:
        self.version = version
        self.link_bytes_per_second = link_bytes_per_second
        self.capacity_bytes = capacity_bytes
        self.seen = seen
        self.setup = setup
        self.seconds = seconds
        self.node = node
        self.files = files
        self.files_version = files_version

    def has_seen(self, signature: Signature, entries: dict[ComponentKey, Resident]) -> bool:
        """Whether the entries of the used components are what they were."""
        for place, key in enumerate(signature.components):
            there, before = entries.get(key), self.seen[place]
            if there is not before and (there is None or before is None or there != before):
                return False
        return True

    def holds(self, worker: Worker) -> bool:
        """Whether it is still so on that worker."""
        return self.version == worker.version and (self.files is None or self.files.version == self.files_version)


@dataclass(slots=True, eq=False)
class Signature:
    """What tasks have in common that cost the same to set up. One object for all tasks that wait or run with it."""

    stage: Stage
    uses: tuple[ComponentUse, ...]
    #: of `uses`
    components: tuple[ComponentKey, ...]
    #: the first of `uses`; None for a task that uses no component
    first_use: Use | None
    #: LoRAs of the patch sets of `uses`
    adapters: frozenset[ComponentKey]
    #: a task that has it: what it says of sizes and ways holds for all of them
    pattern: TaskSpec
    #: `sizes_of` that task
    sizes: Hashable
    #: beside weights and activations
    scratch_bytes: int
    #: the smallest budget that it runs in, divided as far as it can be
    needed_bytes: int
    kind: RunKind
    rank: int
    #: class of sizes that its runs are learnt for
    size: int
    #: `RunKind.ratios` of that size
    ratios: dict[str, float]
    #: tasks that have it
    tasks: int = 0
    #: capacity -> the way that a worker of that capacity runs it
    ways: dict[int, Division] = field(default_factory=dict)
    #: what it comes to where there is room for all; made when it is first asked for
    whole: Whole | None = None
    #: capacity -> what a run would move where nothing of it is resident: on most workers of a large pool
    cold: dict[int, Setup] = field(default_factory=dict)
    #: the same where all of it is there as it should be
    warm: dict[int, Setup] = field(default_factory=dict)
    #: (capacity, entries of the used components) -> what a run would move where there is less room
    predictions: dict[tuple[int, tuple[Resident | None, ...]], Setup] = field(default_factory=dict)
    known: dict[Worker, Known] = field(default_factory=dict)

    def way(self, capacity_bytes: int) -> Division:
        """Whole, or in which parts, a worker of this capacity runs it."""
        way = self.ways.get(capacity_bytes)
        if way is None:
            way = self.ways[capacity_bytes] = choose_division(self.pattern, capacity_bytes - self.scratch_bytes)
        return way

    def forget_sizes(self) -> None:
        """Sizes of components are not what they were."""
        self.whole = None
        self.cold.clear()
        self.warm.clear()
        self.predictions.clear()
        self.known.clear()

    def working_bytes(self, capacity_bytes: int) -> int:
        """What a run on a worker of this capacity needs beside weights."""
        return self.way(capacity_bytes).activation_bytes + self.scratch_bytes


def signature_key(spec: TaskSpec) -> SignatureKey:
    """What tasks have in common that cost the same to set up."""
    return (spec.stage, spec.uses, spec.activation_bytes, spec.divisions)


def sizes_of(spec: TaskSpec) -> Hashable:
    """Which weights a task uses for what: beside activations, what the memory that it takes depends on."""
    return (spec.stage, tuple([(use.component, use.patch_digest) for use in spec.uses]))


def new_signature(spec: TaskSpec, kind: RunKind) -> Signature:
    """The signature of this task, which no task has yet."""
    return Signature(
        stage=spec.stage,
        uses=spec.uses,
        components=kind.components,
        first_use=(spec.uses[0].component, spec.uses[0].patch_digest) if spec.uses else None,
        adapters=frozenset([adapter for use in spec.uses for adapter in use.adapters]),
        pattern=spec,
        sizes=sizes_of(spec),
        scratch_bytes=needed_bytes(spec.uses, 0),
        needed_bytes=needed_bytes(spec.uses, spec.least_activation_bytes),
        kind=kind,
        rank=STAGE_RANK[spec.stage],
        size=size_class(spec),
        ratios=kind.ratios_of(size_class(spec)),
    )
