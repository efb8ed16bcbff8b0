"""What tasks have in common that cost the same to set up, and what setting them up would move. Pure byte arithmetic.

A signature is one object for all tasks that wait or run with it, so that what is reckoned for one holds for all. Asks
`pool.residency.plan`; knows no seconds (`scheduler.costs`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pool.division import choose_division
from pool.residency import Residency, ResidencyPlan, Resident, needed_bytes, plan, upload_bytes_of
from pool.spec import ComponentKey, ComponentSpec, ComponentUse, Division, Stage, TaskSpec
from scheduler.nodes import Node, Reads
from scheduler.run_kinds import RunKind, size_class
from scheduler.workers import Worker

#: stage, uses, activation bytes and divisions: what a signature stands for
SignatureKey: TypeAlias = tuple[Stage, tuple[ComponentUse, ...], int, tuple[Division, ...]]
#: a component with its patch set
Use: TypeAlias = tuple[ComponentKey, str]
#: later stages bring a picture nearer to its end
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


def predict(
    signature: Signature,
    seen: tuple[Resident | None, ...],
    capacity_bytes: int,
    components: Mapping[ComponentKey, ComponentSpec],
) -> Setup:
    """What a run would move on a GPU with these entries of the components that it uses.

    With nothing leased, what is resident of other components decides what is evicted and nothing else: the plan is made
    without them, and the room that it leaves them is kept. The signature must fit in `capacity_bytes`.
    """
    is_cold, is_warm, whole = True, False, signature.whole
    for entry in seen:
        if entry is not None:
            is_cold = False
    setup = None
    if is_cold:
        setup = signature.cold.get(capacity_bytes)
    elif whole is not None and seen == whole.arrived:
        is_warm = True
        setup = signature.warm.get(capacity_bytes)
    if setup is None:
        setup = predict_whole(signature, seen, capacity_bytes, components)
        if is_warm and setup is not None:
            signature.warm[capacity_bytes] = setup
    if setup is None:
        key = (capacity_bytes, seen)
        setup = signature.predictions.get(key)
        if setup is None:
            if len(signature.predictions) >= MOST_PREDICTIONS:
                signature.predictions.clear()
            setup = signature.predictions[key] = predict_by_plan(signature, seen, capacity_bytes, components)
    if is_cold:
        signature.cold[capacity_bytes] = setup
    return setup


def predict_by_plan(
    signature: Signature,
    seen: tuple[Resident | None, ...],
    capacity_bytes: int,
    components: Mapping[ComponentKey, ComponentSpec],
) -> Setup:
    """`predict`, by asking the plan itself: right for all cases."""
    own = tuple(entry for entry in seen if entry is not None)
    way = signature.way(capacity_bytes)
    moves = plan(Residency(capacity_bytes, own), signature.uses, components, way.activation_bytes)
    return Setup(
        upload_bytes=moves.upload_bytes,
        streamed_bytes=moves.streamed_bytes,
        switches=len(moves.switched),
        own_bytes=sum(entry.resident_bytes for entry in own),
        room_bytes=capacity_bytes - way.activation_bytes - signature.scratch_bytes - moves.after.used_bytes,
        shrunk_bytes=moves.evicted_bytes,
        arrived=moves.after.entries,
        way=way,
        reads=files_read(signature.uses, moves, components),
    )


def predict_whole(
    signature: Signature,
    seen: tuple[Resident | None, ...],
    capacity_bytes: int,
    components: Mapping[ComponentKey, ComponentSpec],
) -> Setup | None:
    """`predict`, where there is room for all components whole: then a plan is a sum, made here without asking for one.
    None where there is not, or where more is resident than a component has."""
    whole = signature.whole
    if whole is None:
        whole = signature.whole = _whole(signature.uses, components)
    way = signature.way(capacity_bytes)
    room_bytes = capacity_bytes - way.activation_bytes - signature.scratch_bytes - whole.weight_bytes
    if room_bytes < 0:
        return None
    uploaded_bytes = switches = own_bytes = 0
    reads: list[tuple[ComponentKey, int]] = []
    is_lora_read = False
    for place, (use, spec, loras) in enumerate(whole.parts):
        before = seen[place]
        if before is None:
            read_bytes = spec.upload_bytes
        else:
            held_bytes, weight_bytes = before.resident_bytes, spec.weight_bytes
            own_bytes += held_bytes
            if before.patch_digest != use.patch_digest:
                switches += 1
            elif held_bytes == weight_bytes:
                continue
            if held_bytes > weight_bytes:
                return None
            read_bytes = upload_bytes_of(before, use, spec, weight_bytes)
        if read_bytes:
            uploaded_bytes += read_bytes
            reads.append((spec.key, read_bytes))
            if loras:
                reads += loras.items()
                is_lora_read = True
    files = tuple(dict(reads).items()) if is_lora_read else tuple(reads)  # several may read one LoRA
    return Setup(uploaded_bytes, 0, switches, own_bytes, room_bytes, 0, whole.arrived, way, files)


def _whole(uses: Iterable[ComponentUse], components: Mapping[ComponentKey, ComponentSpec]) -> Whole:
    parts = tuple((use, components[use.component], _lora_reads(use, components)) for use in uses)
    arrived = tuple(
        Resident(use.component, spec.weight_bytes, use.patch_digest, use.patched_bytes) for use, spec, _ in parts
    )
    return Whole(sum(spec.weight_bytes for _, spec, _ in parts), parts, arrived)


def _lora_reads(use: ComponentUse, components: Mapping[ComponentKey, ComponentSpec]) -> dict[ComponentKey, int]:
    """What is read of LoRAs where these patches are applied anew. Those of unknown size are left out."""
    return {adapter: components[adapter].upload_bytes for adapter in use.adapters if adapter in components}


def files_read(
    uses: Iterable[ComponentUse], moves: ResidencyPlan, components: Mapping[ComponentKey, ComponentSpec]
) -> Reads:
    """What a run with these moves reads on the host: of components what is uploaded or streams, and the whole LoRAs of
    those patch sets that are applied anew. LoRAs of unknown size are left out."""
    uploads = {move.component: move.bytes for move in moves.upload}
    reads: dict[ComponentKey, int] = {}
    for use in uses:
        spec, after = components[use.component], moves.after.of(use.component)
        resident_bytes = 0 if after is None else after.resident_bytes
        streams_bytes = spec.upload_bytes * (spec.weight_bytes - resident_bytes) // spec.weight_bytes
        read_bytes = min(uploads.get(use.component, 0) + streams_bytes, spec.upload_bytes)
        if read_bytes:
            reads[use.component] = read_bytes
            reads.update(_lora_reads(use, components))
    return tuple(reads.items())
