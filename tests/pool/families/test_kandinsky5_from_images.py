"""Kandinsky 5 makes of a first frame what diffusers makes: on the same weights, texts, image and noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.values.core.stage_params import EncodeImageParams, Latent
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.test_kandinsky5_video import CASES
from tests.pool.families.test_cosmos_from_images import image
from tests.pool.families.tiny_shown import TinyFamilyModel

WIDTH, HEIGHT, FRAMES, STEPS, SEED, CFG = 96, 64, 9, 3, 11, 4.0
FIELDS: dict[str, Any] = {
    "frames": FRAMES, "steps": STEPS, "negative": "a dog", "width": WIDTH, "height": HEIGHT, "seed": SEED, "cfg": CFG,
}  # fmt: skip


def _expected(model: TinyFamilyModel, texts: dict[str, Tensor], first: Latent) -> Tensor:
    """The latent of diffusers' pipeline, with the mean of what its VAE says of the image, and before the first cells
    are made like those after them."""
    pipeline = diffusers.Kandinsky5I2VPipeline(
        model.module(Role.DIFFUSION_MODEL), model.module(Role.VAE), None, None, None, None,
        FlowMatchEulerDiscreteScheduler(shift=10.0),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    noise = ImageNoise(SEED).draw((1, 16, 3, HEIGHT // 8, WIDTH // 8)).movedim(1, -1).clone()
    noise[:, :1] = torch.from_numpy(first.samples_CHW.copy())[None, :, None].movedim(1, -1)
    marks = torch.zeros((*noise.shape[:-1], 1))
    marks[:, :1] = 1
    latents = torch.cat((noise, torch.zeros_like(noise), marks), dim=-1)
    pipeline.prepare_latents = lambda **_: latents
    pipeline.normalize_first_frame = lambda found: found
    sides: dict[str, Any] = {}
    for side in ("", "negative_"):
        states = texts[f"{side}prompt_embeds"]
        sides[f"{side}prompt_embeds_qwen"] = states
        sides[f"{side}prompt_embeds_clip"] = texts[f"{side}pooled_prompt_embeds"]
        sides[f"{side}prompt_cu_seqlens"] = torch.tensor([0, states.shape[1]], dtype=torch.int32)
    found: Tensor = pipeline(
        image=image(), **sides, height=HEIGHT, width=WIDTH, num_frames=FRAMES, num_inference_steps=STEPS,
        guidance_scale=CFG, output_type="latent",
    ).frames  # fmt: skip
    return found[..., :16].movedim(-1, 1)


def test_a_video_from_an_image_is_that_of_diffusers(tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, CASES["kandinsky5_video"].tiny)
    made, without = model.made(image=image(), **FIELDS), model.made(**FIELDS).latents[0]
    (first,) = made.of(EncodeImageParams)
    assert isinstance(first, Latent)
    expected = _expected(model, made.texts, first)
    np.testing.assert_allclose(made.latents[0], expected, atol=1e-4 * max(1.0, float(expected.std())))
    np.testing.assert_allclose(made.latents[0][0, :, 0], first.samples_CHW, atol=1e-5)
    assert not np.allclose(made.latents[0][:, :, 1:], without[:, :, 1:], atol=1e-2)
    model.close()
