"""The audio of a node of a workflow: the path of a file with audio, or samples; parsed and validated.

A path may be of an audio file, or of a video with sound. Paths stay paths until submission; only headers are read here.
Torch-free, ray-free; imports PyAV and numpy when audio is set.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from modelpool.actors.request.bounds import check_complete
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.values.core.errors import CorruptFile, UserError, counted, unusable_field

if TYPE_CHECKING:
    from av.container import InputContainer

    from modelpool.pool.values.core.stage_params import FloatArray

#: file extensions of audio
AUDIO_ENDINGS = (".mp3", ".wav", ".flac", ".ogg", ".opus", ".m4a", ".aac")
#: FFmpeg demuxers and protocols that may be used: single files only, none that refers to other files
_DEMUXERS = {"format_whitelist": "mp3,wav,flac,ogg,aac,mov,matroska,avi", "protocol_whitelist": "file"}
#: most samples of all channels together: ten minutes of two channels with 48,000 a second. Each takes four bytes
MAX_AUDIO_SAMPLES = 1 << 26
#: most samples per second of a channel
MAX_AUDIO_RATE = 192_000
#: a multiple of the usual rates, and the least divisor that a rate has in common with it
_COMMON_RATE, _LEAST_COMMON = 48_000 * 441, 100
_CHANNELS = (1, 2)
_AUDIO = "the path of a file with audio, or samples [samples, channels] of float32 with their number per second"


@dataclass(frozen=True, slots=True)
class Sound:
    """Samples [samples, channels] in the driver's memory, from -1 to 1. Equal when they and their rate are equal."""

    sha256: str
    rate: int
    samples: FloatArray = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class InputAudio:
    """Audio on its way to the pool.

    sha256  of the samples and their rate
    rate    samples per second of each channel
    file    name of the source file, for display; empty for audio from memory
    """

    sha256: str
    seconds: float
    rate: int
    channels: int
    file: str = ""


@dataclass(frozen=True, slots=True)
class AudioFile:
    """What a file says about its audio: samples per second, channels, and about how many seconds; 0 if it does not
    say."""

    path: str
    rate: int
    channels: int
    seconds: float = 0.0


#: value of an audio field after validation
AudioSource: TypeAlias = str | Sound | InputAudio


def checked_audio(name: str, value: Any) -> AudioSource:
    """Validate the audio in the field `name`. Raises UserError naming the field, and the file for a path."""
    if isinstance(value, Sound | InputAudio):
        return value
    if isinstance(value, str | os.PathLike):
        path = os.fsdecode(value)
        check_complete(name, path)
        return audio_facts(name, path).path
    import numpy as np

    if not isinstance(value, list | tuple) or len(value) != 2 or not isinstance(value[0], np.ndarray):
        raise unusable_field(name, type(value).__name__, _AUDIO)
    samples, rate = value
    if samples.ndim != 2 or samples.dtype != np.float32 or not np.isfinite(samples).all():
        raise unusable_field(name, f"an array {list(samples.shape)} of {samples.dtype}", _AUDIO)
    if not isinstance(rate, int) or isinstance(rate, bool):
        raise unusable_field(name, rate, "a whole number of samples per second")
    _check(name, rate, samples.shape[1], len(samples))
    return _sound(np.ascontiguousarray(samples), rate)


def audio_facts(name: str, path: str) -> AudioFile:
    """Return the facts of the audio in the file at `path`. Raises UserError naming the field `name`."""
    with _open_audio(name, path) as audio:
        found = audio.streams.audio[0].codec_context
        seconds = (audio.duration or 0) / 1_000_000  # FFmpeg counts in microseconds
        return AudioFile(path, int(found.sample_rate), int(found.channels), max(0.0, seconds))


def read_audio(name: str, path: str) -> Sound:
    """Return the samples of the first audio stream of a file. Raises UserError naming the field `name`."""
    with _open_audio(name, path) as audio:
        rate = int(audio.streams.audio[0].codec_context.sample_rate)
        return _sound(_samples(name, path, audio, rate), rate)


