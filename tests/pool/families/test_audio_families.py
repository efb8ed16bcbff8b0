"""Models of audio, whole: equal to diffusers on the same weights, texts and noise, and saved again as they were."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_audio import CELL, CHANNELS, STABLE_AUDIO, seconds_model
from tests.pool.families.tiny_transformers import seeded
from tests.pool.families.whole_transformer import SECONDS, SEED, STEPS, Whole

RATE, CELLS = 44100, 1024


class _Angles(diffusers.EDMEulerScheduler):  # type: ignore[misc]
    """Steps of Euler, and the levels and the number that the model is told of Stable Audio's own scheduler."""

    def precondition_noise(self, sigma: Tensor) -> Tensor:
        return sigma.atan() / math.pi * 2


def _pipeline(whole: Whole) -> Any:
    scheduler = _Angles(0.3, 500.0, 1.0, sigma_schedule="exponential", prediction_type="v_prediction")
    model, vae = whole.module(Role.DIFFUSION_MODEL), whole.module(Role.VAE)
    return diffusers.StableAudioPipeline(vae, None, seeded(seconds_model, 3), None, model, scheduler)


def _given(texts: tuple[Encoded, ...]) -> dict[str, Tensor]:
    given = {}
    for side, text in zip(("", "negative_"), texts, strict=True):
        given[f"{side}prompt_embeds"] = torch.from_numpy(text.context_LD)[None]
        given[f"{side}attention_mask"] = torch.from_numpy(text.others["context_mask"])[None].long()
    return given


def test_a_audio_is_that_of_diffusers(tmp_path: Path) -> None:
    """Euler over exponential levels, since the authors' own sampler draws noise that depends on its library."""
    whole = Whole(tmp_path, STABLE_AUDIO, sampler="euler")
    texts = whole.texts()
    latent = whole.latent(texts)
    noise = ImageNoise(SEED).draw((1, CHANNELS, CELLS))
    call = {"num_inference_steps": STEPS, "guidance_scale": 7.0, "audio_end_in_s": SECONDS}
    with torch.no_grad():
        pipeline = _pipeline(whole)
        expected = pipeline(**_given(texts), latents=noise, output_type="latent", **call).audios
        heard = pipeline(**_given(texts), latents=noise, output_type="pt", **call).audios
    np.testing.assert_allclose(latent.samples_CHW, expected[0], atol=1e-4 * max(1.0, float(expected.std())))
    samples = whole.pixels(latent)
    assert samples.shape == (int(SECONDS * RATE), 2)
    np.testing.assert_allclose(samples.T, heard[0], atol=1e-4)
    assert samples.std() > 1e-3
    whole.engine.close()


def test_a_longer_audio_is_told_of_its_length(tmp_path: Path) -> None:
    """It is not a longer part of the same: the model is told how long the whole is."""
    whole = Whole(tmp_path, STABLE_AUDIO)
    texts = whole.texts()
    short = whole.latent(texts)
    whole.seconds = 30.0
    long = whole.latent(texts)
    assert not np.allclose(short.samples_CHW, long.samples_CHW, atol=1e-3)
    assert whole.pixels(long).shape == (CELLS * CELL, 2)  # tiny cells: there are no more samples
    whole.engine.close()


def test_a_file_saved_again_is_that_file(tmp_path: Path) -> None:
    """Tensor for tensor, those that embed seconds included."""
    whole = Whole(tmp_path, STABLE_AUDIO)
    save_checkpoint(open_checkpoint(whole.path), tmp_path / "second.safetensors")
    before, after = load_file(whole.path), load_file(tmp_path / "second.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    module = whole.module(Role.DIFFUSION_MODEL)
    assert "seconds.end_number_conditioner.time_positional_embedding.1.weight" in module.state_dict()
    whole.engine.close()


def test_without_what_embeds_seconds_it_is_refused_by_name(tmp_path: Path) -> None:
    """A part of such a file, as some are handed around."""
    from safetensors.torch import save_file

    from modelpool.pool.values.core.errors import UnknownArchitecture

    kept = {key: value for key, value in STABLE_AUDIO.file().items() if "seconds_" not in key}
    save_file(kept, tmp_path / "part.safetensors")
    with pytest.raises(UnknownArchitecture, match="embed seconds"):
        open_checkpoint(tmp_path / "part.safetensors").build(Role.DIFFUSION_MODEL)
