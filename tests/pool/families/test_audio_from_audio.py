"""Audio of a user as the start of a run: its latent is the autoencoder's mean of it, at the rate of the model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import pytest
import torch

from modelpool.actors.request.audio_fields import InputAudio
from modelpool.pool.inference.pixels.audio_resampling import resampled_audio
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import AudioSamples, EncodeImageParams, SampleParams
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.test_ace_step import ACE_STEP
from tests.pool.families.tiny_audio import CELL, CHANNELS
from tests.pool.families.tiny_audio import STABLE_AUDIO as DECODING
from tests.pool.families.tiny_shown import TinyFamilyModel

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
ACE_CELL, ACE_RATE, RATE, CELLS = 1920, 48000, 44100, 1024


def _vae() -> Any:
    """With an encoder of as many channels as the decoder."""
    return diffusers.AutoencoderOobleck(
        encoder_hidden_size=2 * CHANNELS, downsampling_ratios=[2, 4], channel_multiples=[1, 2], decoder_channels=4,
        decoder_input_channels=CHANNELS,
    )  # fmt: skip


STABLE_AUDIO = replace(DECODING, vae=_vae)


def tone(seconds: float, rate: int, channels: int = 1) -> npt.NDArray[np.float32]:
    """A tone of 440 Hz in one channel, and of 660 Hz in the other."""
    times = np.arange(int(seconds * rate)) / rate
    return np.stack([np.sin(2 * math.pi * 220 * (2 + one) * times) for one in range(channels)], 1).astype(np.float32)


def made(model: TinyFamilyModel, samples: npt.NDArray[np.float32], rate: int, **more: Any) -> Any:
    """The results of a workflow that changes audio."""
    nodes: dict[str, Any] = {
        "heard": {"kind": "audio", "audio": (samples, rate)},
        "e": {"kind": "encode", "model": "tiny", "inputs": {"audio": "heard"}},
        "s": {
            "kind": "sample", "request": {"model": "tiny", "prompt": "a song", "steps": 4, "seed": 3},
            "inputs": {"latent": "e"}, **more,
        },
        "d": {"kind": "decode", "model": "tiny", "inputs": {"latent": "s"}},
    }  # fmt: skip
    return model.made(workflow={"nodes": nodes, "output": "d"})


def expected_latent(model: TinyFamilyModel, samples_CS: torch.Tensor) -> torch.Tensor:
    """The mean of the autoencoder for samples at its rate."""
    with torch.no_grad():
        found: torch.Tensor = model.module(Role.VAE).encode(samples_CS[None]).latent_dist.mode()[0]
    return found


def test_audio_at_another_rate_has_the_same_tone() -> None:
    """As the formula says, and within a thousandth of the tone itself, away from the ends."""
    for rate, wanted in ((44100, 48000), (48000, 44100), (8000, 48000), (48000, 16000), (22050, 44100)):
        samples_CS = torch.from_numpy(tone(0.5, rate, 2).T.copy())
        found = resampled_audio(samples_CS, rate, wanted).numpy().T
        expected = tone(0.5, wanted, 2)
        assert found.shape == (math.ceil(len(samples_CS[0]) * wanted / rate), 2)
        edge = wanted // 20
        np.testing.assert_allclose(found[edge:-edge], expected[: len(found)][edge:-edge], atol=2e-3)
    # one sample, by the sum that the module states
    old, new, place = 147, 160, 1000
    one = tone(0.1, 44100)[:, 0].astype(np.float64)
    at = (place / new - np.arange(len(one)) / old) * 0.99 * min(old, new)
    weights = np.where(np.abs(at) < 6, np.sinc(at) * np.cos(np.pi * at / 12) ** 2, 0) * 0.99 * min(old, new) / old
    found = resampled_audio(torch.from_numpy(one)[None], 44100, 48000)[0, place]
    assert float(found) == pytest.approx(float((one * weights).sum()), abs=1e-9)
    same = torch.ones(1, 5)
    assert resampled_audio(same, 48000, 48000) is same


def test_a_song_begins_with_the_latent_of_audio(tmp_path: Path) -> None:
    """ACE-Step: one channel is read as two, the samples that fill no cell are cut off at both ends, and a part of the
    noise levels is run."""
    model = TinyFamilyModel(tmp_path, ACE_STEP)
    samples = tone(0.5, 44100)
    made_of = made(model, samples, 44100, strength=0.5)
    (work,) = (each for each in made_of.works.values() if isinstance(each, EncodeImageParams))
    (encoded,) = made_of.of(EncodeImageParams)
    heard = resampled_audio(torch.from_numpy(samples.T.copy()), 44100, ACE_RATE).expand(2, -1)
    cells = heard.shape[1] // ACE_CELL
    assert (work.seconds, cells) == (cells * ACE_CELL / ACE_RATE, 12)
    cut = (heard.shape[1] - cells * ACE_CELL) // 2
    expected = expected_latent(model, heard[:, cut : cut + cells * ACE_CELL])
    np.testing.assert_allclose(encoded.samples_CHW, expected, atol=1e-5)
    assert made_of.latents[0][0].shape == expected.shape
    out = made_of.results[made_of.tasks[-1].task_id]
    assert isinstance(out, AudioSamples)
    assert out.samples_SC.shape == (cells * ACE_CELL, 2)
    # almost nothing of the noise levels leaves almost the same
    little = made(model, samples, 44100, strength=0.25).latents[0][0]
    much = made(model, samples, 44100).latents[0][0]
    found = (little, made_of.latents[0][0], much)
    distances = [float(np.abs(np.asarray(one) - expected.numpy()).mean()) for one in found]
    assert distances == sorted(distances)
    (run,) = (each for each in made_of.works.values() if isinstance(each, SampleParams))
    assert run.shape.seconds == work.seconds
    with pytest.raises(UserError, match=r"audio: found '0\.01 seconds'"):
        made(model, tone(0.01, 44100), 44100)
    model.close()


def test_silence_follows_audio_in_latents_of_one_length(tmp_path: Path) -> None:
    """Stable Audio: the result is as long as the audio of the user."""
    model = TinyFamilyModel(tmp_path, STABLE_AUDIO)
    samples = tone(0.1, RATE, 2)
    made_of = made(model, samples, RATE, strength=0.5)
    (encoded,) = made_of.of(EncodeImageParams)
    heard = torch.zeros(2, CELLS * CELL)
    heard[:, : len(samples)] = torch.from_numpy(samples.T.copy())
    np.testing.assert_allclose(encoded.samples_CHW, expected_latent(model, heard), atol=1e-5)
    out = made_of.results[made_of.tasks[-1].task_id]
    assert isinstance(out, AudioSamples)
    assert out.samples_SC.shape == (len(samples), 2)
    with pytest.raises(UserError, match="audio: found '60 seconds'"):
        made(model, tone(60, 100), 100)
    model.close()


@pytest.mark.parametrize("family", [ACE_STEP, STABLE_AUDIO], ids=lambda family: family.name)
@pytest.mark.counted
def test_what_encoding_holds_is_estimated(family: Any, tmp_path: Path) -> None:
    from modelpool.pool.devices.sim import device as sim

    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    model = TinyFamilyModel(tmp_path, family, "sim")
    made_of = made(model, tone(0.5, RATE), RATE, strength=0.5)
    for task, cost in zip(made_of.tasks, made_of.costs, strict=True):
        if isinstance(made_of.works[task.task_id], EncodeImageParams):
            assert cost.working_bytes <= task.activation_bytes <= 1.3 * cost.working_bytes
    model.close()


def test_audio_of_equal_samples_is_one_input(tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, STABLE_AUDIO)
    one, other = (made(model, tone(0.1, RATE), RATE) for _ in range(2))
    assert one.tasks[-1].task_id == other.tasks[-1].task_id
    assert InputAudio("a", 1.0, 2, 1) == InputAudio("a", 1.0, 2, 1)
    model.close()
