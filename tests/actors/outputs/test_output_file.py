"""What was made becomes a file that says how it was made, in every format; and an image stands for each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.contact_sheet import LabelledImage, make_contact_sheet
from modelpool.actors.outputs.file_content import labels_in, read_content, recipe_of_file
from modelpool.actors.outputs.folder import OutputFolder, file_name
from modelpool.actors.outputs.image_file import read_recipe
from modelpool.actors.outputs.output_file import FinishedOutput, array_of_output, encoded, read_video_recipe
from modelpool.actors.outputs.place import kind_of_recipe
from modelpool.actors.outputs.preview_image import first_image, wave_image
from modelpool.actors.request.labels import Labels
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import AudioSamples, Output, VideoFrames
from tests.actors.outputs.test_image_file import RECIPE
from tests.each_case import each_case

VIDEO_RECIPE = dataclasses.replace(RECIPE, width=32, height=16, frames=5, frame_rate=8.0)
AUDIO_RECIPE = dataclasses.replace(RECIPE, width=0, height=0, seconds=0.5)


def video() -> VideoFrames:
    """Five plain frames, the first of them red."""
    colours = np.array([[200, 30, 30], [30, 200, 30], [30, 30, 200], [0, 0, 0], [255, 255, 255]], np.uint8)
    return VideoFrames(np.broadcast_to(colours[:, None, None], (5, 16, 32, 3)).copy(), 8.0)


def audio() -> AudioSamples:
    """A note that begins half-way."""
    places = np.arange(4000)
    wave = np.where(places < 2000, 0.0, np.sin(places / 10))
    return AudioSamples(np.stack([wave, wave], axis=1).astype(np.float32), 8000)


CASES = [
    ("mp4", VIDEO_RECIPE),
    ("webm", VIDEO_RECIPE),
    ("gif", VIDEO_RECIPE),
    ("wav", AUDIO_RECIPE),
    ("flac", AUDIO_RECIPE),
]


def made(recipe: Recipe) -> Output:
    return video() if recipe.frames else audio()


@each_case(("name", "recipe"), CASES)
@each_case("prompt", ["a red circle", "", '\u9ad8\u5c71: caf\u00e9, "x" = y; # 1\nnext line', "long " * 3000])
def test_every_format_carries_the_whole_recipe(name: str, recipe: Recipe, prompt: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipe, format=name, prompt=prompt)
    path = tmp_path / file_name(recipe)
    assert path.suffix == f".{name}"
    path.write_bytes(encoded(made(recipe), recipe))
    assert read_video_recipe(path) == recipe


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_folder_keeps_it_under_the_rules_of_images(name: str, recipe: Recipe, tmp_path: Path) -> None:
    """Whole, once, listed; and the sheet shows it."""
    recipe = dataclasses.replace(recipe, format=name)
    out = OutputFolder(tmp_path)
    finished = FinishedOutput(recipe, made(recipe), 0, "job", "gpu-0", 1.0)
    path = out.write(finished).path
    assert out.write(finished).path == path
    assert out.finished() == {recipe.digest: path}
    made_array, read = array_of_output(made(recipe)), read_content(path)
    assert read.shape == made_array.shape
    assert abs(read.astype(float) - made_array).mean() < (1 / 32767 if recipe.seconds else 8)
    assert list(out.damaged()) == []
    (line,) = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert (line["file"], line["recipe"]["format"]) == (path.name, name)
    assert out.contact_sheet().stat().st_size > 0


@pytest.mark.parametrize(("quality", "near"), [(90, 8.0), (100, 0.0)])
def test_an_animated_webp_has_its_frames_its_time_and_its_recipe(quality: int, near: float, tmp_path: Path) -> None:
    recipe = dataclasses.replace(VIDEO_RECIPE, format="webp", quality=quality)
    path = tmp_path / file_name(recipe)
    path.write_bytes(encoded(video(), recipe))
    assert path.suffix == ".webp"
    with Image.open(str(path)) as image:
        assert (image.format, image.is_animated) == ("WEBP", True)  # type: ignore[attr-defined]
        durations = []
        for place in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(place)
            image.load()
            durations.append(image.info["duration"])
    assert sum(durations) == round(1000 * len(video().frames_THWC) / video().frame_rate)
    read = read_content(path)
    assert read.shape == video().frames_THWC.shape
    assert np.abs(read.astype(int) - video().frames_THWC.astype(int)).mean() <= near
    assert recipe_of_file(path) == recipe


@pytest.mark.parametrize("name", ["mp4", "webm", "gif", "webp"])
def test_the_first_frame_stands_for_a_video(name: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(VIDEO_RECIPE, format=name)
    path = tmp_path / file_name(recipe)
    path.write_bytes(encoded(video(), recipe))
    image = first_image(path)
    assert image.size == (32, 16)
    red, green, blue = image.getpixel((16, 8))  # type: ignore[misc]
    assert red > 150
    assert max(green, blue) < 80


def test_layers_of_an_image_are_kept_exactly_in_one_file(tmp_path: Path) -> None:
    """Also equal ones and empty ones, which programs for animations leave out; the lowest is shown on white."""
    layers = np.random.default_rng(2).integers(0, 256, (5, 16, 32, 4), np.uint8)
    layers[0, :, :, 3], layers[2], layers[3:] = 0, layers[1], 0
    for count in (1, 5):
        recipe = dataclasses.replace(VIDEO_RECIPE, frames=count, frame_rate=1.0, prompt=f"{count} layers")
        out = OutputFolder(tmp_path)
        finished = FinishedOutput(
            recipe, VideoFrames(layers[:count], 1.0), 0, "job", "gpu-0", 1.0, labels=Labels("one")
        )
        path = out.write(finished).path
        assert (path.suffix, kind_of_recipe(recipe)) == (".png", "image")
        np.testing.assert_array_equal(read_content(path), layers[:count])
        assert (read_recipe(path), labels_in(path).id) == (recipe, "one")
        assert np.asarray(first_image(path)).min() == 255
        assert list(out.damaged()) == []
    path.write_bytes(path.read_bytes().replace(b"fdAT", b"fdAX"))
    assert [each.path for each in out.damaged()] == [path]


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_the_wave_stands_for_a_audio(name: str, tmp_path: Path) -> None:
    """Quiet in its first half, loud in its second."""
    recipe = dataclasses.replace(AUDIO_RECIPE, format=name)
    path = tmp_path / file_name(recipe)
    path.write_bytes(encoded(audio(), recipe))
    inked = (np.asarray(first_image(path)).min(axis=2) < 200).sum(axis=0)
    middle = len(inked) // 2
    assert inked[: middle - 4].max() <= 2
    assert np.median(inked[middle + 4 :]) > 20


def test_a_wave_of_fewer_samples_than_pixels_is_drawn() -> None:
    assert wave_image(np.full((1, 3), 20000, np.int16)).size[0] > 3


def test_the_sheet_says_how_long(tmp_path: Path) -> None:
    """The label has room for it: the sheet of a video differs from the sheet of the same file as an image."""
    recipe = dataclasses.replace(VIDEO_RECIPE, format="gif")
    path = tmp_path / file_name(recipe)
    path.write_bytes(encoded(video(), recipe))
    as_video = make_contact_sheet([LabelledImage(path, recipe)])
    assert as_video != make_contact_sheet([LabelledImage(path, RECIPE)])


def test_a_video_of_another_program_has_no_recipe(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "other.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 32, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    with pytest.raises(UserError, match="no 'comment' text in this file"):
        read_video_recipe(tmp_path / "other.mp4")


def test_what_is_no_video_is_told(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("nothing")
    with pytest.raises(UserError, match="cannot be read as a video or an audio clip"):
        read_video_recipe(tmp_path / "text.mp4")
    with pytest.raises(UserError, match="no such file"):
        read_video_recipe(tmp_path / "gone.mp4")
