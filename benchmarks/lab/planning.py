"""Plans a batch that is completely known: which jobs on which GPU, in which order, so that little is loaded.

Jobs that need the same components form a line. A line goes to one GPU as a whole if it can be done there within the
horizon; if not, as much of it as the emptiest GPU can do, and so on: each further GPU loads it once more. Within a
line, jobs with equal patches and equal prompts are neighbours. The horizon is a given multiple of the least makespan,
increased by steps until everything has a place. Pure: the same jobs and GPUs give the same plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import inf

from modelpool.benchmarks.lab.bounds import least_load_seconds, least_makespan_seconds
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, JobSpec, Stage, TaskId, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.scheduler.simulator.machines import SimulatedGpu

#: the horizon grows by this part if a plan does not fit in it
STRETCH = 1.03

Line = tuple[ComponentKey, ...]
#: component, digest of its patches, bytes that these patch
Patched = tuple[ComponentKey, str, int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Jobs of one line that stay together: neighbours with equal patches and a common encode."""

    line: Line
    jobs: tuple[JobSpec, ...]
    work_seconds: float
    patches: tuple[Patched, ...]
    needed_bytes: int


@dataclass(slots=True)
class Share:
    """The plan of one GPU. `busy_seconds` are at its speed, over its link."""

    gpu: SimulatedGpu
    busy_seconds: float
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The tasks of each GPU in order, and their jobs.

    horizon_seconds  within which each GPU should be done
    """

    tasks: tuple[tuple[TaskSpec, ...], ...]
    jobs: tuple[tuple[JobSpec, ...], ...]
    busy_seconds: tuple[float, ...]
    horizon_seconds: float


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of loading, in seconds on a GPU."""

    components: Mapping[ComponentKey, ComponentSpec]
    patch_switch_seconds: float


class Stretch:
    """Successive chunks of one line, with prefix sums for the time of the first `count` of them on any GPU."""

    def __init__(self, chunks: Sequence[Chunk], prices: Prices) -> None:
        self.chunks = tuple(chunks)
        self._arriving_bytes = sum(prices.components[key].upload_bytes for key in chunks[0].line)
        self._patch_switch_seconds = prices.patch_switch_seconds
        changes = [(0, 0), *[_changes(before, after, prices) for before, after in pairwise(chunks)]]
        self._work_seconds = list(accumulate(chunk.work_seconds for chunk in chunks))
        self._switches = list(accumulate(switches for switches, _ in changes))
        self._switched_bytes = list(accumulate(switched_bytes for _, switched_bytes in changes))
        self._needed_bytes = list(accumulate((chunk.needed_bytes for chunk in chunks), max))

    def after(self, share: Share, count: int) -> float:
        """When the GPU would be done with the first `count` too; infinite if one of them does not fit."""
        gpu, last = share.gpu, count - 1
        if self._needed_bytes[last] > gpu.capacity_bytes:
            return inf
        moved_bytes = self._arriving_bytes + self._switched_bytes[last]
        seconds = share.busy_seconds + moved_bytes / gpu.link_bytes_per_second
        return seconds + self._switches[last] * self._patch_switch_seconds + self._work_seconds[last] / gpu.speed

    def most(self, share: Share, horizon: float) -> int:
        """The number of first chunks that the GPU can do within the horizon."""
        return bisect_right(range(1, len(self.chunks) + 1), horizon, key=lambda count: self.after(share, count))


def plan_batch(
    jobs: Sequence[JobSpec],
    gpus: Sequence[SimulatedGpu],
    busy_seconds: Sequence[float],
    prices: Prices,
    factor: float,
) -> BatchPlan:
    """Distribute the jobs over GPUs that are busy with earlier plans for `busy_seconds`.

    Every job must fit on one of the GPUs. A makespan below `factor` times the lower bound is not tried; the first
    feasible one from there on is taken.
    """
    chunks = cut_in_chunks(jobs)
    load_seconds = least_load_seconds(jobs, gpus, prices.components, prices.patch_switch_seconds)
    speed = sum(gpu.speed for gpu in gpus)
    before_seconds = sum(busy * gpu.speed for busy, gpu in zip(busy_seconds, gpus, strict=True)) / speed
    horizon = factor * least_makespan_seconds(jobs, gpus, load_seconds) + before_seconds
    while (shares := _share_out(chunks, gpus, busy_seconds, prices, horizon)) is None:
        horizon *= STRETCH
    return BatchPlan(
        tuple(tuple(_in_order(share, prices)) for share in shares),
        tuple(tuple(job for chunk in share.chunks for job in chunk.jobs) for share in shares),
        tuple(share.busy_seconds for share in shares),
        horizon,
    )


