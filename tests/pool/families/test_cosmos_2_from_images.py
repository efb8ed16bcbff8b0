"""Cosmos Predict 2 makes of an image what diffusers makes: on the same weights, texts, image and noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
from torch import Tensor

from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.values.core.stage_params import EncodeImageParams, Latent, SampleParams, VideoFrames
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_cosmos_from_images import _Lenient, image
from tests.pool.families.test_transformer_families import _RESIZING
from tests.pool.families.tiny_relatives import RELATIVES
from tests.pool.families.tiny_shown import TinyFamilyModel

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

TINY = RELATIVES["cosmos2_i2v"]
PIPELINES = {"cosmos2_i2v": diffusers.Cosmos2VideoToWorldPipeline}
WIDTH, HEIGHT, FRAMES, STEPS, SEED, RATE = 96, 64, 9, 3, 11, 16
FIELDS: dict[str, Any] = {
    "frames": FRAMES, "frame_rate": float(RATE), "steps": STEPS, "negative": "a dog", "width": WIDTH, "height": HEIGHT,
    "seed": SEED,
}  # fmt: skip


def _expected(model: TinyFamilyModel, texts: dict[str, Tensor], cfg: float, output_type: str) -> Any:
    """But that it ends without noise: the pipeline leaves the last 500th of it in."""
    transformer = TINY.model().eval()
    # ours is given its channel of padding
    transformer.load_state_dict(model.module(Role.DIFFUSION_MODEL).state_dict())
    vae, facts = model.module(Role.VAE), model.engine._opened(model.model).latent
    vae.register_to_config(latents_mean=facts.means, latents_std=facts.deviations)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    pipeline = PIPELINES["cosmos2_i2v"](None, None, transformer, vae, scheduler, safety_checker=_Lenient())
    scheduler.register_to_config(final_sigmas_type="zero")
    pipeline.set_progress_bar_config(disable=True)
    place = "diffusers.pipelines.cosmos.pipeline_cosmos2_video2world.retrieve_latents"
    with (
        mock.patch("diffusers.models.transformers.transformer_cosmos.transforms", _RESIZING, create=True),
        # it draws a latent from what its VAE says of an image; here it takes the mean, as we do
        mock.patch(place, lambda encoded, *_: encoded.latent_dist.mode()),
    ):
        # it counts the strength from 1 more
        return pipeline(
            image=image(), **texts, height=HEIGHT, width=WIDTH, num_frames=FRAMES, fps=RATE,
            num_inference_steps=STEPS, guidance_scale=cfg - 1.0, output_type=output_type,
            latents=ImageNoise(SEED).draw((1, 16, 3, HEIGHT // 8, WIDTH // 8)),
        ).frames  # fmt: skip


@pytest.mark.parametrize("cfg", [7.0, 1.0])
def test_a_video_from_a_image_is_that_of_diffusers(cfg: float, tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, TINY)
    assert model.family.name == "cosmos2_i2v"
    made = model.made(image=image(), cfg=cfg, **FIELDS)
    expected = _expected(model, made.texts, cfg, "latent")
    assert float(expected.std()) > 0
    np.testing.assert_allclose(made.latents[0], expected, atol=1e-4 * max(1.0, float(expected.std())))
    video = made.results[made.tasks[-1].task_id]
    assert isinstance(video, VideoFrames)
    shown = _expected(model, made.texts, cfg, "np")[0]
    # the pipeline's watch over what is in videos reads them in whole numbers, which it cuts off
    np.testing.assert_allclose(video.frames_THWC / 255, shown, atol=1.5 / 255)
    model.close()


def test_the_image_is_the_first_cell_of_the_video(tmp_path: Path) -> None:
    """And what comes after it is another video than the one without: the model looks at it."""
    model = TinyFamilyModel(tmp_path, TINY)
    made, without = model.made(image=image(), **FIELDS), model.made(**FIELDS).latents[0]
    (first,) = made.of(EncodeImageParams)
    assert isinstance(first, Latent)
    np.testing.assert_allclose(made.latents[0][0, :, 0], first.samples_CHW, atol=1e-5)
    assert not np.allclose(made.latents[0][:, :, 1:], without[:, :, 1:], atol=1e-2)
    model.close()


@pytest.mark.counted
def test_what_a_run_holds_is_estimated(tmp_path: Path) -> None:
    """The image is beside the latent."""
    model = TinyFamilyModel(tmp_path, TINY, "sim")
    made = model.made(image=image(), **FIELDS)
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if isinstance(made.works[task.task_id], SampleParams):
            assert cost.working_bytes <= task.activation_bytes <= 1.15 * cost.working_bytes
    model.close()
