"""Lower bounds for any policy, even with all jobs known. Pure functions of jobs, GPUs and sizes.

The bounds in seconds are for a batch, and hold for every schedule in the simulated cluster, including the default and
the clairvoyant one: equal task ids count once, provided results and tasks that no wanted result depends on take no
time, everything that may be batched is, nothing is resident at first, and starting workers takes no time. Runs take the
seconds of their tasks: the bounds do not hold where chance shortens them (`Disturbances.run_factor`), nor where memory
loads nothing (`NothingLoads`). No schedule need reach them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from modelpool.benchmarks.lab.caches import fewest_loads
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, JobSpec, TaskId, TaskSpec
from modelpool.scheduler.simulator.machines import SimulatedGpu


def least_load_seconds(
    jobs: Iterable[JobSpec],
    gpus: Sequence[SimulatedGpu],
    components: Mapping[ComponentKey, ComponentSpec],
    patch_switch_seconds: float = 0.05,
) -> float:
    """The fewest GPU-seconds that all GPUs together spend on moving weights, before runs or streaming in them.

    Each used component crosses some link at least once, completely. Each patch set of it beyond the first needs either
    a switch with the bytes that it patches, or another complete load. Everything at the rate of the fastest link.
    """
    fastest = max((gpu.link_bytes_per_second for gpu in gpus), default=1.0)
    seconds = 0.0
    for key, uses in _by_component(jobs).items():
        spec = components[key]
        arrival_seconds = spec.upload_bytes / fastest
        sets: dict[str, int] = {}
        for use in uses:
            sets[use.patch_digest] = min(sets.get(use.patch_digest, use.patched_bytes), use.patched_bytes)
        # one of the sets comes with the first load: the one that would cost most
        switched = sorted(sets.values())[:-1]
        seconds += arrival_seconds + sum(
            min(
                arrival_seconds,
                patch_switch_seconds + touched_bytes * spec.upload_bytes / spec.weight_bytes / fastest,
            )
            for touched_bytes in switched
        )
    return seconds


def least_makespan_seconds(jobs: Sequence[JobSpec], gpus: Sequence[SimulatedGpu], load_seconds: float = 0.0) -> float:
    """The earliest end of a batch from when all GPUs are up: all work divided evenly by speed, with at least
    `load_seconds` GPU-seconds of loading in total; and no job earlier than its longest chain on the fastest GPU. If
    a further task of a batch costs less than one alone, all tasks with the same weights are one batch."""
    speeds = [gpu.speed for gpu in gpus]
    if not speeds:
        return 0.0
    work_seconds = _work_seconds(_needed(jobs), min(1.0, *(gpu.marginal for gpu in gpus)))
    # a GPU-second of loading costs least on the slowest GPU
    even_seconds = (work_seconds + load_seconds * min(speeds)) / sum(speeds)
    provided = frozenset(task_id for job in jobs for task_id in job.given)
    return max([even_seconds, *[chain_seconds(job, provided) / max(speeds) for job in jobs]])


def least_adapter_loads(jobs: Iterable[JobSpec], slots: int) -> int:
    """The fewest times that adapter files are read from storage, by jobs that run in this order.

    As if all memories were one with `slots` entries, including what is patched into weights on a GPU; an adapter is
    read for each of its uses separately, though those of a task have to be on one machine at one time; and what is
    needed last is evicted first. Another order of the jobs may read fewer.
    """
    return fewest_loads([key for task in _needed(jobs) for key in task_adapters(task)], slots)


def task_adapters(task: TaskSpec) -> tuple[ComponentKey, ...]:
    """The adapters of a task, each once."""
    return tuple(dict.fromkeys(key for use in task.uses for key in use.adapters))


def chain_seconds(job: JobSpec, provided: Iterable[TaskId] = ()) -> float:
    """The longest chain of tasks of a job that its wanted result depends on and whose results are not provided, neither
    to it nor to others, at speed 1."""
    ends: dict[TaskId, float] = dict.fromkeys([*job.given, *provided], 0.0)
    for task in job.tasks:
        if task.task_id not in ends:
            begin = max((ends.get(need, 0.0) for need in task.needs), default=0.0)
            ends[task.task_id] = begin + least_run_seconds(task)
    return ends.get(job.wanted, 0.0)


def least_run_seconds(task: TaskSpec) -> float:
    """Seconds at speed 1 in the fastest execution mode."""
    return task.run_seconds * min([1.0, *(mode.slowdown for mode in task.divisions)])


def _work_seconds(tasks: Iterable[TaskSpec], marginal: float) -> float:
    """GPU-seconds at speed 1. For any number of batches of tasks with the same weights: each takes its longest task and
    `marginal` of the others, which is no less than one batch of all of them."""
    alike: dict[tuple[ComponentUse, ...], list[float]] = {}
    for task in tasks:
        alike.setdefault(task.uses, []).append(least_run_seconds(task))
    return sum(marginal * sum(seconds) + (1.0 - marginal) * max(seconds) for seconds in alike.values())


def _needed(jobs: Iterable[JobSpec]) -> list[TaskSpec]:
    """The tasks that wanted results depend on, each once. A result provided to one job need not be computed for
    another."""
    jobs = list(jobs)
    provided = {task_id for job in jobs for task_id in job.given}
    found: dict[TaskId, TaskSpec] = {}
    for job in jobs:
        tasks = {task.task_id: task for task in job.tasks}
        left = [job.wanted]
        while left:
            task_id = left.pop()
            if task_id in tasks and task_id not in found and task_id not in provided:
                found[task_id] = tasks[task_id]
                left.extend(tasks[task_id].needs)
    return list(found.values())


def _by_component(jobs: Iterable[JobSpec]) -> dict[ComponentKey, list[ComponentUse]]:
    found: dict[ComponentKey, list[ComponentUse]] = {}
    for task in _needed(jobs):
        for use in task.uses:
            found.setdefault(use.component, []).append(use)
    return found
