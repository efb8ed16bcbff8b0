"""Learned run times as multiples of the prior estimate, by kind of run, kind of GPU and size.

A kind of run is a stage with its components, without its patches. Measurements take precedence in this order: on this
kind of GPU for runs of this size, once there are `LEAST_OF_SIZE` of them; on this kind of GPU for all sizes; on other
kinds of GPU, scaled by relative speed. The relative speed is learned where both ran the same, else taken from a table
(`scheduler.model.gpu_kinds`), else 1. A kind of run without measurements takes its prior estimate divided by the speed
of the GPU in the table. Knows no workers, and bytes only as a measure of size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from modelpool.pool.values.specs.spec import ComponentKey, Stage, TaskSpec, WorkerSpec
from modelpool.scheduler.model.estimates import Estimate
from modelpool.scheduler.model.gpu_kinds import kind_of
from modelpool.scheduler.model.pool_memory import RememberedRuns, RememberedSize

#: measurements of one size before they count more than measurements of all sizes: of three, one may be wrong
LEAST_OF_SIZE = 3
#: measurements of the relative speed of two kinds of GPU before they count more than the table
LEAST_COMPARED = 3
#: a smaller relative change of speed is not worth computing everything again
LEAST_DIFFERENCE = 0.05
#: tasks in smaller runs, for each task of a batch, after which what was measured of that batch is forgotten: other load
#: on the machine decides that it did not pay, or drivers and temperatures change. A sixteenth of the tasks tries it
FORGOTTEN_AFTER = 32
#: kinds of run with times that outlive the core
MOST_REMEMBERED = 2048
#: device names that are remembered
MOST_NAMES = 256


@dataclass(slots=True)
class Measured:
    """Measured seconds over prior estimate, on one kind of GPU."""

    all_sizes: Estimate = field(default_factory=Estimate)
    of_size: dict[int, Estimate] = field(default_factory=dict)
    #: share of one task in batched runs; by batch size and size class
    of_batch: dict[tuple[int, int], Estimate] = field(default_factory=dict)
    #: tasks that ran alone or in smaller batches since such a batch was measured
    since_batch: dict[tuple[int, int], int] = field(default_factory=dict)

    def count_smaller(self, members: int, size: int) -> None:
        """A run of this many tasks ended: forget larger batches of this size class that were not measured for long."""
        for key in [key for key in self.of_batch if key[0] > members and key[1] == size]:
            self.since_batch[key] += members
            if self.since_batch[key] >= FORGOTTEN_AFTER * key[0]:
                del self.of_batch[key], self.since_batch[key]


@dataclass(slots=True, eq=False)
class RunKind:
    """The run time of a stage with its components, apart from prior estimate, size and GPU."""

    stage: Stage
    components: tuple[ComponentKey, ...]
    #: by kind of GPU
    measured: dict[str, Measured] = field(default_factory=dict)
    #: size class -> device name -> ratio; a cache
    ratios: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Ratio on the kind of GPU that it was measured on first, over all sizes; None without measurements."""
        for measured in self.measured.values():
            return measured.all_sizes.value
        return None

    def ratios_of(self, size: int) -> dict[str, float]:
        """`ratios` of one size class; always the same dictionary."""
        return self.ratios.setdefault(size, {})

    def forget_ratios(self) -> None:
        """Drop the cached ratios."""
        for of_size in self.ratios.values():
            of_size.clear()


def size_class(spec: TaskSpec) -> int:
    """Size class of a task. Runs of one kind with equal classes are within a factor of two in activation bytes, which
    grow with resolution and batch as the error of a prior estimate does. Steps make a run longer, not different."""
    return spec.activation_bytes.bit_length()


def gpu_name(spec: WorkerSpec | None) -> str:
    """The device name of the worker, for which run times are learned; "" if not reported."""
    return "" if spec is None else spec.device_name


