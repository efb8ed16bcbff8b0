"""Videos that are written and read back by another reader: frames, size, rate, images, comment."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest
from av.video.reformatter import Colorspace
from PIL import Image

from modelpool.actors.outputs.file_content import read_sound
from modelpool.actors.outputs.video import VideoKind, encode_video, video_kind, write_video
from modelpool.pool.values.core.errors import OutputFailed, UnknownName, UnusableField
from modelpool.pool.values.core.stage_params import AudioSamples

#: how far a pixel is from what it was, on the average of a frame
NEAR = {VideoKind.MP4: 5.0, VideoKind.WEBM: 4.5, VideoKind.GIF: 6.0}
STREAMED = [VideoKind.MP4, VideoKind.WEBM]
COMMENT = '{"prompt": "a red circle, gr\u00f6\u00dfer"}'


def frames(count: int = 9, height: int = 32, width: int = 48) -> npt.NDArray[np.uint8]:
    """A bright square that goes to the right over a soft slope of colours."""
    video = np.zeros((count, height, width, 3), dtype=np.uint8)
    video[..., 0] = np.linspace(40, 200, width).astype(np.uint8)
    video[..., 2] = np.linspace(200, 60, height).astype(np.uint8)[:, None]
    for i in range(count):
        left = i * (width - 12) // max(1, count - 1)
        video[i, height // 4 : height // 2, left : left + 12] = (250, 240, 30)
    return video


def read(content: bytes) -> tuple[npt.NDArray[np.uint8], Fraction, dict[str, str]]:
    with av.open(io.BytesIO(content), "r") as container:
        rate = container.streams.video[0].average_rate
        assert rate is not None
        decoded = list(container.decode(video=0))
        assert {frame.colorspace for frame in decoded} == {Colorspace.ITU709}, "a player is told"
        shown = [frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709) for frame in decoded]
        return np.stack(shown), rate, dict(container.metadata)


@pytest.mark.parametrize("kind", STREAMED, ids=lambda kind: kind.value)
@pytest.mark.parametrize("rate", [8.0, 24.0, 30000 / 1001])
def test_a_video_has_its_frames_at_its_rate(kind: VideoKind, rate: float) -> None:
    video = frames()
    shown, told, _ = read(encode_video(video, rate, kind))
    assert shown.shape == video.shape
    assert float(told) == pytest.approx(rate, rel=1e-3)
    for before, after in zip(video, shown, strict=True):
        assert np.abs(before.astype(int) - after.astype(int)).mean() < NEAR[kind]


@pytest.mark.parametrize("kind", STREAMED, ids=lambda kind: kind.value)
@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (250, 240, 30), (128, 128, 128)])
def test_plain_colours_are_kept(kind: VideoKind, colour: tuple[int, int, int]) -> None:
    """Which they are not where the writer and the reader mean different colours by the same numbers."""
    video = np.full((2, 32, 48, 3), colour, dtype=np.uint8)
    shown, _, _ = read(encode_video(video, 8, kind))
    assert np.abs(video.astype(int) - shown.astype(int)).max() <= 2


@pytest.mark.parametrize("kind", STREAMED, ids=lambda kind: kind.value)
@pytest.mark.parametrize(("count", "height", "width"), [(1, 32, 32), (2, 33, 47), (5, 64, 18)])
def test_every_size_is_kept(kind: VideoKind, count: int, height: int, width: int) -> None:
    video = frames(count, height, width)
    shown, _, _ = read(encode_video(video, 16, kind))
    assert shown.shape == video.shape
    assert np.abs(video[0].astype(int) - shown[0].astype(int)).mean() < 2 * NEAR[kind]


@pytest.mark.parametrize("kind", STREAMED, ids=lambda kind: kind.value)
def test_a_comment_is_kept(kind: VideoKind) -> None:
    _, _, told = read(encode_video(frames(2), 8, kind, comment=COMMENT))
    assert {key.lower(): value for key, value in told.items()}["comment"] == COMMENT


def test_frames_out_of_order_in_memory_are_written_in_order() -> None:
    video = frames()
    backwards = video[::-1, :, ::-1]
    shown, _, _ = read(encode_video(backwards, 8))
    assert np.abs(backwards[0].astype(int) - shown[0].astype(int)).mean() < NEAR[VideoKind.MP4]


@pytest.mark.parametrize("rate", [8, 24, 30, 100])
def test_a_gif_lasts_as_long_as_its_frames(rate: int) -> None:
    video = frames()
    with Image.open(io.BytesIO(encode_video(video, rate, VideoKind.GIF, comment=COMMENT))) as gif:
        assert gif.info["comment"].decode() == COMMENT
        assert gif.info["loop"] == 0
        assert (gif.n_frames, gif.size) == (len(video), (48, 32))  # type: ignore[attr-defined]
        lasting = []
        for i, before in enumerate(video):
            gif.seek(i)
            lasting.append(gif.info["duration"])
            shown = np.asarray(gif.convert("RGB"))
            assert np.abs(before.astype(int) - shown.astype(int)).mean() < NEAR[VideoKind.GIF]
    assert sum(lasting) == pytest.approx(1000 * len(video) / rate, abs=10)


def test_a_gif_keeps_frames_that_are_alike() -> None:
    """A reader that counts frames finds them all, or as long a time."""
    video = np.repeat(frames(2), 3, axis=0)
    with Image.open(io.BytesIO(encode_video(video, 10, VideoKind.GIF))) as gif:
        lasting = 0
        for i in range(gif.n_frames):  # type: ignore[attr-defined]
            gif.seek(i)
            lasting += gif.info["duration"]
    assert lasting == 600


@pytest.mark.parametrize("kind", list(VideoKind), ids=lambda kind: kind.value)
def test_a_video_is_written_whole_under_its_name(kind: VideoKind, tmp_path: Path) -> None:
    path = tmp_path / f"film{kind.value.upper()}"
    path.write_bytes(b"what was there before")
    assert write_video(path, frames(3), 8, comment="x") == path
    if kind is VideoKind.GIF:
        assert path.read_bytes() == encode_video(frames(3), 8, kind, comment="x")
    else:  # read back: an encoder of another project need not write the same bytes twice
        shown, rate, told = read(path.read_bytes())
        assert (shown.shape, float(rate)) == (frames(3).shape, 8)
        assert "x" in {told.get("comment"), told.get("COMMENT")}
        assert np.abs(shown.astype(int) - frames(3).astype(int)).mean() < NEAR[kind]
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "nothing is left over"


def test_what_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"unknown video format '\.avi'.*Known: \.gif, \.mp4, \.webm"):
        write_video(tmp_path / "video.avi", frames(1), 8)
    with pytest.raises(UnknownName, match="unknown video format"):
        video_kind("video")
    with pytest.raises(OutputFailed, match=r"missing/video\.mp4: cannot be written \(No such file or directory\)"):
        write_video(tmp_path / "missing" / "video.mp4", frames(1), 8)
    with pytest.raises(UnusableField, match=r"frames: found 'float64 \(1, 4, 4, 3\)', expected uint8 numbers"):
        encode_video(np.zeros((1, 4, 4, 3)), 8)  # type: ignore[arg-type]
    with pytest.raises(UnusableField, match="expected uint8 numbers"):
        encode_video(np.zeros((4, 4, 3), np.uint8), 8)
    with pytest.raises(UnusableField, match="expected at least one frame"):
        encode_video(np.zeros((0, 4, 4, 3), np.uint8), 8)
    for rate in (0, -1, float("nan"), 1e9):
        with pytest.raises(UnusableField, match="frames per second: found"):
            encode_video(frames(1), rate)


@pytest.mark.parametrize("kind", VideoKind, ids=lambda kind: kind.value)
def test_a_video_has_its_sound(kind: VideoKind, tmp_path: Path) -> None:
    """As long and with the same notes, on the same sides; a GIF has none, and a video without sound no track."""
    notes, rate = (440.0, 1000.0), 24000
    places = np.arange(rate // 2)[:, None] / rate
    sound = AudioSamples((0.5 * np.sin(2 * np.pi * places * notes)).astype(np.float32), rate)
    path = write_video(tmp_path / f"a{kind.value}", frames(12), 24, comment=COMMENT, sound=sound)
    assert read_sound(write_video(tmp_path / f"silent{kind.value}", frames(2), 8)) is None
    found = read_sound(path)
    if kind is VideoKind.GIF:
        assert found is None
        return
    assert found is not None
    shown, told, texts = read(path.read_bytes())
    texts = {name.lower(): text for name, text in texts.items()}
    assert (len(shown), float(told), texts["comment"]) == (12, 24.0, COMMENT)
    assert len(found.samples_SC) / found.samples_per_second == pytest.approx(0.5, abs=0.1)
    for side, note in enumerate(notes):
        power = np.abs(np.fft.rfft(found.samples_SC[:, side]))
        loudest = np.argmax(power) * found.samples_per_second / len(found.samples_SC)
        assert loudest == pytest.approx(note, abs=4)
        assert np.abs(found.samples_SC[:, side]).max() == pytest.approx(0.5, abs=0.1)


def test_sound_that_cannot_be_written_is_refused() -> None:
    for samples in (np.zeros((0, 2), np.float32), np.zeros((9, 3), np.float32), np.full((9, 1), np.nan, np.float32)):
        with pytest.raises(UnusableField, match="samples"):
            encode_video(frames(2), 8, sound=AudioSamples(samples, 8000))


def test_frames_and_sound_of_a_long_video_are_next_to_each_other_in_its_file() -> None:
    """A player that reads it from the beginning has both, also after the 10 seconds that FFmpeg waits for packets."""
    sound = AudioSamples(np.full((20 * 8000, 1), 0.1, np.float32), 8000)
    for kind in STREAMED:
        content = encode_video(np.zeros((160, 16, 16, 3), np.uint8), 8, kind, sound=sound)
        reached, apart = {"video": 0.0, "audio": 0.0}, 0.0
        with av.open(io.BytesIO(content), "r") as container:
            packets = [packet for packet in container.demux() if packet.pts is not None and packet.pos is not None]
            for packet in sorted(packets, key=lambda packet: packet.pos):
                reached[packet.stream.type] = float(packet.pts * packet.time_base)
                apart = max(apart, abs(reached["video"] - reached["audio"]))
        assert min(reached.values()) > 19, kind
        assert apart < 2, kind


def test_a_file_that_ends_before_its_sound_is_damaged(tmp_path: Path) -> None:
    """Wherever it ends: it names an audio track of which it has nothing."""
    sound = AudioSamples(np.full((4000, 1), 0.1, np.float32), 8000)
    content, found = encode_video(frames(4), 8, VideoKind.WEBM, sound=sound), set[str]()
    for end in range(100, len(content), 40):
        path = tmp_path / "a.webm"
        path.write_bytes(content[:end])
        try:
            found.add("silent" if read_sound(path) is None else "heard")
        except OutputFailed:
            found.add("damaged")
    assert found == {"heard", "damaged"}
