"""Cosmos makes of an image what diffusers makes: on the same weights, texts, image and noise, that on the image
included."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.inference.conditioning.first_frame import FIRST_FRAME_SIGMA, noises_image
from modelpool.pool.inference.sampling.noise import ImageNoise, image_noise_seed
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.values.core.stage_params import EncodeImageParams, Latent, SampleParams, VideoFrames
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_transformer_families import _RESIZING, _Harmless
from tests.pool.families.tiny_relatives import RELATIVES
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.inference.conditioning.test_image_concat import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

TINY = RELATIVES["cosmos_i2v"]
PIPELINES = {"cosmos_i2v": diffusers.CosmosVideoToWorldPipeline}
WIDTH, HEIGHT, FRAMES, STEPS, SEED, RATE = 96, 64, 9, 3, 11, 24.0
FIELDS: dict[str, Any] = {
    "frames": FRAMES, "frame_rate": RATE, "steps": STEPS, "negative": "a dog", "width": WIDTH, "height": HEIGHT,
}  # fmt: skip


class _Lenient(_Harmless):
    """Leaves a video as it is."""

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def image(seed: int = 4) -> Image.Image:
    """Nothing in it is like anything beside it."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))


def _expected(model: TinyFamilyModel, texts: dict[str, Any], cfg: float, **call: Any) -> Any:
    transformer = TINY.model().eval()
    # ours is given its channel of padding
    transformer.load_state_dict(model.module(Role.DIFFUSION_MODEL).state_dict())
    scheduler = diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80, sigma_data=0.5)
    pipeline = PIPELINES[model.family.name](
        None, None, transformer, model.module(Role.VAE), scheduler, safety_checker=_Lenient()
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = ImageNoise(SEED).draw((1, 16, 2, HEIGHT // 8, WIDTH // 8))
    with mock.patch("diffusers.models.transformers.transformer_cosmos.transforms", _RESIZING, create=True):
        # it counts the strength from 1 more, and begins with the noise alone
        return pipeline(
            image=image(), **texts, **call, height=HEIGHT, width=WIDTH, num_frames=FRAMES, fps=RATE,
            num_inference_steps=STEPS, guidance_scale=cfg - 1.0, latents=noise * math.hypot(80.0, 1.0) / 80.0,
            generator=torch.Generator().manual_seed(image_noise_seed(SEED)),
        ).frames  # fmt: skip


@pytest.mark.parametrize("cfg", [7.0, 1.0])
def test_a_video_from_a_image_is_that_of_diffusers(cfg: float, tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, TINY)
    assert model.family.name == "cosmos_i2v"
    made = model.made(image=image(), cfg=cfg, **FIELDS)
    assert_equal(made.latents[0], _expected(model, made.texts, cfg, output_type="latent"))
    video = made.results[made.tasks[-1].task_id]
    assert isinstance(video, VideoFrames)
    shown = _expected(model, made.texts, cfg, output_type="np")[0]
    # the pipeline's watch over what is in videos reads them in whole numbers, which it cuts off
    np.testing.assert_allclose(video.frames_THWC / 255, shown, atol=1.5 / 255)
    model.close()


def test_the_image_is_the_first_cell_of_the_video(tmp_path: Path) -> None:
    """And what comes after it is another video than the one without: the model looks at it."""
    model = TinyFamilyModel(tmp_path, TINY)
    made, without = model.made(image=image(), **FIELDS), model.made(**FIELDS).latents[0]
    (first,) = made.of(EncodeImageParams)
    assert isinstance(first, Latent)
    np.testing.assert_array_equal(made.latents[0][0, :, 0], first.samples_CHW)
    assert not np.allclose(made.latents[0][:, :, 1:], without[:, :, 1:], atol=1e-2)
    model.close()


@pytest.mark.counted
def test_what_a_run_holds_is_estimated(tmp_path: Path) -> None:
    """The image with its noise is beside the latent."""
    from modelpool.pool.devices.sim import device as sim

    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    model = TinyFamilyModel(tmp_path, TINY, "sim")
    made = model.made(image=image(), **FIELDS)
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if isinstance(made.works[task.task_id], SampleParams):
            assert cost.working_bytes <= task.activation_bytes <= 1.15 * cost.working_bytes
    model.close()


def test_the_noise_on_a_image_is_below_every_level() -> None:
    """Where it was not, the pipeline would keep no image; here it is always kept."""
    shaking = [family.sampling for family in TRANSFORMERS.values() if noises_image(family.sampling.video)]
    assert shaking
    for facts in shaking:
        assert facts.prediction is Prediction.EDM
        assert facts.noise.sigma_min > FIRST_FRAME_SIGMA