def cut_in_chunks(jobs: Sequence[JobSpec]) -> list[Chunk]:
    """All jobs, line by line, with equal patches and equal prompts next to each other."""
    keys = {job.job_id: _key(job) for job in jobs}
    ordered = sorted(jobs, key=lambda job: keys[job.job_id])
    return [_chunk(tuple(members)) for _, members in groupby(ordered, lambda job: keys[job.job_id])]


def _key(job: JobSpec) -> tuple[Line, tuple[Patched, ...], TaskId]:
    """The common identity of the jobs of one chunk."""
    uses = {(use.component, use.patch_digest, use.patched_bytes) for task in job.tasks for use in task.uses}
    return tuple(sorted({component for component, _, _ in uses})), tuple(sorted(uses)), job.tasks[0].task_id


def _chunk(jobs: tuple[JobSpec, ...]) -> Chunk:
    line, patches, _ = _key(jobs[0])
    tasks = {task.task_id: task for job in jobs for task in job.tasks}.values()
    return Chunk(
        line,
        jobs,
        sum(task.run_seconds for task in tasks),
        patches,
        max(needed_bytes(task.uses, task.least_activation_bytes) for task in tasks),
    )


def _changes(before: Chunk, after: Chunk, prices: Prices) -> tuple[int, int]:
    """Components that get other patches between two chunks of a line, and the bytes that this moves."""
    touched = {component: patched_bytes for component, _, patched_bytes in before.patches}
    changed = set(after.patches) - set(before.patches)
    moved_bytes = 0
    for component, _, patched_bytes in sorted(changed):
        spec = prices.components[component]
        weights_bytes = min(spec.weight_bytes, touched.get(component, 0) + patched_bytes)
        moved_bytes += weights_bytes * spec.upload_bytes // spec.weight_bytes
    return len(changed), moved_bytes


def _share_out(
    chunks: Sequence[Chunk],
    gpus: Sequence[SimulatedGpu],
    busy_seconds: Sequence[float],
    prices: Prices,
    horizon: float,
) -> list[Share] | None:
    """Every chunk on a GPU that is done within the horizon; None if that is impossible."""
    shares = [Share(gpu, busy, []) for gpu, busy in zip(gpus, busy_seconds, strict=True)]
    lines = [list(members) for _, members in groupby(chunks, lambda chunk: chunk.line)]
    lines.sort(key=lambda line: (-sum(chunk.work_seconds for chunk in line), line[0].line))
    for left in lines:
        while left:
            stretch = Stretch(left, prices)
            ends = [(stretch.after(share, len(left)), place) for place, share in enumerate(shares)]
            count = len(left)
            # if all of it can be done, the fullest: room is left where a later line may need it
            end, place = max((found for found in ends if found[0] <= horizon), default=(inf, 0))
            if end == inf:
                end, place = min((stretch.after(share, 1), place) for place, share in enumerate(shares))
                count = stretch.most(shares[place], horizon)
            if count == 0:
                if len(left[0].jobs) == 1:
                    return None
                left = _cut(left)
                continue
            shares[place].busy_seconds = stretch.after(shares[place], count)
            shares[place].chunks += left[:count]
            left = left[count:]
    return shares


def _cut(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The first chunk in two halves, each of which needs the encode."""
    jobs = chunks[0].jobs
    middle = len(jobs) // 2
    return [_chunk(jobs[:middle]), _chunk(jobs[middle:]), *chunks[1:]]


def _in_order(share: Share, prices: Prices) -> Iterator[TaskSpec]:
    """Line by line: job by job if all components of the line stay, else stage by stage."""
    for line, members in groupby(share.chunks, lambda chunk: chunk.line):
        jobs = [job for chunk in members for job in chunk.jobs]
        tasks = {task.task_id: task for job in jobs for task in job.tasks}
        weights_bytes = sum(prices.components[key].weight_bytes for key in line)
        working_bytes = max(needed_bytes(task.uses, task.activation_bytes) for task in tasks.values())
        if weights_bytes + working_bytes <= share.gpu.capacity_bytes:
            yield from tasks.values()
            continue
        for stage in Stage:
            # uses in the order of patches, so that each set comes once
            yield from sorted(
                (task for task in tasks.values() if task.stage is stage), key=lambda task: _patches(task.uses)
            )


def _patches(uses: Sequence[ComponentUse]) -> tuple[tuple[ComponentKey, str], ...]:
    return tuple((use.component, use.patch_digest) for use in uses)
