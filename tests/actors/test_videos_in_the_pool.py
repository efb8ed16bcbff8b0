"""Videos and audio clips in a driver's hands: results, files, manifest, and the values read back from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from modelpool import AudioResult, VideoResult
from modelpool.actors.graph.features.recipe import RecipeLowNoise
from modelpool.actors.outputs.file_content import read_sound
from modelpool.actors.outputs.image_file import read_recipe
from modelpool.actors.outputs.output_file import read_video_recipe
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import Latent, VideoFrames
from tests.actors.fakes import AUDIOS, PAIR, SOUNDING, VIDEOS
from tests.actors.loop_connection import open_pool


def video(**fields) -> GenerateRequest:
    return GenerateRequest(**{"model": VIDEOS, "prompt": "a red circle", "seed": 1, "frames": 5, **fields})


def audio(**fields) -> GenerateRequest:
    return GenerateRequest(**{"model": AUDIOS, "prompt": "rain", "seed": 1, "seconds": 0.5, **fields})


def test_a_video_is_frames_and_their_rate_and_a_file_that_says_how_it_was_made(tmp_path: Path) -> None:
    with open_pool() as pool:
        (made,) = pool.submit(video(frame_rate=10), output=tmp_path).videos()
    assert isinstance(made, VideoResult)
    assert made.frames.shape == (5, 64, 64, 3)
    assert made.frame_rate == 10.0
    assert made.path is not None
    assert made.path.suffix == ".mp4"
    assert read_video_recipe(made.path) == made.recipe
    copy = made.save(tmp_path / "copy.gif")
    assert read_video_recipe(copy) == made.recipe
    animation = made.save(tmp_path / "copy.webp")
    assert read_recipe(animation) == made.recipe
    with Image.open(animation) as opened:
        assert (opened.format, getattr(opened, "n_frames", 1)) == ("WEBP", 5)


def test_a_video_has_its_sound_in_python_and_in_its_file(tmp_path: Path) -> None:
    with open_pool() as pool:
        jobs = pool.submit([video(frame_rate=SOUNDING), video(frame_rate=24)], output=tmp_path)
        made, silent = sorted(jobs.videos(), key=lambda one: one.index)
    assert isinstance(made, VideoResult)
    assert isinstance(silent, VideoResult)
    assert silent.sound is None
    assert made.sound is not None
    assert (made.sound.samples_SC.shape, made.sound.samples_per_second) == ((1600, 2), 8000)
    for path, is_heard in ((made.path, True), (made.save(tmp_path / "copy.webm"), True), (silent.path, False)):
        assert path is not None
        assert (read_sound(path) is not None) == is_heard


def test_a_video_of_two_diffusion_models_says_how_each_was_run(tmp_path: Path) -> None:
    """And is found again by that: the rest is the models' own."""
    asked = video(model=PAIR, loras=["light:0.5:low"], low_noise=":0.9")
    with open_pool() as pool:
        (made,) = pool.submit(asked, output=tmp_path).videos()
        assert pool.recipe(asked).digest == made.recipe.digest
        assert pool.recipe(video(model=PAIR, loras=["light:0.5:low"])).digest != made.recipe.digest
    assert made.recipe.low_noise == RecipeLowNoise(0.9, 3.0)
    assert [(lora.name, lora.noise) for lora in made.recipe.loras] == [("light", "low")]
    assert made.path is not None
    assert read_video_recipe(made.path) == made.recipe


def test_a_audio_is_samples_and_their_rate(tmp_path: Path) -> None:
    with open_pool() as pool:
        (made,) = pool.submit(audio(format="flac"), output=tmp_path).audios()
    assert isinstance(made, AudioResult)
    assert made.samples.shape == (4000, 2)
    assert made.samples_per_second == 8000
    assert made.path is not None
    assert made.path.suffix == ".flac"
    assert read_video_recipe(made.path) == made.recipe
    assert read_video_recipe(made.save(tmp_path / "copy.wav")) == made.recipe


def test_all_kinds_of_one_submission_are_handed_out_and_listed_once(tmp_path: Path) -> None:
    image = GenerateRequest(model="shapes", prompt="a red circle", seed=1)
    with open_pool() as pool:
        jobs = pool.submit([video(), audio(), image, video(format="webm")], output=tmp_path)
        kinds = {result.index: type(result).__name__ for result in jobs.results()}
        assert kinds == {0: "VideoResult", 1: "AudioResult", 2: "ImageResult", 3: "VideoResult"}
        again = [pool.recipe(one).digest for one in (video(), audio(), image, video(format="webm"))]
    lines = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert {line["digest"] for line in lines} == set(again)
    assert {Path(line["file"]).suffix for line in lines} == {".mp4", ".webm", ".wav", ".png"}
    for line in lines:
        assert (tmp_path / line["file"]).is_file()
    assert len({line["pixels_sha256"] for line in lines}) == 3  # both files of the video have its frames


def test_frames_of_a_video_are_those_of_its_seed() -> None:
    with open_pool() as pool:
        first, second, other = sorted(
            pool.submit([video(), video(), video(seed=2)]).videos(), key=lambda one: one.index
        )
    np.testing.assert_array_equal(first.frames, second.frames)
    assert not np.array_equal(first.frames, other.frames)


@pytest.mark.parametrize("fields", [{"frames": 6}, {"seconds": 1.0}, {"format": "png"}])
def test_what_is_wrong_raises_in_the_driver_and_queues_nothing(fields: dict[str, object]) -> None:
    with open_pool() as pool, pytest.raises(UserError, match=f"^{next(iter(fields))}: "):
        pool.submit(video(**fields))


def test_a_video_is_made_stage_by_stage_too() -> None:
    """The latent in the middle says how long the video is, also where the driver brings it itself."""
    with open_pool() as pool:
        text = pool.encode("a red circle", model=VIDEOS)
        latent = pool.sample(text, model=VIDEOS, seed=1, frames=9, frame_rate=4)
        decoded = pool.decode(latent, model=VIDEOS).result(10)
        assert isinstance(decoded, VideoFrames)
        assert (len(decoded.frames_THWC), decoded.frame_rate) == (9, 4.0)
        own = pool.decode(Latent(np.zeros((4, 3, 8, 16), np.float32)), model=VIDEOS).result(10)
        assert isinstance(own, VideoFrames)
        assert own.frames_THWC.shape == (9, 64, 128, 3)
        with pytest.raises(UserError, match=r"^latent: found .*expected a latent of a video"):
            pool.decode(Latent(np.zeros((4, 8, 16), np.float32)), model=VIDEOS)


def test_latents_that_a_driver_brings_with_different_audio_are_different_inputs() -> None:
    frames = np.zeros((4, 3, 8, 16), np.float32)
    with open_pool() as pool:
        brought = [Latent(frames), *(Latent(frames, np.full((9, 4), value, np.float32)) for value in (0, 1))]
        tasks = [pool.decode(latent, model=VIDEOS).stage.latent.task_id for latent in brought]
    assert len(set(tasks)) == len(tasks)