class RunKinds:
    """All kinds of run, and the relative speeds of kinds of GPU."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Stage, tuple[ComponentKey, ...]], RunKind] = {}
        #: (GPU, other GPU) -> seconds on the first over seconds on the other; each pair once, by name
        self._compared: dict[tuple[str, str], Estimate] = {}
        #: the value that the cached `ratios` were computed with
        self._used_ratios: dict[tuple[str, str], float] = {}
        #: by device name: name of the kind, and its speed; 0 if unknown
        self._gpus: dict[str, tuple[str, float]] = {}

    def kind(self, stage: Stage, components: tuple[ComponentKey, ...]) -> RunKind:
        """The one object for this kind of run."""
        key = (stage, components)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = RunKind(stage, components)
        return kind

    def __iter__(self) -> Iterator[RunKind]:
        return iter(self._kinds.values())

    def ratio(self, kind: RunKind, device_name: str, size: int) -> float:
        """Seconds over prior estimate; cached in `kind.ratios`."""
        found = self._ratio(kind, device_name, size)
        kind.ratios_of(size)[device_name] = found
        return found

    def learn(self, kind: RunKind, device_name: str, size: int, measured: float, members: int = 1) -> None:
        """A run took `measured` times its prior estimate; in a batch, that is the share of one of its `members`."""
        gpu, _ = self._gpu(device_name)
        record = kind.measured.get(gpu)
        if record is None:
            record = kind.measured[gpu] = Measured()
        if record.of_batch:
            record.count_smaller(members, size)
        if members > 1:
            record.of_batch.setdefault((members, size), Estimate()).add(measured)
            record.since_batch[members, size] = 0
            if len(record.all_sizes):
                return  # the time of one task alone is known; until then, the share is the best estimate
        of_size = record.of_size.get(size)
        if of_size is None:
            of_size = record.of_size[size] = Estimate()
        all_sizes, few = record.all_sizes, len(of_size) < LEAST_OF_SIZE
        of_all_before, of_size_before = all_sizes.value, of_size.value
        all_sizes.add(measured)
        of_size.add(measured)
        if few or all_sizes.value != of_all_before or of_size.value != of_size_before:
            kind.forget_ratios()
        if len(kind.measured) > 1:
            for other in kind.measured:
                if other != gpu:
                    self._compare(kind, gpu, other)

    def remembered(self) -> tuple[RememberedRuns, ...]:
        """Return what was measured, of at most `MOST_REMEMBERED` kinds of run, those that came last."""
        kinds = tuple(self._kinds.values())[-MOST_REMEMBERED:]
        return tuple(
            RememberedRuns(
                kind.stage,
                kind.components,
                gpu,
                measured.all_sizes.measurements,
                (
                    *(RememberedSize(size, 1, each.measurements) for size, each in measured.of_size.items()),
                    *(
                        RememberedSize(size, members, each.measurements)
                        for (members, size), each in measured.of_batch.items()
                    ),
                ),
            )
            for kind in kinds
            for gpu, measured in kind.measured.items()
        )

    def remember(self, runs: Iterable[RememberedRuns]) -> None:
        """Take over what an earlier core has measured, where nothing was measured since."""
        for each in runs:
            kind = self.kind(each.stage, each.components)
            record = kind.measured.setdefault(each.gpu, Measured())
            record.all_sizes.fill(each.ratios)
            for one in each.sizes:
                if one.members == 1:
                    record.of_size.setdefault(one.size, Estimate()).fill(one.ratios)
                else:
                    record.of_batch.setdefault((one.members, one.size), Estimate()).fill(one.ratios)
                    record.since_batch.setdefault((one.members, one.size), 0)
            kind.forget_ratios()

    def batch_share(self, kind: RunKind, device_name: str, members: int, size: int) -> float:
        """Time per task in a batch of this many tasks of this size, as a multiple of the time of one alone. 1 until
        measured: a batch is then expected to save nothing."""
        measured = kind.measured.get(self._gpu(device_name)[0])
        shared = None if measured is None else measured.of_batch.get((members, size))
        if measured is None or shared is None or shared.value is None:
            return 1.0
        alone = _of_size(measured, size)
        return shared.value / alone if alone else 1.0

    def batch_runs(self, kind: RunKind, device_name: str, members: int, size: int) -> int:
        """Number of measured batches that count in `batch_share`."""
        measured = kind.measured.get(self._gpu(device_name)[0])
        shared = None if measured is None else measured.of_batch.get((members, size))
        return 0 if shared is None else len(shared)

    def measured_of_size(
        self, stage: Stage, components: tuple[ComponentKey, ...], device_name: str, size: int
    ) -> float | None:
        """Return seconds over prior estimate on this kind of GPU for runs of this size; None if none was measured."""
        kind = self._kinds.get((stage, components))
        measured = None if kind is None else kind.measured.get(self._gpu(device_name)[0])
        of_size = None if measured is None else measured.of_size.get(size)
        return None if of_size is None else of_size.value

    def unmeasured_seconds(self, spec: TaskSpec, worker: WorkerSpec) -> float:
        """Return the prior estimate of a run on this kind of GPU."""
        return spec.run_seconds / (self._gpu(worker.device_name)[1] or 1.0)

    def slowness(self, device_name: str, other_name: str) -> float:
        """Seconds on one kind of GPU over seconds on another."""
        (gpu, speed), (other, other_speed) = self._gpu(device_name), self._gpu(other_name)
        if gpu == other:
            return 1.0
        pair = (gpu, other) if gpu < other else (other, gpu)
        compared = self._compared.get(pair)
        if compared is not None and compared.value is not None and len(compared) >= LEAST_COMPARED:
            return compared.value if pair[0] == gpu else 1.0 / compared.value
        return other_speed / speed if speed and other_speed else 1.0

    def _ratio(self, kind: RunKind, device_name: str, size: int) -> float:
        gpu, speed = self._gpu(device_name)
        found = _of_size(kind.measured.get(gpu), size)
        if found is not None:
            return found
        elsewhere = [
            ratio * self.slowness(gpu, other)
            for other, measured in kind.measured.items()
            if (ratio := _of_size(measured, size)) is not None
        ]
        if elsewhere:
            return sorted(elsewhere)[len(elsewhere) // 2]
        return 1.0 / speed if speed else 1.0

    def _compare(self, kind: RunKind, gpu: str, other: str) -> None:
        """Both have run this kind: take in the ratio of their times."""
        pair = (gpu, other) if gpu < other else (other, gpu)
        first, second = (kind.measured[name].all_sizes.value for name in pair)
        assert first is not None, f"{kind} was measured on {pair[0]}"
        assert second is not None, f"{kind} was measured on {pair[1]}"
        estimate = self._compared.get(pair)
        if estimate is None:
            estimate = self._compared[pair] = Estimate()
        estimate.add(first / second)
        taken, value = self._used_ratios.get(pair, 0.0), estimate.value or 0.0
        if len(estimate) >= LEAST_COMPARED and abs(value - taken) > LEAST_DIFFERENCE * value:
            self._used_ratios[pair] = value
            for each in self._kinds.values():
                each.forget_ratios()

    def _gpu(self, device_name: str) -> tuple[str, float]:
        known = self._gpus.get(device_name)
        if known is None:
            kind = kind_of(device_name)
            if len(self._gpus) >= MOST_NAMES:
                self._gpus.clear()
            known = self._gpus[device_name] = (device_name, 0.0) if kind is None else (kind.name, kind.speed)
        return known


def _of_size(measured: Measured | None, size: int) -> float | None:
    if measured is None:
        return None
    of_size = measured.of_size.get(size)
    if of_size is not None and len(of_size) >= LEAST_OF_SIZE:
        return of_size.value
    return measured.all_sizes.value
