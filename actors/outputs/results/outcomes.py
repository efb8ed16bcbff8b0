"""Results of jobs and tasks for a driver. Values only: no ray, no torch, nothing that waits.

Shape legend: H W pixel height and width, C colour channels (3).
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.video_output_fields import SHARED_FORMATS
from modelpool.pool.values.core.stage_params import AudioSamples, FloatArray, PixelArray
from modelpool.pool.values.specs.spec import JobId, RunErrorKind, Stage, WorkerId
from modelpool.pool.values.specs.wire_value import WireValue
from modelpool.scheduler.model.placement_record import Why

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class TaskSummary(WireValue):
    """One task of one job.

    seconds          loading weights and running, together
    load_seconds     loading weights before the run
    resident         whether every component was fully resident with the right patches
    uploaded_bytes   weights moved to the GPU before the run
    streamed_bytes   weights moved to the GPU while it ran
    patch_switches   resident components with other patches
    shared           an earlier job produced it; its figures are counted there
    divided          how the run was split because of limited memory, as a sentence; empty if it was not
    rungs            the steps taken after running out of memory, in order
    why              the placement decision; None if unknown
    batched          tasks in the same batch, including this one; figures are its share
    node             display name of the worker's node; "" on a single machine
    fetch_seconds    until its files were on the node's disk, not part of `seconds`
    fetched_bytes    fetched for it from sources and other nodes
    device           name of the device that it ran on, such as a GPU's
    lost             runs of it that were lost before: each the worker and the reason
    resumed          where it resumed from the state of an earlier run, "after step 60 of 100"; empty if it did not
    ended_at         when its report arrived, in seconds since the epoch; 0 if unknown
    gpus             numbers of GPUs that shared its run, one after the other, 0 for steps of which it is not known;
                     empty if its bytes do not depend on them
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
    node: str = ""
    fetch_seconds: float = 0.0
    fetched_bytes: int = 0
    device: str = ""
    lost: tuple[str, ...] = ()
    resumed: str = ""
    ended_at: float = 0.0
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class OutputResult:
    """The output of one job.

    index    position of its request in the call of `submit`, from 0
    request  as submitted, with the seed that was used
    path     where it was written; None if it was not, or to an object store
    url      where it was written to an object store; "" otherwise
    worker   the worker that sampled it
    seconds  of its tasks, without those shared with an earlier job
    pixels_sha256  of the pixels as generated, as in the manifest; "" if it was not written
    content  returns the pixels, frames or samples
    previews  the last previews that arrived while it was sampled, if any were wanted
    """

    index: int
    job_id: JobId
    request: GenerateRequest
    recipe: Recipe
    path: Path | None
    worker: WorkerId
    seconds: float
    tasks: tuple[TaskSummary, ...]
    pixels_sha256: str = ""
    url: str = ""
    previews: tuple[ImagePreview, ...] = ()
    content: Callable[[], Any]

    @property
    def seed(self) -> int:
        """The seed of the noise."""
        return self.recipe.seed

    @property
    def id(self) -> str | None:
        """The id of its request."""
        return self.request.id

    @property
    def metadata(self) -> Any:
        """The metadata of its request: JSON values."""
        return self.request.metadata

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.job_id}: {', '.join(self._facts())}>"

    def _facts(self) -> list[str]:
        """Return what identifies it, for people."""
        facts = [] if self.id is None else [f"id {self.id!r}"]
        facts += [f"{self.recipe.width}x{self.recipe.height}"] if self.recipe.width else []
        facts += (
            [f"{self.recipe.frames} {'layers' if self.recipe.is_layers else 'frames'}"] if self.recipe.frames else []
        )
        where = str(self.path or self.url)
        return [*facts, f"seed {self.seed}", *([where] if where and where != "None" else [])]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class ImageResult(OutputResult):
    """One finished image. The pixels of a written image are read from its file when they are first used, which raises
    OutputFailed if that is gone.
    """

    @cached_property
    def pixels(self) -> PixelArray:
        """The pixels [H, W, C]."""
        pixels_HWC: PixelArray = self.content()
        return pixels_HWC

    @cached_property
    def pil(self) -> Image:
        """The image as a Pillow image, created on first use."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    def _repr_png_(self) -> bytes:
        """The image, for notebooks."""
        buffer = io.BytesIO()
        self.pil.save(buffer, format="PNG")
        return buffer.getvalue()


def no_track() -> AudioSamples | None:
    """Return the audio track of a video without one."""
    return None


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class VideoResult(OutputResult):
    """One finished video: frames [T, H, W, 3] and frames per second; or the layers of one image, [T, H, W, 4]. Some
    models generate an audio track with it. If a program is more than 1 GiB of written results behind, frames and
    samples come from the file, which most formats of videos do not keep exactly.
    """

    frame_rate: float
    #: returns the audio track
    track: Callable[[], AudioSamples | None] = field(default=no_track, repr=False)

    @cached_property
    def frames(self) -> PixelArray:
        """The frames [T, H, W, C]."""
        frames_THWC: PixelArray = self.content()
        return frames_THWC

    @cached_property
    def sound(self) -> AudioSamples | None:
        """The audio track: samples [S, channels] in -1 to 1 (`samples_SC`), and samples per second; None if the model
        generates none."""
        return self.track()

    def save(self, path: str | Path) -> Path:
        """Write it to `path` with its recipe; the suffix (.mp4, .webm, .gif, .webp, for layers .png) selects the
        format; a WebP has no sound. Returns the path. Raises UnknownName or OutputFailed.
        """
        if self.recipe.is_layers:
            from modelpool.actors.outputs.image_file import write_layers

            return write_layers(path, self.frames, self.recipe)
        if Path(path).suffix.lower().removeprefix(".") in SHARED_FORMATS:
            from modelpool.actors.outputs.image_file import write_animation

            return write_animation(path, self.frames, self.frame_rate, self.recipe)
        from modelpool.actors.outputs.output_file import texts_of
        from modelpool.actors.outputs.video import write_video

        return write_video(path, self.frames, self.frame_rate, **texts_of(self.recipe), sound=self.sound)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class AudioResult(OutputResult):
    """One finished audio clip: samples [S, channels] in -1 to 1, and samples per second. If a program is more than
    1 GiB of written results behind, the samples come from the file, with 16 bits.
    """

    samples_per_second: int

    @cached_property
    def samples(self) -> FloatArray:
        """The samples [S, channels]."""
        samples_SC: FloatArray = self.content()
        return samples_SC

    def save(self, path: str | Path) -> Path:
        """Write it to `path` with its recipe; the suffix (.wav, .flac) selects the format. Returns the path. Raises
        UnknownName or OutputFailed.
        """
        from modelpool.actors.outputs.audio import as_16_bits, write_audio
        from modelpool.actors.outputs.output_file import texts_of

        return write_audio(path, as_16_bits(self.samples.T), self.samples_per_second, **texts_of(self.recipe))


def array_of_result(result: OutputResult) -> PixelArray | FloatArray:
    """Return the array of an output: pixels, frames or samples."""
    match result:
        case ImageResult():
            return result.pixels
        case VideoResult():
            return result.frames
        case AudioResult():
            return result.samples
    raise AssertionError(f"unknown kind of result: {type(result).__name__}")


@dataclass(frozen=True, slots=True)
class JobFailure:
    """A job without an output: it failed, or was cancelled (`kind` is CANCELLED)."""

    index: int
    job_id: JobId
    #: None for a single stage
    request: GenerateRequest | None
    kind: RunErrorKind
    message: str
    traceback_text: str = ""

    @property
    def cancelled(self) -> bool:
        """Whether the job was cancelled."""
        return self.kind is RunErrorKind.CANCELLED

    @property
    def id(self) -> str | None:
        """The id of its request."""
        return None if self.request is None else self.request.id

    @property
    def metadata(self) -> Any:
        """The metadata of its request: JSON values."""
        return None if self.request is None else self.request.metadata


class JobFailed(RuntimeError):
    """Raised instead of a result; `failure` has the reason. `others` more jobs of the submission have failed."""

    def __init__(self, failure: JobFailure, others: int = 0) -> None:
        more = f" (and {others} more failed)" if others else ""
        super().__init__(f"job {failure.job_id}: {failure.kind.value}: {failure.message}{more}")
        self.failure = failure
        self.others = others

    def __reduce__(self) -> tuple[type[JobFailed], tuple[JobFailure, int]]:
        return type(self), (self.failure, self.others)


class PoolLost(RuntimeError):
    """The pool ended while a call waited for it. Written files are kept; the rest must be submitted again."""


class PoolUnreachable(PoolLost):
    """The pool runs, but its processes take no connections: trying again does not help."""


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """Totals of one worker for a submission."""

    worker: WorkerId
    tasks: int
    tasks_resident: int
    seconds: float
    uploaded_bytes: int
    streamed_bytes: int
    patch_switches: int

    def with_task(self, task: TaskSummary) -> WorkerSummary:
        """Return the totals with another task of the worker."""
        return WorkerSummary(
            worker=self.worker,
            tasks=self.tasks + 1,
            tasks_resident=self.tasks_resident + task.resident,
            seconds=self.seconds + task.seconds,
            uploaded_bytes=self.uploaded_bytes + task.uploaded_bytes,
            streamed_bytes=self.streamed_bytes + task.streamed_bytes,
            patch_switches=self.patch_switches + task.patch_switches,
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a submission.

    seconds  wall-clock time from the submission to the last end (or to now)
    tasks    each task that was run for it, once; of a submission, read from compressed memory or a file
    """

    jobs: int
    succeeded: int
    failed: int
    cancelled: int
    seconds: float
    tasks: Sequence[TaskSummary]

    def per_worker(self) -> tuple[WorkerSummary, ...]:
        """Return the totals of each worker that ran anything, by name."""
        totals: dict[WorkerId, WorkerSummary] = {}
        for task in self.tasks:
            totals[task.worker] = totals.get(task.worker, WorkerSummary(task.worker, 0, 0, 0.0, 0, 0, 0)).with_task(
                task
            )
        return tuple(totals[name] for name in sorted(totals))

    def lost_runs(self) -> tuple[tuple[str, int], ...]:
        """Return why runs of its tasks were lost with their worker and repeated, and how many for each reason."""
        return tuple(Counter(reason for task in self.tasks for reason in task.lost).items())


def sampled_by(tasks: Sequence[TaskSummary]) -> WorkerId:
    """Return the worker of the sample task, or of the last task."""
    return next((task.worker for task in tasks if task.stage is Stage.SAMPLE), tasks[-1].worker)


def where_and_why(tasks: Sequence[TaskSummary]) -> str:
    """Describe in one line where the tasks of a job ran, and why."""
    parts = []
    for task in tasks:
        if task.shared:
            parts.append(f"{task.stage.value} shared with an earlier job")
        else:
            where = f"{task.worker} on {task.node}" if task.node else str(task.worker)
            parts.append(f"{task.stage.value} {where}" + (f" ({task.why.brief})" if task.why else ""))
    return ", ".join(dict.fromkeys(parts))


def unshared_seconds(tasks: Sequence[TaskSummary]) -> float:
    """Return the seconds of the tasks that are counted for this job."""
    return sum(task.seconds for task in tasks if not task.shared)
