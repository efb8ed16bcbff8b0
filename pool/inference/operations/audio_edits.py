"""Edits of audio: silence, parts, one behind another, mixtures, volume.

Shape legend: S samples, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from modelpool.pool.inference.operations.image_edits import NoSettings
from modelpool.pool.inference.operations.operation import (
    AUDIO,
    Inputs,
    Operation,
    Size,
    Sizes,
    Timings,
    first_timing,
    need,
    no_size,
)
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import AudioSamples, FloatArray

#: seconds of audio that an operation makes at most
MAX_SECONDS = 3600
#: samples of a channel: `MAX_SECONDS` at 48,000 a second
MAX_SAMPLES = MAX_SECONDS * 48_000


@dataclass(frozen=True, slots=True)
class Silence:
    """Seconds of silence, the samples per second, and channels."""

    seconds: float
    rate: int = 44100
    channels: int = 2


@dataclass(frozen=True, slots=True)
class TrimAudio:
    """Where the part begins in seconds, from the end if it is negative, and its length; parts of a sample are cut
    off."""

    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Volume:
    """In decibels: samples are multiplied by 10^(decibels / 20)."""

    decibels: float


def _silence_size(params: Silence, sizes: Sizes) -> Size:
    need("seconds", params.seconds, 0.001, MAX_SECONDS)
    need("rate", params.rate, 1, 192_000)
    need("channels", params.channels, 1, 2)
    need("seconds, rate", params.seconds * params.rate, 1, MAX_SAMPLES)
    return no_size(params, sizes)


def _silence(params: Silence, inputs: Inputs) -> AudioSamples:
    return AudioSamples(np.zeros((round(params.seconds * params.rate), params.channels), np.float32), params.rate)


def _trim_size(params: TrimAudio, sizes: Sizes) -> Size:
    need("start", params.start, -MAX_SECONDS, MAX_SECONDS)
    need("seconds", params.seconds, 0.001, MAX_SECONDS)
    return no_size(params, sizes)


def _trimmed(params: TrimAudio, inputs: Inputs) -> AudioSamples:
    audio: AudioSamples = inputs["audio"]
    count, rate = len(audio.samples_SC), audio.samples_per_second
    start = int(params.start * rate) if params.start >= 0 else max(0, count + int(params.start * rate))
    end = min(count, start + int(params.seconds * rate))
    if end <= start:
        length = count / rate
        raise UnusableField(f"start, seconds: found none of the {length:g} seconds between them, expected some")
    return AudioSamples(np.ascontiguousarray(audio.samples_SC[start:end]), rate)


def _audio_joined(params: NoSettings, inputs: Inputs) -> AudioSamples:
    """Return the second audio behind the first. A single channel is used for both of the other."""
    first, second = _alike(inputs)
    return AudioSamples(np.concatenate([first, second]), inputs["first"].samples_per_second)


def _audio_merged(params: NoSettings, inputs: Inputs) -> AudioSamples:
    """Return the sum of both, as long as the first; the second is cut off, or followed by silence. If a sample exceeds
    1, all are divided by the largest one."""
    first, second = _alike(inputs)
    found = first.copy()
    count = min(len(first), len(second))
    found[:count] += second[:count]
    most = float(np.abs(found).max(initial=0.0))
    return AudioSamples(found / np.float32(most) if most > 1 else found, inputs["first"].samples_per_second)


def _alike(inputs: Inputs) -> tuple[FloatArray, FloatArray]:
    first, second = inputs["first"], inputs["second"]
    if first.samples_per_second != second.samples_per_second:
        found, expected = second.samples_per_second, first.samples_per_second
        raise UnusableField(f"second: found {found} samples per second, expected {expected}, as the first audio has")
    channels = max(first.samples_SC.shape[1], second.samples_SC.shape[1])
    one, other = (
        np.repeat(each.samples_SC, channels, axis=1) if each.samples_SC.shape[1] == 1 else each.samples_SC
        for each in (first, second)
    )
    return one, other


def _volume_size(params: Volume, sizes: Sizes) -> Size:
    need("decibels", params.decibels, -100, 100)
    return no_size(params, sizes)


def _with_volume(params: Volume, inputs: Inputs) -> AudioSamples:
    audio: AudioSamples = inputs["audio"]
    return AudioSamples(audio.samples_SC * np.float32(10 ** (params.decibels / 20)), audio.samples_per_second)


def _trimmed_seconds(params: TrimAudio, timings: Timings) -> float:
    seconds = timings["audio"]
    start = params.start if params.start >= 0 else max(0.0, seconds + params.start)
    return max(0.0, min(params.seconds, seconds - start))


def _row(
    name: str, params: type[Any], inputs: tuple[str, ...], run: Any, size: Any = no_size, timing: Any = first_timing
) -> Operation:
    return Operation(name, params, dict.fromkeys(inputs, AUDIO), AUDIO, run, size, timing=timing)


_TWO = ("first", "second")
AUDIO_EDITS = (
    _row("audio_silence", Silence, (), _silence, _silence_size, lambda given, timings: given.seconds),
    _row("audio_trim", TrimAudio, ("audio",), _trimmed, _trim_size, _trimmed_seconds),
    _row("audio_concat", NoSettings, _TWO, _audio_joined, timing=lambda given, timings: sum(timings.values())),
    _row("audio_merge", NoSettings, _TWO, _audio_merged),
    _row("audio_volume", Volume, ("audio",), _with_volume, _volume_size),
)
