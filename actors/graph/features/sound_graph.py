"""Audio that a sampling run of a workflow keeps as the audio track of its video: checks, and what the run reads of it.
Pure functions of values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelpool.actors.request.field_errors import unsupported_field
from modelpool.pool.families.parts.audio_tracks import (
    KEPT_SOUND,
    POSITION_SPECTRA,
    SOUND_HOP,
    SOUND_RATE,
    VOICE,
    sound_length,
)
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.sampling_facts import SamplingFacts
from modelpool.pool.values.core.stage_params import EncodeImageParams, ModelRef, VoiceCondition
from modelpool.pool.values.core.task_inputs import AUDIO
from modelpool.pool.values.specs.spec import TaskId

#: seconds by which audio may be longer or shorter than the video without a warning: more than a frame
_SAME_SECONDS = 0.1
#: positions of the audio of a voice, 25 of a second: models were trained for 5 seconds
MOST_VOICE = 1500


@dataclass(frozen=True, slots=True)
class SoundRead:
    """Audio that a run reads: `source`, a latent with an audio track, or the audio that `encodes` makes one of. The run
    keeps it, or its audio has the same `voice`."""

    source: TaskId
    encodes: EncodeImageParams | None = None
    voice: VoiceCondition | None = None

    @property
    def needs(self) -> dict[str, TaskId]:
        """The inputs of the encoding."""
        return {AUDIO: self.source}


def sound_encoded(source: TaskId, model: ModelRef, facts: SamplingFacts, frames: int, rate: float) -> SoundRead:
    """Return what a run of `frames` at `rate` per second reads of audio of a user, by a model that keeps it."""
    assert facts.video is not None, "a model that keeps audio makes videos"
    assert facts.video.sound is not None, "a model that keeps audio makes audio"
    return SoundRead(source, EncodeImageParams(model, 0, 0, sound=sound_length(facts.video.sound, frames, rate)))


def voice_encoded(source: TaskId, seconds: float, model: ModelRef, facts: SamplingFacts, scale: float) -> SoundRead:
    """Return what a run reads of audio of a user with the voice that its audio has. Raises UnsupportedField for a model
    that reads no voice, and UnusableField for audio that is too long."""
    if VOICE not in facts.reads:
        raise unsupported_field("voice", model.name, "reads no voice of other audio")
    spectra = 1 + math.ceil(seconds * SOUND_RATE) // SOUND_HOP
    length = math.ceil(spectra / POSITION_SPECTRA)
    if length > MOST_VOICE:
        raise unusable_field("voice", f"{seconds:g} seconds", f"up to {MOST_VOICE / 25:g} seconds of audio")
    return SoundRead(source, EncodeImageParams(model, 0, 0, sound=length), VoiceCondition(length, scale))


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
