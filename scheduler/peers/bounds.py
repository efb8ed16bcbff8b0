"""What no policy can do better than, for a batch that is known whole. Pure functions of jobs, GPUs and sizes.

They hold for every schedule in the simulated world, ours and the clairvoyant's: equal task ids count once, nothing is
resident at first, and starting workers takes no time. They need not be reached by any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pool.spec import ComponentKey, ComponentSpec, ComponentUse, JobSpec, TaskId, TaskSpec
from scheduler.simulated.machines import SimulatedGpu


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
    GPU."""
    speeds = [gpu.speed for gpu in gpus]
    if not speeds:
        return 0.0
    tasks = {task.task_id: task for job in jobs for task in job.tasks}
    work_seconds = sum(task.run_seconds for task in tasks.values())
    # a GPU-second of loading takes from the slowest GPU the least
    even_seconds = (work_seconds + load_seconds * min(speeds)) / sum(speeds)
    return max([even_seconds, *[chain_seconds(job) / max(speeds) for job in jobs]])


def chain_seconds(job: JobSpec) -> float:
    """The longest way through the tasks of a job that its wanted result depends on, at speed 1."""
    ends: dict[TaskId, float] = {}
    for task in job.tasks:
        ends[task.task_id] = task.run_seconds + max((ends.get(need, 0.0) for need in task.needs), default=0.0)
    return ends.get(job.wanted, 0.0)


def _by_component(jobs: Iterable[JobSpec]) -> dict[ComponentKey, list[ComponentUse]]:
    tasks: dict[TaskId, TaskSpec] = {task.task_id: task for job in jobs for task in job.tasks}
    found: dict[ComponentKey, list[ComponentUse]] = {}
    for task in tasks.values():
        for use in task.uses:
            found.setdefault(use.component, []).append(use)
    return found
