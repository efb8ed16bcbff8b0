"""Images and frames that guide the videos of a workflow's sampling runs at frames of them: checks, and what a run reads
of them. Pure functions of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modelpool.actors.request.control_video_fields import TaskVideo
from modelpool.actors.request.image_fields import TaskImage
from modelpool.pool.values.core.encoded_videos import FirstFrames
from modelpool.pool.values.core.errors import UnusableField, counted, unusable_field
from modelpool.pool.values.core.sampling_facts import VideoFacts
from modelpool.pool.values.core.stage_params import EncodeImageParams, GuideCondition, ModelRef, OutputShape
from modelpool.pool.values.core.task_inputs import IMAGE, VIDEO
from modelpool.pool.values.specs.spec import TaskId

if TYPE_CHECKING:
    from modelpool.actors.request.workflow_fields import Guide


@dataclass(frozen=True, slots=True)
class GuideRead:
    """An image or frames that guide a run: the task that makes it, and how it guides. `frames`: how many are read; 0
    for an image."""

    task: TaskId
    condition: GuideCondition
    frames: int = 0

    def encoded(self, model: ModelRef, shape: OutputShape) -> tuple[EncodeImageParams, dict[str, TaskId]]:
        """Return the encoding for a video of `shape`, and its inputs."""
        factor = self.condition.factor or 1
        work = EncodeImageParams(model, shape.width // factor, shape.height // factor)
        if not self.frames:
            return work, {IMAGE: self.task}
        return replace(work, video=FirstFrames(self.frames)), {VIDEO: self.task}


def guide_read(guide: Guide, source: TaskImage | TaskVideo, video: VideoFacts | None, factor: int) -> GuideRead:
    """Return what a run reads of a guide: of frames those that fill cells. `factor`: the sides of the video over those
    that its LoRA was trained for. Raises UnusableField."""
    per_cell = 1 if video is None else video.frames_per_cell
    cells, frames = 0, 0
    if isinstance(source, TaskVideo):
        cells = 1 + (source.frames - 1) // per_cell
        frames = 1 + (cells - 1) * per_cell
        if cells > 1 and guide.frame and (guide.frame - 1) % per_cell:
            found = f"{guide.frame} for {counted(frames, 'frame')}"
            raise unusable_field("guides.frame", found, f"0, 1, or {per_cell + 1}, ...: the first frame of a cell")
    elif guide.appended or guide.lora is not None:
        cells = 1
    condition = GuideCondition(guide.frame, guide.strength, cells, factor if factor > 1 else 0)
    return GuideRead(TaskId(source.task), condition, frames)


def check_guides_fit(guides: Sequence[GuideRead], shape: tuple[int, int, int], video: VideoFacts, step: int) -> None:
    """Raise UnusableField for guides that do not fit a video of `shape`, its width, height and frames. `step`: pixels
    along a side of a cell."""
    width, height, frames = shape
    places = [guide.condition.frame for guide in guides]
    if max(places) >= frames:
        raise unusable_field(
            "guides.frame", max(places), f"up to {frames - 1}: the video has {counted(frames, 'frame')}"
        )
    if [guide.condition.frame for guide in guides if not guide.condition.cells].count(0) > 1:
        expected = "one image as the first frame; others are `appended`"
        raise unusable_field("guides.frame", "0 twice", expected)
    total = 1 + (frames - 1) // video.frames_per_cell
    for guide in guides:
        own = guide.condition
        first = 0 if not own.frame else 1 + (own.frame - 1) // video.frames_per_cell
        if first + own.cells > total:
            found = f"{counted(guide.frames or 1, 'frame')} from frame {own.frame} on"
            raise unusable_field("guides", found, f"frames within the video: it has {counted(frames, 'frame')}")
        if own.factor and (width % (own.factor * step) or height % (own.factor * step)):
            expected = f"multiples of {own.factor * step}: the LoRA of a guide reads it {own.factor} times smaller"
            raise unusable_field("width, height", f"{width}x{height}", expected)


def check_guided_part(guides: Sequence[GuideRead], passes_noise: bool) -> None:
    """Raise UnusableField for guides with a strength below 1 of a run that `passes_noise` on or goes on with it."""
    if passes_noise and any(guide.condition.strength < 1 for guide in guides):
        raise UnusableField("guides.strength: expected 1 in a run of some of the steps, which passes noise on")
