"""Stable Diffusion 2.1 unCLIP makes of an image what diffusers makes of it: on the same weights, texts and noise, from
a file and from the folder that is saved of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from modelpool.pool.loading.build_checkpoint import open_checkpoint
from modelpool.pool.sampling.noise import ImageNoise, image_noise_seed
from modelpool.pool.saving.diffusers_folder import save_diffusers
from tests.pool.families.test_from_images import image
from tests.pool.families.test_shown_folders import assert_near
from tests.pool.families.tiny_model import OurLevels, TinyModel
from tests.pool.families.tiny_videos import PATCH, SEEN, SIDE, open_clip_vision
from tests.pool.loading import layouts
from tests.pool.loading.layouts import Layout, ldm_unet
from tests.pool.zoo.case import quiet_libraries

pytestmark = [
    pytest.mark.usefixtures("uncounted"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
PROMPT, NEGATIVE, STEPS, SEED, CFG = "a photo of a red cube", "blurry", 3, 11, 5.0
WIDTH, HEIGHT = 64, 48
RUN: dict[str, Any] = {
    "prompt": PROMPT, "negative": NEGATIVE, "steps": STEPS, "seed": SEED, "cfg": CFG, "width": WIDTH, "height": HEIGHT,
}  # fmt: skip
#: the pipeline of each family
PIPELINES = {
    "sd21_unclip_l": diffusers.StableUnCLIPImg2ImgPipeline,
    "sd21_unclip_h": diffusers.StableUnCLIPImg2ImgPipeline,
}
#: width of the embedding of an image, and the prefix of the encoder
EMBEDDED, VISION = {"sd21_unclip_l": 768, "sd21_unclip_h": 1024}, "embedder.model.visual."


def layout_of(name: str, embedded: int = 0) -> Layout:
    """A file whose vision encoder gives embeddings of this width; 0: that of the family."""
    unet = replace(
        layouts.TINY_SDXL_UNET, depths=(1, 1), middle_depth=1, context_width=32, label_width=2 * EMBEDDED[name]
    )
    config = transformers.CLIPVisionConfig(
        hidden_size=SEEN, intermediate_size=64, num_hidden_layers=3, num_attention_heads=16, image_size=SIDE,
        patch_size=PATCH, projection_dim=embedded or EMBEDDED[name], hidden_act="gelu",
    )  # fmt: skip
    with quiet_libraries():
        vision = open_clip_vision(transformers.CLIPVisionModelWithProjection(config).state_dict())
    text = {key: shape for key, shape in layouts.tiny_sd2().items() if key.startswith("cond_stage_model.")}
    vae = {key: shape for key, shape in layouts.tiny_sd2().items() if key.startswith("first_stage_model.")}
    seen = {VISION + key: tuple(tensor.shape) for key, tensor in vision.items() if not key.endswith("position_ids")}
    return {**ldm_unet(unet), **vae, **text, **seen}


def statistics(name: str) -> Mapping[str, Tensor]:
    """Of the embeddings of the training images; only the file of L has any."""
    if name == "sd21_unclip_h":
        return {}
    generator = torch.Generator().manual_seed(5)
    mean, deviation = (
        torch.randn(1, EMBEDDED[name], generator=generator),
        torch.rand(1, EMBEDDED[name], generator=generator),
    )
    return {"noise_augmentor.data_mean": mean, "noise_augmentor.data_std": 20.0 * (deviation + 0.5)}


def _expected(pipeline: Any, prompt: str, cfg: float, seed: int) -> Tensor:
    pipeline.scheduler = OurLevels(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction"
    )
    pipeline.scheduler.set_timesteps(STEPS)
    latents: Tensor = pipeline(
        image(), prompt, negative_prompt=NEGATIVE, num_inference_steps=STEPS, guidance_scale=cfg, width=WIDTH,
        height=HEIGHT, output_type="latent", generator=torch.Generator().manual_seed(image_noise_seed(seed)),
        # this pipeline scales no latents that it is given
        latents=ImageNoise(seed).draw((1, 4, HEIGHT // 8, WIDTH // 8)) * pipeline.scheduler.init_noise_sigma,
    ).images  # fmt: skip
    return latents


@pytest.mark.parametrize("name", PIPELINES)
def test_an_image_is_varied_as_diffusers_does(name: str, tmp_path: Path) -> None:
    """File, folder and pipeline: with texts, without, and without guidance."""
    for place in ("file", "again"):
        (tmp_path / place).mkdir()
    file = TinyModel(tmp_path / "file", layout_of(name), tensors=statistics(name))
    assert file.family.name == name
    saved = save_diffusers(open_checkpoint(file.model.source), tmp_path / "again" / "tiny")
    assert (saved.missing, saved.left_out) == ((), ())
    folder = TinyModel.of_folder(tmp_path / "again")
    assert folder.family.sampling == file.family.sampling
    pipeline = PIPELINES[name].from_pretrained(tmp_path / "again" / "tiny", local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    for fields in ({}, {"prompt": ""}, {"cfg": 1.0, "seed": 12}):
        run = RUN | fields
        made, again = file.made(image=image(), **run), folder.made(image=image(), **run)
        assert_near(again.latents[0], made.latents[0])
        with torch.no_grad():
            expected = _expected(pipeline, run["prompt"], run["cfg"], run["seed"])
        assert_near(made.latents[0], expected)
        with torch.no_grad():
            decoded = pipeline.vae.decode(expected / pipeline.vae.config.scaling_factor).sample
        pixels = (decoded[0].movedim(0, -1) / 2 + 0.5).clamp(0, 1).numpy()
        assert np.abs(made.pixels / 255 - pixels).max() <= 2 / 255
    file.close()
    folder.close()
