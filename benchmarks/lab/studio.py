"""Images and videos with deadlines, on models of which several GPUs may share a run: `benchmarks.gang_scheduling`.

By GPU time, videos are two thirds of the work. The decode of a video has parts that are tasks of their own. Deadlines
are multiples of what a job takes alone on one GPU: of half of
the videos a GPU alone cannot meet them.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from modelpool.pool.values.specs.spec import JobSpec, TaskId
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.sizes import FLUX, SDXL, VIDEO
from modelpool.scheduler.simulator.workloads.workload import Workload

#: model, steps, part of the jobs, and numbers of GPUs that may share a run
MODELS = (
    (SDXL, 20, 0.4, (1, 2)),
    (FLUX, 28, 0.5, (1, 2, 4)),
    (VIDEO, 40, 0.1, (1, 2, 4, 8)),
)
#: deadlines, as multiples of the seconds that a job takes alone, and seconds added to each
IMAGE_FACTORS, VIDEO_FACTORS, ADDED_SECONDS = (0.7, 1.4, 2.8), (0.3, 0.6, 1.2, 2.4), 1.0
#: parts of the decode of a video, and seconds to join them
DECODE_PARTS, JOIN_SECONDS = 8, 0.1


def _in_parts(job: JobSpec) -> JobSpec:
    """Return the job with a decode in `DECODE_PARTS` parts, and one task that joins them."""
    *before, decode = job.tasks
    parts = tuple(
        replace(
            decode, task_id=TaskId(f"{decode.task_id} part {number}"), run_seconds=decode.run_seconds / DECODE_PARTS
        )
        for number in range(DECODE_PARTS)
    )
    names = tuple(part.task_id for part in parts)
    join = replace(decode, uses=(), activation_bytes=0, run_seconds=JOIN_SECONDS, needs=names)
    return replace(job, tasks=(*before, *parts, join))


def alone_seconds(model: InventedModel, steps: int) -> float:
    """Seconds of a job of the model on one GPU, with everything resident."""
    return model.encode_seconds + steps * model.step_seconds + model.decode_seconds


def mean_seconds() -> float:
    """GPU-seconds of a job on average."""
    return sum(part * alone_seconds(model, steps) for model, steps, part, _ in MODELS)


def is_video(job_id: str) -> bool:
    """Whether the job makes a video, by its name."""
    return job_id.startswith("video")


def studio(
    rng: Random, jobs: int, gpus: int, load: float | None, degrees: int = 8, has_deadlines: bool = True
) -> Workload:
    """Return that many jobs, which arrive independently and keep `gpus` busy for `load` of the time if each ran on one
    GPU (None: all at once, without deadlines); at most `degrees` GPUs share a run."""
    models = [
        (replace(model, degrees=tuple(one for one in allowed if one <= degrees)), steps, part)
        for model, steps, part, allowed in MODELS
    ]
    at, submitted = 0.0, []
    for number in range(jobs):
        at += 0.0 if load is None else rng.expovariate(load * gpus / mean_seconds())
        model, steps, _ = rng.choices(models, [part for _, _, part in models])[0]
        factor = rng.choice(VIDEO_FACTORS if model.name == VIDEO.name else IMAGE_FACTORS)
        due = None if load is None or not has_deadlines else at + ADDED_SECONDS + factor * alone_seconds(model, steps)
        batch = "" if load is not None else "batch"
        name = f"{'video' if model.name == VIDEO.name else 'image'}-{number}"
        job = model.job(name, f"prompt {number}", number, steps=steps, deadline=due, batch=batch)
        if model.name == VIDEO.name:
            job = _in_parts(job)
        submitted.append(Submitted(at, job))
    components = tuple(component for model, _, _ in models for component in model.components)
    return Workload("studio", components, tuple(submitted))
