"""Films that are written and read back by another reader: frames, size, rate, pictures, comment."""

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

from modelpool.actors.outputs.video import FilmKind, encode_film, film_kind, write_film
from modelpool.pool.core.errors import OutputFailed, UnknownName, UnusableField

#: how far a pixel is from what it was, on the average of a frame
NEAR = {FilmKind.MP4: 5.0, FilmKind.WEBM: 4.5, FilmKind.GIF: 6.0}
STREAMED = [FilmKind.MP4, FilmKind.WEBM]
COMMENT = '{"prompt": "a red circle, gr\u00f6\u00dfer"}'


def frames(count: int = 9, height: int = 32, width: int = 48) -> npt.NDArray[np.uint8]:
    """A bright square that goes to the right over a soft slope of colours."""
    film = np.zeros((count, height, width, 3), dtype=np.uint8)
    film[..., 0] = np.linspace(40, 200, width).astype(np.uint8)
    film[..., 2] = np.linspace(200, 60, height).astype(np.uint8)[:, None]
    for i in range(count):
        left = i * (width - 12) // max(1, count - 1)
        film[i, height // 4 : height // 2, left : left + 12] = (250, 240, 30)
    return film


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
def test_a_film_has_its_frames_at_its_rate(kind: FilmKind, rate: float) -> None:
    film = frames()
    shown, told, _ = read(encode_film(film, rate, kind))
    assert shown.shape == film.shape
    assert float(told) == pytest.approx(rate, rel=1e-3)
    for before, after in zip(film, shown, strict=True):
        assert np.abs(before.astype(int) - after.astype(int)).mean() < NEAR[kind]


@pytest.mark.parametrize("kind", STREAMED, ids=lambda kind: kind.value)
@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (250, 240, 30), (128, 128, 128)])
def test_plain_colours_are_kept(kind: FilmKind, colour: tuple[int, int, int]) -> None:
    """Which they are not where the writer and the reader mean different colours by the same numbers."""
    film = np.full((2, 32, 48, 3), colour, dtype=np.uint8)
    shown, _, _ = read(encode_film(film, 8, kind))
    assert np.abs(film.astype(int) - shown.astype(int)).max() <= 2


@pytest.mark.parametrize("kind", STREAMED, ids=lambda kind: kind.value)
@pytest.mark.parametrize(("count", "height", "width"), [(1, 32, 32), (2, 33, 47), (5, 64, 18)])
def test_every_size_is_kept(kind: FilmKind, count: int, height: int, width: int) -> None:
    film = frames(count, height, width)
    shown, _, _ = read(encode_film(film, 16, kind))
    assert shown.shape == film.shape
    assert np.abs(film[0].astype(int) - shown[0].astype(int)).mean() < 2 * NEAR[kind]


@pytest.mark.parametrize("kind", STREAMED, ids=lambda kind: kind.value)
def test_a_comment_is_kept(kind: FilmKind) -> None:
    _, _, told = read(encode_film(frames(2), 8, kind, comment=COMMENT))
    assert {key.lower(): value for key, value in told.items()}["comment"] == COMMENT


def test_frames_out_of_order_in_memory_are_written_in_order() -> None:
    film = frames()
    backwards = film[::-1, :, ::-1]
    shown, _, _ = read(encode_film(backwards, 8))
    assert np.abs(backwards[0].astype(int) - shown[0].astype(int)).mean() < NEAR[FilmKind.MP4]


@pytest.mark.parametrize("rate", [8, 24, 30, 100])
def test_a_gif_lasts_as_long_as_its_frames(rate: int) -> None:
    film = frames()
    with Image.open(io.BytesIO(encode_film(film, rate, FilmKind.GIF, comment=COMMENT))) as gif:
        assert gif.info["comment"].decode() == COMMENT
        assert gif.info["loop"] == 0
        assert (gif.n_frames, gif.size) == (len(film), (48, 32))  # type: ignore[attr-defined]
        lasting = []
        for i, before in enumerate(film):
            gif.seek(i)
            lasting.append(gif.info["duration"])
            shown = np.asarray(gif.convert("RGB"))
            assert np.abs(before.astype(int) - shown.astype(int)).mean() < NEAR[FilmKind.GIF]
    assert sum(lasting) == pytest.approx(1000 * len(film) / rate, abs=10)


def test_a_gif_keeps_frames_that_are_alike() -> None:
    """A reader that counts frames finds them all, or as long a time."""
    film = np.repeat(frames(2), 3, axis=0)
    with Image.open(io.BytesIO(encode_film(film, 10, FilmKind.GIF))) as gif:
        lasting = 0
        for i in range(gif.n_frames):  # type: ignore[attr-defined]
            gif.seek(i)
            lasting += gif.info["duration"]
    assert lasting == 600


@pytest.mark.parametrize("kind", list(FilmKind), ids=lambda kind: kind.value)
def test_a_film_is_written_whole_under_its_name(kind: FilmKind, tmp_path: Path) -> None:
    path = tmp_path / f"film{kind.value.upper()}"
    path.write_bytes(b"what was there before")
    assert write_film(path, frames(3), 8, comment="x") == path
    assert path.read_bytes() == encode_film(frames(3), 8, kind, comment="x")
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "nothing is left over"


def test_what_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"unknown film format '\.avi'.*Known: \.gif, \.mp4, \.webm"):
        write_film(tmp_path / "film.avi", frames(1), 8)
    with pytest.raises(UnknownName, match="unknown film format"):
        film_kind("film")
    with pytest.raises(OutputFailed, match=r"missing/film\.mp4: cannot be written \(No such file or directory\)"):
        write_film(tmp_path / "missing" / "film.mp4", frames(1), 8)
    with pytest.raises(UnusableField, match=r"frames: found 'float64 \(1, 4, 4, 3\)', expected uint8 numbers"):
        encode_film(np.zeros((1, 4, 4, 3)), 8)  # type: ignore[arg-type]
    with pytest.raises(UnusableField, match="expected uint8 numbers"):
        encode_film(np.zeros((4, 4, 3), np.uint8), 8)
    with pytest.raises(UnusableField, match="expected at least one frame"):
        encode_film(np.zeros((0, 4, 4, 3), np.uint8), 8)
    for rate in (0, -1, float("nan"), 1e9):
        with pytest.raises(UnusableField, match="frames per second: found"):
            encode_film(frames(1), rate)
