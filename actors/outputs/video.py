"""Encodes frames as a video: MP4 (H.264), WebM (VP9), GIF; with an audio track, except for GIFs: AAC, or Opus in WebM.

Knows formats, by the suffix of a file name; not recipes, folders or where anything ran. MP4 and WebM lose a little
quality and keep size and frames; a GIF keeps 256 colours per frame, and times in hundredths of a second.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from modelpool.actors.outputs.atomic_write import write_output
from modelpool.actors.outputs.audio import as_16_bits, audio_frames, layout_of
from modelpool.actors.request.video_output_fields import MAX_QUALITY
from modelpool.pool.values.core.errors import unknown_name, unusable_field
from modelpool.pool.values.core.stage_params import AudioSamples

if TYPE_CHECKING:
    from av import AudioStream, Packet
    from av.container import OutputContainer

#: frames, height, width, red green blue
FrameArray: TypeAlias = npt.NDArray[np.uint8]

#: a frame rate is a fraction; the usual ones (30000/1001) have no larger denominator
_MOST_PARTS = 1001
#: time units of GIFs per second
_GIF_TICKS = 100
_MOST_FRAMES_PER_SECOND = 1000
#: no dates and no random numbers in a file; packets of frames wait for packets of audio, however long the video is:
#: FFmpeg writes them after 10 seconds otherwise, and a player has to jump in the file
_MUXING = {"fflags": "+bitexact", "max_interleave_delta": "0"}


class VideoKind(Enum):
    """A video format, by its file suffix."""

    MP4 = ".mp4"
    WEBM = ".webm"
    GIF = ".gif"


@dataclass(frozen=True, slots=True)
class _Encoding:
    """Encoder settings.

    container  name of the format
    codec      the encoder
    options    its options: no visible loss at normal speed, not the smallest file
    audio      the encoder of an audio track, and its bits per second
    audio_rate samples per second that it takes; 0: the track's
    """

    container: str
    codec: str
    options: dict[str, str]
    audio: tuple[str, int]
    audio_rate: int = 0


_ENCODINGS = {
    # the index goes first, so that a browser can play while downloading
    VideoKind.MP4: _Encoding("mp4", "libx264", {"crf": "17", "preset": "medium"}, ("aac", 192_000)),
    VideoKind.WEBM: _Encoding(
        "webm", "libvpx-vp9", {"crf": "24", "b": "0", "row-mt": "1", "cpu-used": "4"}, ("libopus", 160_000), 48_000
    ),
}


def video_kind(path: str | Path) -> VideoKind:
    """Return the format for a file name. Raises UnknownName listing the known ones."""
    ending = Path(path).suffix.lower()
    if ending not in {kind.value for kind in VideoKind}:
        raise unknown_name("video format", ending or str(path), [kind.value for kind in VideoKind])
    return VideoKind(ending)


def write_video(
    path: str | Path,
    frames_THWC: FrameArray,
    frames_per_second: float,
    *,
    title: str = "",
    comment: str = "",
    sound: AudioSamples | None = None,
) -> Path:
    """Write `frames_THWC` to `path` atomically, in the format of its suffix, with `title` and `comment` as metadata and
    `sound` as the audio track.

    A GIF has only the comment, and no sound. Returns the path. Raises UnknownName for another suffix, UnusableField for
    invalid frames, samples or rates, OutputFailed naming the file if it cannot be written.
    """
    whole = Path(path)
    kind = video_kind(whole)
    content = encode_video(frames_THWC, frames_per_second, kind, title=title, comment=comment, sound=sound)
    return write_output(whole, content)


def encode_video(
    frames_THWC: FrameArray,
    frames_per_second: float,
    kind: VideoKind = VideoKind.MP4,
    *,
    title: str = "",
    comment: str = "",
    sound: AudioSamples | None = None,
    quality: int = 0,
) -> bytes:
    """Encode at least one frame as a video, with `sound` as its audio track. `quality` is 100 less the constant rate
    factor of the encoder; 0 is the default. Raises UnusableField for invalid frames, samples or rates."""
    if frames_THWC.dtype != np.uint8 or frames_THWC.ndim != 4 or frames_THWC.shape[-1] != 3:
        found = f"{frames_THWC.dtype} {frames_THWC.shape}"
        raise unusable_field("frames", found, "uint8 numbers [frames, height, width, 3]")
    if 0 in frames_THWC.shape:
        raise unusable_field("frames", frames_THWC.shape, "at least one frame of at least one pixel")
    if not 0 < frames_per_second <= _MOST_FRAMES_PER_SECOND:
        raise unusable_field("frames per second", frames_per_second, f"more than 0, up to {_MOST_FRAMES_PER_SECOND}")
    if kind is VideoKind.GIF:
        return _gif(frames_THWC, frames_per_second, comment)
    texts = {"title": title, "comment": comment}
    encoding = _ENCODINGS[kind]
    if quality:
        encoding = replace(encoding, options={**encoding.options, "crf": str(MAX_QUALITY - quality)})
    return _encoded(frames_THWC, frames_per_second, encoding, texts, sound)


def _encoded(
    frames_THWC: FrameArray,
    frames_per_second: float,
    encoding: _Encoding,
    texts: Mapping[str, str],
    sound: AudioSamples | None,
) -> bytes:
    import av  # imported late: it is slow, and most programs write no videos
    from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

    _, height, width, _ = frames_THWC.shape
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=encoding.container, options=_MUXING) as container:
        container.metadata.update({name: text for name, text in texts.items() if text})
        rate = Fraction(frames_per_second).limit_denominator(_MOST_PARTS)
        stream = container.add_stream(encoding.codec, rate=rate, options=encoding.options)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = width, height
        # colours at a quarter of the resolution, which every player supports, require even sizes
        stream.pix_fmt = "yuv420p" if width % 2 == height % 2 == 0 else "yuv444p"
        # set explicitly, because players guess differently for small and large videos
        coded = stream.codec_context
        coded.colorspace, coded.color_range = Colorspace.ITU709, ColorRange.MPEG
        coded.color_primaries, coded.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        # both streams exist before anything is written; the container orders what it writes
        track = None if sound is None else _audio_track(container, encoding, sound)
        for pixels_HWC in frames_THWC:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels_HWC), format="rgb24")
            # one thread: it is faster than starting one per core for each frame, and the bytes depend on no timing
            coloured = frame.reformat(
                format=stream.pix_fmt, dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG, threads=1
            )
            container.mux(stream.encode(coloured))
        container.mux(stream.encode(None))
        for packets in track or ():
            container.mux(packets)
    return buffer.getvalue()


def _audio_track(
    container: OutputContainer, encoding: _Encoding, sound: AudioSamples
) -> Iterator[list[Packet[AudioStream]]]:
    """Add an audio track to a file; the returned iterator encodes it."""
    import av

    samples_CL, (codec, bit_rate) = as_16_bits(sound.samples_SC.T), encoding.audio
    layout = layout_of(samples_CL, sound.samples_per_second)
    stream = container.add_stream(codec, rate=encoding.audio_rate or sound.samples_per_second, layout=layout)
    assert isinstance(stream, av.AudioStream)
    stream.bit_rate = bit_rate

    def packets() -> Iterator[list[Packet[AudioStream]]]:
        for frame in audio_frames(samples_CL, sound.samples_per_second, layout):
            yield stream.encode(frame)
        yield stream.encode(None)

    return packets()


def _gif(frames_THWC: FrameArray, frames_per_second: float, comment: str) -> bytes:
    """Encode a GIF: each frame lasts whole hundredths of a second, and the total is as long as at the exact rate."""
    count = len(frames_THWC)
    ends = [round(_GIF_TICKS * (i + 1) / frames_per_second) for i in range(count)]
    durations = [max(1, end - start) * 1000 // _GIF_TICKS for start, end in zip([0, *ends], ends, strict=False)]
    images = [Image.fromarray(np.ascontiguousarray(pixels_HWC)) for pixels_HWC in frames_THWC]
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=durations,
        loop=0,
        # equal frames stay separate frames
        optimize=False,
        comment=comment.encode(),
    )
    return buffer.getvalue()
