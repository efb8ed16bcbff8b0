"""What no policy can do better than, though all jobs are known. Pure functions of jobs, GPUs and sizes.

Those of seconds are for a batch, and hold for every schedule in the simulated world, ours and the clairvoyant's: equal
task ids count once, results that are given and tasks that no wanted result depends on take nothing, whatever may run in
one batch does, nothing is resident at first, and starting workers takes no time. Runs take what their tasks say: where
chance makes them shorter (`Disturbances.run_factor`), and where memory loads nothing (`NothingLoads`), they do not
hold. They need not be reached by any schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from modelpool.benchmarks.lab.caches import fewest_loads
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse, JobSpec, TaskId, TaskSpec
from modelpool.scheduler.simulator.machines import SimulatedGpu


def least_load_seconds(
    jobs: Iterable[JobSpec],
    gpus: Sequence[SimulatedGpu],
    components: Mapping[ComponentKey, ComponentSpec],
    patch_switch_seconds: float = 0.05,
) -> float:
    """The fewest GPU-seconds that all GPUs together spend on moving weights, before runs or streaming in them.

    Each component that is used crosses some link at least once, whole. Each patch set of it beyond the first needs
    either a switch with the bytes that it touches, or another arrival of the whole. Everything at the rate of the
    fastest link.
    """
    fastest = max((gpu.link_bytes_per_second for gpu in gpus), default=1.0)
    seconds = 0.0
    for key, uses in _by_component(jobs).items():
        spec = components[key]
        arrival_seconds = spec.upload_bytes / fastest
        sets: dict[str, int] = {}
        for use in uses:
            sets[use.patch_digest] = min(sets.get(use.patch_digest, use.patched_bytes), use.patched_bytes)
        # one of the sets comes with the first arrival: the one that would cost most
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
    """The soonest that a batch can be done from when all GPUs are up: all work shared out evenly by speed, with at
    least `load_seconds` GPU-seconds of loading between them; and no job sooner than its longest chain on the fastest
    GPU. Where a further task of a batch costs less than one alone, all that use the same weights are one batch."""
    speeds = [gpu.speed for gpu in gpus]
    if not speeds:
        return 0.0
    work_seconds = _work_seconds(_needed(jobs), min(1.0, *(gpu.marginal for gpu in gpus)))
    # a GPU-second of loading takes from the slowest GPU the least
    even_seconds = (work_seconds + load_seconds * min(speeds)) / sum(speeds)
    given = frozenset(task_id for job in jobs for task_id in job.given)
    return max([even_seconds, *[chain_seconds(job, given) / max(speeds) for job in jobs]])


def least_adapter_loads(jobs: Iterable[JobSpec], slots: int) -> int:
    """The fewest times that files of adapters are read from storage, by jobs that run in this order.

    As if all memories were one, of so many `slots`, what is patched into weights on a GPU included; an adapter is read
    for each of its uses by itself, though those of a task have to be on one machine at one time; and what is needed
    last leaves first. Who changes the order of the jobs may read fewer.
    """
    return fewest_loads([key for task in _needed(jobs) for key in task_adapters(task)], slots)


def task_adapters(task: TaskSpec) -> tuple[ComponentKey, ...]:
    """The adapters of a task, each once."""
    return tuple(dict.fromkeys(key for use in task.uses for key in use.adapters))


def chain_seconds(job: JobSpec, given: Iterable[TaskId] = ()) -> float:
    """The longest way through the tasks of a job that its wanted result depends on and that are given neither to it nor
    to others, at speed 1."""
    ends: dict[TaskId, float] = dict.fromkeys([*job.given, *given], 0.0)
    for task in job.tasks:
        if task.task_id not in ends:
            begin = max((ends.get(need, 0.0) for need in task.needs), default=0.0)
            ends[task.task_id] = begin + least_run_seconds(task)
    return ends.get(job.wanted, 0.0)


def least_run_seconds(task: TaskSpec) -> float:
    """What it takes at speed 1 in the fastest way to do it, whole or in parts."""
    return task.run_seconds * min([1.0, *(way.slowdown for way in task.divisions)])


def _work_seconds(tasks: Iterable[TaskSpec], marginal: float) -> float:
    """GPU-seconds at speed 1. However many batches the tasks of the same weights are: each takes its longest task and
    `marginal` of the others, which is no less than one batch of all of them takes."""
    alike: dict[tuple[ComponentUse, ...], list[float]] = {}
    for task in tasks:
        alike.setdefault(task.uses, []).append(least_run_seconds(task))
    return sum(marginal * sum(seconds) + (1.0 - marginal) * max(seconds) for seconds in alike.values())


def _needed(jobs: Iterable[JobSpec]) -> list[TaskSpec]:
    """The tasks that wanted results depend on, each once. What one job is given need not be made for another."""
    jobs = list(jobs)
    given = {task_id for job in jobs for task_id in job.given}
    found: dict[TaskId, TaskSpec] = {}
    for job in jobs:
        tasks = {task.task_id: task for task in job.tasks}
        left = [job.wanted]
        while left:
            task_id = left.pop()
            if task_id in tasks and task_id not in found and task_id not in given:
                found[task_id] = tasks[task_id]
                left.extend(tasks[task_id].needs)
    return list(found.values())


def _by_component(jobs: Iterable[JobSpec]) -> dict[ComponentKey, list[ComponentUse]]:
    found: dict[ComponentKey, list[ComponentUse]] = {}
    for task in _needed(jobs):
        for use in task.uses:
            found.setdefault(use.component, []).append(use)
    return found
