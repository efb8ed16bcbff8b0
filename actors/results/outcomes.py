"""How jobs and tasks ended, as a driver sees it. Values only: no ray, no torch, nothing that waits.

Shape legend: H W pixel height and width, C colour channels (3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.stage_params import FloatArray, PixelArray
from modelpool.pool.specs.spec import JobId, RunErrorKind, Stage, WorkerId
from modelpool.scheduler.tables.placement_record import Why

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """One task of one job.

    seconds          moving weights and running together
    load_seconds     moving weights before the run
    resident         every component was there, whole and with the right patches
    uploaded_bytes   weights moved to the GPU before the run
    streamed_bytes   weights moved to the GPU while it ran
    patch_switches   components that were there with other patches
    shared           another job made it; these figures are counted there
    divided          how the run was divided for want of memory, in words; empty when it was not
    rungs            what was done about running out of memory before it ended, in order
    why              what the choice of the worker was made of; None when nobody said
    batched          tasks that went through the module together with it, itself included; figures are its share
    """

    stage: Stage
    worker: WorkerId
    seconds: float
    load_seconds: float
    resident: bool
    uploaded_bytes: int
    streamed_bytes: int
    patch_switches: int
    shared: bool
    divided: str = ""
    rungs: tuple[str, ...] = ()
    why: Why | None = None
    batched: int = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class MadeResult:
    """What one job made.

    index    place in its submission, from 0
    request  as submitted, with the seed that was used
    path     where it was written; None when nothing is written
    worker   who sampled it
    seconds  of the tasks that were run for it, those it shared with an earlier job left out
    """

    index: int
    job_id: JobId
    request: GenerateRequest
    recipe: Recipe
    path: Path | None
    worker: WorkerId
    seconds: float
    tasks: tuple[TaskSummary, ...]

    @property
    def seed(self) -> int:
        """The seed of its noise."""
        return self.recipe.seed


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageResult(MadeResult):
    """One finished image."""

    pixels: PixelArray

    @cached_property
    def pil(self) -> Image:
        """The image for Pillow, made when first asked for."""
        from PIL import Image

        return Image.fromarray(self.pixels)


@dataclass(frozen=True, eq=False, kw_only=True)
class VideoResult(MadeResult):
    """One finished video: frames [T, H, W, 3], and how many there are to a second."""

    frames: PixelArray
    frame_rate: float

    def save(self, path: str | Path) -> Path:
        """Write it to `path`, whose ending (.mp4, .webm, .gif) names the format, with its recipe in it. Returns the
        path. Raises UnknownName or OutputFailed."""
        from modelpool.actors.outputs.output_file import texts_of
        from modelpool.actors.outputs.video import write_video

        return write_video(path, self.frames, self.frame_rate, **texts_of(self.recipe))


@dataclass(frozen=True, eq=False, kw_only=True)
class AudioResult(MadeResult):
    """One finished audio: samples [S, channels], -1 to 1, and how many there are to a second."""

    samples: FloatArray
    samples_per_second: int

    def save(self, path: str | Path) -> Path:
        """Write it to `path`, whose ending (.wav, .flac) names the format, with its recipe in it. Returns the path.
        Raises UnknownName or OutputFailed."""
        from modelpool.actors.outputs.audio import as_16_bits, write_audio
        from modelpool.actors.outputs.output_file import texts_of

        return write_audio(path, as_16_bits(self.samples.T), self.samples_per_second, **texts_of(self.recipe))


def array_of_result(result: MadeResult) -> PixelArray | FloatArray:
    """The numbers that were made: pixels, frames or samples."""
    match result:
        case ImageResult():
            return result.pixels
        case VideoResult():
            return result.frames
        case AudioResult():
            return result.samples
    raise AssertionError(f"nothing is known of a {type(result).__name__}")


@dataclass(frozen=True, slots=True)
class JobFailure:
    """A job that has no image: it failed, or it was cancelled (`kind` is CANCELLED)."""

    index: int
    job_id: JobId
    #: None for a single stage
    request: GenerateRequest | None
    kind: RunErrorKind
    message: str
    traceback_text: str = ""

    @property
    def cancelled(self) -> bool:
        """It ended because someone asked for that."""
        return self.kind is RunErrorKind.CANCELLED


class JobFailed(RuntimeError):
    """Raised where a result was asked for and there is none. `failure` says why."""

    def __init__(self, failure: JobFailure) -> None:
        super().__init__(f"job {failure.job_id}: {failure.kind.value}: {failure.message}")
        self.failure = failure

    def __reduce__(self) -> tuple[type[JobFailed], tuple[JobFailure]]:
        return type(self), (self.failure,)


class PoolLost(RuntimeError):
    """The pool went away while something waited for it. What was written stays; the rest must be submitted again."""


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """What one worker did for a submission."""

    worker: WorkerId
    tasks: int
    tasks_resident: int
    seconds: float
    uploaded_bytes: int
    streamed_bytes: int
    patch_switches: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A submission, in numbers.

    seconds  on the wall, from the submission to the last end (or to now)
    tasks    each task that was run for it, once
    """

    jobs: int
    succeeded: int
    failed: int
    cancelled: int
    seconds: float
    tasks: tuple[TaskSummary, ...]

    def per_worker(self) -> tuple[WorkerTotals, ...]:
        """The totals of each worker that ran anything, by name."""
        names = sorted({task.worker for task in self.tasks})
        return tuple(_totals(name, [t for t in self.tasks if t.worker == name]) for name in names)


def _totals(worker: WorkerId, tasks: Iterable[TaskSummary]) -> WorkerTotals:
    tasks = tuple(tasks)
    return WorkerTotals(
        worker=worker,
        tasks=len(tasks),
        tasks_resident=sum(t.resident for t in tasks),
        seconds=sum(t.seconds for t in tasks),
        uploaded_bytes=sum(t.uploaded_bytes for t in tasks),
        streamed_bytes=sum(t.streamed_bytes for t in tasks),
        patch_switches=sum(t.patch_switches for t in tasks),
    )


def sampled_by(tasks: Sequence[TaskSummary]) -> WorkerId:
    """The worker of the sample task, or of the last one there is."""
    return next((task.worker for task in tasks if task.stage is Stage.SAMPLE), tasks[-1].worker)


def where_and_why(tasks: Sequence[TaskSummary]) -> str:
    """Where the tasks of one job ran and why there, in a line."""
    parts = []
    for task in tasks:
        if task.shared:
            parts.append(f"{task.stage.value} shared with an earlier job")
        else:
            parts.append(f"{task.stage.value} {task.worker}" + (f" ({task.why.brief})" if task.why else ""))
    return ", ".join(dict.fromkeys(parts))


def own_seconds(tasks: Sequence[TaskSummary]) -> float:
    """Seconds of the tasks that are counted for this job."""
    return sum(task.seconds for task in tasks if not task.shared)
