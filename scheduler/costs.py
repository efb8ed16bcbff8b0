"""Seconds and bytes: what a task would cost on a worker. Predicts with `pool.residency.plan`, learns from reports.

Completion time = wait + extra seconds + resident seconds; extra are upload, patch switches, streaming and what running
in parts adds, resident is the prior estimate of the run times a learnt ratio. What tasks of one signature would move on
a worker is remembered until the worker changes (`Worker.version`). A worker with little room runs a task in parts; the
way is the one that the worker itself will choose (`pool.division`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from pool.division import choose_division
from pool.outlook import NO_OUTLOOK, Outlook
from pool.residency import Residency, Resident, needed_bytes, plan
from pool.spec import ComponentKey, ComponentSpec, ComponentUse, Division, Stage, TaskReport, TaskSpec
from scheduler.workers import Worker

#: weight of the newest measurement in an exponential average. An assumption: about the last five count
NEWEST = 0.3
#: loads below this say more about latency than about the link
LEAST_LOAD_BYTES = 1 << 20
#: a smaller difference from what is known is noise, and not worth computing every prediction again
LEAST_DIFFERENCE = 0.02
#: a run that streams is taken to compute for at least this part of its time: copies and kernels overlap
LEAST_COMPUTING = 0.1
#: stage, uses, activation bytes and divisions: what a signature stands for
SignatureKey: TypeAlias = tuple[Stage, tuple[ComponentUse, ...], int, tuple[Division, ...]]
#: later stages bring a picture nearer to its end
STAGE_RANK: Mapping[Stage, int] = {Stage.ENCODE: 0, Stage.SAMPLE: 1, Stage.DECODE: 2}
#: predictions that one signature remembers; partly evicted components make many
MOST_PREDICTIONS = 64
#: signatures that are remembered when no task has them
SPARE_SIGNATURES = 256


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run would move on a worker.

    own_bytes       what of the used components is resident now
    room_bytes      what the weights of other components may keep while the task runs
    shrunk_bytes    what the used components themselves give up
    arrived         the used components as they are when it runs
    way             whole, or in which parts
    """

    upload_bytes: int
    streamed_bytes: int
    switches: int
    own_bytes: int
    room_bytes: int
    shrunk_bytes: int
    arrived: tuple[Resident, ...]
    way: Division

    def evicted_bytes(self, worker: Worker) -> int:
        """Bytes of weights that would leave `worker`."""
        return max(0, worker.used_bytes - self.own_bytes - self.room_bytes) + self.shrunk_bytes


@dataclass(slots=True, eq=False)
class RunKind:
    """What the length of a run depends on, besides its prior estimate: stage and components, not patches or size."""

    stage: Stage
    components: tuple[ComponentKey, ...]
    #: measured seconds / prior estimate, averaged; None until one was measured
    ratio: float | None = None


@dataclass(slots=True, eq=False)
class Known:
    """Extra seconds of a signature on a worker, and what they hold for."""

    version: int
    conditions: tuple[float, ...]
    seen: list[Resident | None]
    seconds: float


@dataclass(slots=True, eq=False)
class Signature:
    """What tasks have in common that cost the same to set up. One object for all tasks that wait or run with it."""

    stage: Stage
    uses: tuple[ComponentUse, ...]
    #: a task that has it: what it says of sizes and ways holds for all of them
    pattern: TaskSpec
    #: beside weights and activations
    scratch_bytes: int
    #: the smallest budget that it runs in, divided as far as it can be
    needed_bytes: int
    kind: RunKind
    rank: int
    #: tasks that have it
    tasks: int = 0
    #: capacity -> the way that a worker of that capacity runs it
    ways: dict[int, Division] = field(default_factory=dict)
    #: (capacity, entries of the used components) -> what a run would move
    predictions: dict[tuple[int, tuple[Resident | None, ...]], Setup] = field(default_factory=dict)
    known: dict[Worker, Known] = field(default_factory=dict)

    def way(self, capacity_bytes: int) -> Division:
        """Whole, or in which parts, a worker of this capacity runs it."""
        way = self.ways.get(capacity_bytes)
        if way is None:
            way = self.ways[capacity_bytes] = choose_division(self.pattern, capacity_bytes - self.scratch_bytes)
        return way

    def working_bytes(self, capacity_bytes: int) -> int:
        """What a run on a worker of this capacity needs beside weights."""
        return self.way(capacity_bytes).activation_bytes + self.scratch_bytes


def signature_key(spec: TaskSpec) -> SignatureKey:
    """What tasks have in common that cost the same to set up."""
    return (spec.stage, spec.uses, spec.activation_bytes, spec.divisions)


