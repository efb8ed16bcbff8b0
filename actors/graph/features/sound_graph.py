"""Audio that a sampling run of a workflow keeps as the audio track of its video: checks, and what the run reads of it.
Pure functions of values."""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.actors.request.field_errors import unsupported_field
from modelpool.pool.families.parts.audio_tracks import KEPT_SOUND, sound_length
from modelpool.pool.values.core.sampling_facts import SamplingFacts
from modelpool.pool.values.core.stage_params import EncodeImageParams, ModelRef
from modelpool.pool.values.core.task_inputs import AUDIO
from modelpool.pool.values.specs.spec import TaskId

#: seconds by which audio may be longer or shorter than the video without a warning: more than a frame
_SAME_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class SoundRead:
    """The audio that a run keeps: `source`, a latent with an audio track, or the audio that `encodes` makes one of."""

    source: TaskId
    encodes: EncodeImageParams | None = None

    @property
    def needs(self) -> dict[str, TaskId]:
        """The inputs of the encoding."""
        return {AUDIO: self.source}


def sound_encoded(source: TaskId, model: ModelRef, facts: SamplingFacts, frames: int, rate: float) -> SoundRead:
    """Return what a run of `frames` at `rate` per second reads of audio of a user, by a model that keeps it."""
    assert facts.video is not None, "a model that keeps audio makes videos"
    assert facts.video.sound is not None, "a model that keeps audio makes audio"
    return SoundRead(source, EncodeImageParams(model, 0, 0, sound=sound_length(facts.video.sound, frames, rate)))


def check_keeps_sound(model: ModelRef, facts: SamplingFacts) -> None:
    """Raise UnsupportedField for a model that keeps no audio of users."""
    if KEPT_SOUND not in facts.reads:
        raise unsupported_field("sound", model.name, "keeps no audio in its videos")


def length_warning(seconds: float, video_seconds: float) -> str:
    """Return the warning of audio that is longer or shorter than the video that follows it; "" for none."""
    if abs(seconds - video_seconds) <= _SAME_SECONDS:
        return ""
    found = f"sound: found audio of {seconds:g} seconds for a video of {video_seconds:g}"
    return f"{found}: {'the rest of it is cut off' if seconds > video_seconds else 'silence follows it'}"