def check_audio_content(name: str, shown: str, content: bytes) -> None:
    """Raise UserError naming the field `name` unless the content of a file has audio; `shown` is the name of the
    file."""
    with _opened(name, shown, BytesIO(content)) as audio:
        if next(audio.decode(audio=0), None) is None:
            raise unusable_field(name, "no samples", "at least one")


def is_audio(name: str) -> bool:
    """Whether a file of this name is audio."""
    return name.lower().endswith(AUDIO_ENDINGS)


@contextmanager
def _open_audio(name: str, path: str) -> Iterator[InputContainer]:
    """Open the file at `path` and check the facts of its audio. Raises UserError naming the field `name` if the path is
    not a regular file, has no audio, or if decoding fails inside the block."""
    if not os.path.exists(path):
        raise unusable_field(name, path, "an existing file")
    try:
        with open_regular(path, "audio") as (file, _), _opened(name, path, file) as audio:
            yield audio
    except CorruptFile as problem:
        raise UserError(f"{name}: {problem}") from None


@contextmanager
def _opened(name: str, shown: str, file: BinaryIO) -> Iterator[InputContainer]:
    """Open a file with audio, and check its facts. `shown` is its name, for messages."""
    import av

    try:
        with av.open(file, "r", options=_DEMUXERS) as audio:
            if not audio.streams.audio:
                raise UserError(f"{name}: {shown} contains no audio stream, expected audio")
            found = audio.streams.audio[0].codec_context
            _check(name, int(found.sample_rate), int(found.channels), 1)
            yield audio
    except av.FFmpegError as error:
        raise UserError(f"{name}: {shown} cannot be read as audio ({error.strerror})") from None


def _check(name: str, rate: int, channels: int, samples: int) -> None:
    """Raise UnusableField for audio with another number of channels, or too many samples."""
    if channels not in _CHANNELS:
        raise unusable_field(name, counted(channels, "channel"), "1 or 2 channels")
    # of other pairs of rates, the filter that converts one into the other has gigabytes
    if not 0 < rate <= MAX_AUDIO_RATE or math.gcd(rate, _COMMON_RATE) < _LEAST_COMMON:
        expected = f"a usual rate up to {MAX_AUDIO_RATE}, such as 44100 or 48000"
        raise unusable_field(name, f"{rate} samples per second", expected)
    if not 0 < samples * channels <= MAX_AUDIO_SAMPLES:
        seconds = MAX_AUDIO_SAMPLES // (channels * rate)
        found = f"{counted(samples, 'sample')} in each channel" if samples <= MAX_AUDIO_SAMPLES else "more"
        raise unusable_field(name, found, f"at least one, and up to {MAX_AUDIO_SAMPLES} samples in all channels "
                             f"together, {seconds} seconds of this rate")  # fmt: skip


def _samples(name: str, path: str, audio: InputContainer, rate: int) -> FloatArray:
    """Return the decoded samples, [samples, channels]; 16-bit and other whole numbers are divided by the largest."""
    import av
    import numpy as np

    resampler = av.AudioResampler(format="fltp")
    parts: list[FloatArray] = []
    count = 0
    try:
        for frame in audio.decode(audio=0):
            if int(frame.sample_rate) != rate:
                raise unusable_field(
                    name, f"{os.path.basename(path)} with rates {rate} and {frame.sample_rate}", "one rate"
                )
            for own in resampler.resample(frame):
                part = np.asarray(own.to_ndarray(), np.float32)
                count += part.shape[1]
                _check(name, rate, part.shape[0], count)
                parts.append(part)
    except ValueError as problem:
        if isinstance(problem, UserError | av.FFmpegError):
            raise
        raise UserError(f"{name}: {os.path.basename(path)}: its audio changes its format ({problem})") from None
    if not parts:
        raise unusable_field(name, "no samples", "at least one")
    found = np.nan_to_num(np.concatenate(parts, axis=1).T.clip(-1.0, 1.0))
    return np.ascontiguousarray(found, np.float32)


def _sound(samples_SC: FloatArray, rate: int) -> Sound:
    digest = hashlib.sha256(repr((samples_SC.shape, rate)).encode() + samples_SC.tobytes()).hexdigest()
    return Sound(digest, rate, samples_SC)
