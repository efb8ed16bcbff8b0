"""Encodes samples as WAV, FLAC, MP3 or Opus files. Reading a WAV or FLAC file returns exactly the 16-bit samples that
were written; the others lose a little.

Knows formats, by the suffix of a file name; not recipes, folders or where anything ran.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from modelpool.actors.outputs.atomic_write import write_output
from modelpool.pool.values.core.errors import unknown_name, unusable_field

if TYPE_CHECKING:
    from av import AudioFrame

#: channels, samples
SampleArray: TypeAlias = npt.NDArray[np.int16]

_LAYOUTS = {1: "mono", 2: "stereo"}
_LOUDEST = 32767
#: samples of all channels per call of the encoder
_CHUNK = 4096
_MOST_SAMPLES_PER_SECOND = 384_000


class AudioKind(Enum):
    """An audio format, by its file suffix."""

    WAV = ".wav"
    FLAC = ".flac"
    MP3 = ".mp3"
    OPUS = ".opus"

    @property
    def is_lossless(self) -> bool:
        """Whether a file has exactly the samples that were written."""
        return self in (AudioKind.WAV, AudioKind.FLAC)


@dataclass(frozen=True, slots=True)
class _Encoding:
    """Encoder settings.

    container  name of the format
    codec      the encoder, and the form of its samples
    bits       per second; 0 for a lossless format
    rates      samples per second that it takes, the first for clips with others; () for any
    """

    container: str
    codec: str
    samples: str = "s16"
    bits: int = 0
    rates: tuple[int, ...] = ()

    def rate_of(self, samples_per_second: int) -> int:
        """Return the samples per second of a file."""
        is_kept = not self.rates or samples_per_second in self.rates
        return samples_per_second if is_kept else self.rates[0]


_ENCODINGS = {
    AudioKind.WAV: _Encoding("wav", "pcm_s16le"),
    AudioKind.FLAC: _Encoding("flac", "flac"),
    AudioKind.MP3: _Encoding("mp3", "libmp3lame", "s16p", 320_000, (44_100, 48_000, 32_000, 24_000, 22_050, 16_000)),
    AudioKind.OPUS: _Encoding("ogg", "libopus", "s16", 192_000, (48_000,)),
}


def audio_kind(path: str | Path) -> AudioKind:
    """Return the format for a file name. Raises UnknownName listing the known ones."""
    ending = Path(path).suffix.lower()
    if ending not in {kind.value for kind in AudioKind}:
        raise unknown_name("audio format", ending or str(path), [kind.value for kind in AudioKind])
    return AudioKind(ending)


def as_16_bits(wave_CL: npt.NDArray[np.floating]) -> SampleArray:
    """Convert a wave between -1 and 1 to the nearest 16-bit samples; louder values are clipped.

    Raises UnusableField for non-finite numbers.
    """
    if not np.isfinite(wave_CL).all():
        raise unusable_field("samples", "infinite or NaN", "finite numbers")
    samples_CL: SampleArray = np.rint(np.clip(wave_CL, -1.0, 1.0) * _LOUDEST).astype(np.int16)
    return samples_CL


def write_audio(
    path: str | Path, samples_CL: SampleArray, samples_per_second: int, *, title: str = "", comment: str = ""
) -> Path:
    """Write `samples_CL` to `path` atomically, in the format of its suffix, with `title` and `comment` as metadata.

    Returns the path. Raises UnknownName for another suffix, UnusableField for invalid samples or rates, OutputFailed
    naming the file if it cannot be written.
    """
    whole = Path(path)
    content = encode_audio(samples_CL, samples_per_second, audio_kind(whole), title=title, comment=comment)
    return write_output(whole, content)


def encode_audio(
    samples_CL: SampleArray,
    samples_per_second: int,
    kind: AudioKind = AudioKind.WAV,
    *,
    title: str = "",
    comment: str = "",
) -> bytes:
    """Encode samples of one or two channels as a file.

    Raises UnusableField for invalid samples or rates.
    """
    import av  # imported late: it is slow, and most programs write no audio

    layout = layout_of(samples_CL, samples_per_second)
    encoding = _ENCODINGS[kind]
    buffer = io.BytesIO()
    # no dates and no random numbers in a file
    options = {} if kind.is_lossless else {"fflags": "+bitexact"}
    with av.open(buffer, "w", format=encoding.container, options=options) as container:
        texts = {"title": title, "comment": comment}
        container.metadata.update({name: text for name, text in texts.items() if text})
        stream = container.add_stream(encoding.codec, rate=encoding.rate_of(samples_per_second), layout=layout)
        assert isinstance(stream, av.AudioStream)
        stream.format = av.AudioFormat(encoding.samples)
        if encoding.bits:
            stream.bit_rate = encoding.bits
        for frame in audio_frames(samples_CL, samples_per_second, layout):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def layout_of(samples_CL: SampleArray, samples_per_second: int) -> str:
    """Return the name of the channels of `samples_CL`. Raises UnusableField for invalid samples or rates."""
    if samples_CL.dtype != np.int16 or samples_CL.ndim != 2 or samples_CL.shape[0] not in _LAYOUTS:
        found = f"{samples_CL.dtype} {samples_CL.shape}"
        raise unusable_field("samples", found, "int16 numbers [channels, samples] of one or two channels")
    if not samples_CL.shape[1]:
        raise unusable_field("samples", 0, "at least one")
    if not 0 < samples_per_second <= _MOST_SAMPLES_PER_SECOND:
        raise unusable_field("samples per second", samples_per_second, f"more than 0, up to {_MOST_SAMPLES_PER_SECOND}")
    return _LAYOUTS[samples_CL.shape[0]]


def audio_frames(samples_CL: SampleArray, samples_per_second: int, layout: str) -> Iterator[AudioFrame]:
    """Yield `samples_CL` with channels of `layout` in pieces that an encoder takes."""
    import av

    channels = samples_CL.shape[0]
    interleaved_1N = np.ascontiguousarray(samples_CL.T).reshape(1, -1)
    for start in range(0, samples_CL.shape[1], _CHUNK):
        part = interleaved_1N[:, start * channels : (start + _CHUNK) * channels]
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(part), format="s16", layout=layout)
        frame.sample_rate, frame.pts = samples_per_second, start
        yield frame