class Costs:
    """The sizes that are known and the seconds that were learnt."""

    def __init__(self, patch_switch_seconds: float) -> None:
        self._patch_switch_seconds = patch_switch_seconds
        self._signatures: dict[SignatureKey, Signature] = {}
        #: signatures that no task has, the first to be forgotten first
        self._spare: OrderedDict[Signature, None] = OrderedDict()
        self._kinds: dict[tuple[Stage, tuple[ComponentKey, ...]], RunKind] = {}
        self.components: dict[ComponentKey, ComponentSpec] = {}

    def know(self, components: tuple[ComponentSpec, ...]) -> None:
        """Take in sizes. New sizes for a known component hold from now on."""
        for spec in components:
            if self.components.get(spec.key, spec) != spec:
                for signature in self._signatures.values():
                    signature.predictions.clear()
                    signature.known.clear()
            self.components[spec.key] = spec

    def acquire(self, spec: TaskSpec) -> Signature:
        """The signature of a task; to be given back by `release`."""
        key = signature_key(spec)
        signature = self._signatures.get(key)
        if signature is None:
            components = tuple(use.component for use in spec.uses)
            kind = self._kinds.setdefault((spec.stage, components), RunKind(spec.stage, components))
            least_bytes = needed_bytes(spec.uses, spec.least_activation_bytes)
            scratch_bytes = needed_bytes(spec.uses, 0)
            signature = self._signatures[key] = Signature(
                spec.stage, spec.uses, spec, scratch_bytes, least_bytes, kind, STAGE_RANK[spec.stage]
            )
        elif signature.tasks == 0:
            del self._spare[signature]
        signature.tasks += 1
        return signature

    def release(self, signature: Signature) -> None:
        """A task that had it is forgotten. The last signatures without a task are kept for tasks to come."""
        signature.tasks -= 1
        if signature.tasks == 0:
            self._spare[signature] = None
            signature.known.clear()
            if len(self._spare) > SPARE_SIGNATURES:
                oldest, _ = self._spare.popitem(last=False)
                del self._signatures[signature_key(oldest.pattern)]

    def extra_seconds(self, task: TaskSpec, signature: Signature, worker: Worker) -> float | None:
        """Time beside waiting and the undivided run with all weights resident; None when it does not fit there."""
        known = signature.known.get(worker)
        if known is not None and known.version == worker.version:
            seconds: float | None = known.seconds
        else:
            seconds = self._moving_seconds(signature, worker, known)
        if seconds is None or not task.divisions:
            return seconds
        assert worker.capacity_bytes is not None, f"{worker.worker_id} never was up"
        slowdown = signature.way(worker.capacity_bytes).slowdown
        return seconds + (slowdown - 1.0) * self.resident_seconds(task, signature, worker)

    def _moving_seconds(self, signature: Signature, worker: Worker, known: Known | None) -> float | None:
        """Time to move weights before and during the run; `known` is what held for the worker before. None when it does
        not fit there."""
        seen = [worker.entries.get(use.component) for use in signature.uses]
        if known is not None and known.conditions == worker.conditions and known.seen == seen:
            known.version = worker.version  # what changed there does not concern this signature
            return known.seconds
        setup = self.setup(signature, worker)
        if setup is None:
            return None
        seconds = self.seconds_of(setup, worker)
        signature.known[worker] = Known(worker.version, worker.conditions, seen, seconds)
        return seconds

    def seconds_of(self, setup: Setup, worker: Worker) -> float:
        """Time to upload, to patch anew and to stream."""
        link_bytes = setup.upload_bytes + setup.streamed_bytes
        return link_bytes / worker.link_bytes_per_second + setup.switches * self._patch_switch_seconds

    def setup(self, signature: Signature, worker: Worker) -> Setup | None:
        """What to move on a live worker once its present run is over; None when it does not fit there."""
        capacity_bytes = worker.capacity_bytes
        assert capacity_bytes is not None, f"{worker.worker_id} never was up"
        if signature.needed_bytes > capacity_bytes:
            return None
        key = (capacity_bytes, tuple([worker.entries.get(use.component) for use in signature.uses]))
        setup = signature.predictions.get(key)
        if setup is None:
            if len(signature.predictions) >= MOST_PREDICTIONS:
                signature.predictions.clear()
            setup = signature.predictions[key] = predict(signature, key[1], capacity_bytes, self.components)
        return setup

    def makes_room(self, signature: Signature, worker: Worker) -> bool:
        """Whether weights of other components would have to leave a live worker that it fits on."""
        setup = self.setup(signature, worker)
        return setup is not None and worker.used_bytes - setup.own_bytes > setup.room_bytes

    def residency_after(self, signature: Signature, worker: Worker, outlook: Outlook = NO_OUTLOOK) -> Residency:
        """What `pool.residency.plan` leaves on a live worker; without asking it when nothing has to make room."""
        now, setup = worker.residency, self.setup(signature, worker)
        assert now is not None, f"{worker.worker_id} is not up"
        assert setup is not None, f"the task does not fit on {worker.worker_id}"
        if worker.used_bytes - setup.own_bytes > setup.room_bytes:
            return plan(now, signature.uses, self.components, setup.way.activation_bytes, outlook=outlook).after
        used = {use.component for use in signature.uses}
        others = [entry for entry in now.entries if entry.component not in used]
        return Residency(now.capacity_bytes, (*others, *setup.arrived))

    def resident_seconds(self, task: TaskSpec, signature: Signature, worker: Worker) -> float:
        """Time of the run on `worker` with all weights resident."""
        ratio = signature.kind.ratio
        return task.run_seconds if ratio is None else task.run_seconds * ratio

    def learn(self, task: TaskSpec, signature: Signature, worker: Worker, report: TaskReport) -> None:
        """Take in what a run that ended well took."""
        cost = report.cost
        link_seconds = cost.load_seconds - cost.patch_switches * self._patch_switch_seconds
        if cost.uploaded_bytes >= LEAST_LOAD_BYTES and link_seconds > 0:
            measured = cost.uploaded_bytes / link_seconds
            if abs(measured - worker.link_bytes_per_second) > LEAST_DIFFERENCE * measured:
                worker.learn_link(NEWEST, measured)
        if task.run_seconds > 0 and cost.run_seconds > 0:
            streaming_seconds = cost.streamed_bytes / worker.link_bytes_per_second
            computing_seconds = max(cost.run_seconds - streaming_seconds, LEAST_COMPUTING * cost.run_seconds)
            slowdown = 1.0 if cost.division is None else cost.division.slowdown
            measured = computing_seconds / (task.run_seconds * slowdown)
            known = measured if signature.kind.ratio is None else signature.kind.ratio
            signature.kind.ratio = known + NEWEST * (measured - known)


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
    )
