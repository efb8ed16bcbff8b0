"""Models that are shown an image, from folders of diffusers: a folder is what their pipelines load, and draws what the
file draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from tests.pool.families.test_from_images import image
from tests.pool.families.tiny_model import TinyModel, euler
from tests.pool.families.tiny_shown import SHOWN_LAYOUTS
from tests.pool.inference.conditioning.test_image_concat import _OurUpscalerLevels

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
PROMPT, NEGATIVE, STEPS, SEED, CFG = "a photo of a red cube", "blurry", 3, 11, 5.0
RUN: dict[str, Any] = {
    "prompt": PROMPT, "negative": NEGATIVE, "steps": STEPS, "seed": SEED, "cfg": CFG, "sampler": "euler",
    "schedule": "normal",
}  # fmt: skip


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Random weights make latents wider than trained ones."""
    assert float(expected.std()) > 0
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, float(expected.std())))


def _instructed(pipeline: Any, tiny: TinyModel) -> Tensor:
    pipeline.scheduler = euler()
    sizes = {} if tiny.family.name == "sd1_ip2p" else {"height": 48, "width": 64}
    found: Tensor = pipeline(
        PROMPT, negative_prompt=NEGATIVE, image=image(), num_inference_steps=STEPS, guidance_scale=CFG,
        image_guidance_scale=1.5, generator=torch.Generator().manual_seed(SEED), output_type="latent", **sizes,
    ).images  # fmt: skip
    return found


def _by_depth(pipeline: Any, tiny: TinyModel) -> Tensor:
    pipeline.scheduler = euler()
    noise = ImageNoise(SEED).draw((1, 4, 6, 8))
    pipeline.prepare_latents = lambda *_: noise * pipeline.scheduler.init_noise_sigma
    depth = torch.from_numpy(np.asarray(image().convert("L")).astype(np.float32))[None]
    found: Tensor = pipeline(
        PROMPT, negative_prompt=NEGATIVE, image=image(), depth_map=depth, strength=1.0, num_inference_steps=STEPS,
        guidance_scale=CFG, output_type="latent",
    ).images  # fmt: skip
    return found


def _upscaled(pipeline: Any, tiny: TinyModel) -> Tensor:
    pipeline.scheduler = _OurUpscalerLevels.from_config(pipeline.scheduler.config, timestep_spacing="linspace")
    pipeline.scheduler.levels = make_sigmas("normal", STEPS, sigma_table(tiny.family.sampling.noise))
    found: Tensor = pipeline(
        PROMPT, negative_prompt=NEGATIVE, image=image(24, 16), num_inference_steps=STEPS, guidance_scale=CFG,
        output_type="latent", noise_level=20, latents=ImageNoise(SEED).draw((1, 4, 16, 24)),
        generator=torch.Generator().manual_seed(2**64 - 1 - SEED),
    ).images  # fmt: skip
    return found


#: the pipeline that loads the folder of each family, how it is run, and the image
PIPELINES: Mapping[str, tuple[type, Callable[[Any, TinyModel], Tensor], tuple[int, int]]] = {
    "sd1_ip2p": (diffusers.StableDiffusionInstructPix2PixPipeline, _instructed, (64, 48)),
    "sdxl_ip2p": (diffusers.StableDiffusionXLInstructPix2PixPipeline, _instructed, (64, 48)),
    "sd_x4": (diffusers.StableDiffusionUpscalePipeline, _upscaled, (24, 16)),
    "sd2_depth": (diffusers.StableDiffusionDepth2ImgPipeline, _by_depth, (64, 48)),
}


#: components that the pipeline reads and no checkpoint has: by family
NOT_SAVED = {"sd2_depth": {"depth_estimator": None, "feature_extractor": None}}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_folder_is_what_its_pipeline_loads_and_draws_the_same(name: str, tmp_path: Path) -> None:
    """File, folder and pipeline, from one text."""
    kind, run, size = PIPELINES[name]
    for place in ("file", "again"):
        (tmp_path / place).mkdir()
    file = TinyModel(tmp_path / "file", SHOWN_LAYOUTS[name]())
    save_diffusers(open_checkpoint(file.model.source), tmp_path / "again" / "tiny")
    folder = TinyModel.of_folder(tmp_path / "again")
    assert folder.family.name == name
    assert folder.family.sampling == file.family.sampling
    expected = file.made(image=image(*size), **RUN)
    again = folder.made(image=image(*size), **RUN)
    assert_near(again.latents[0], expected.latents[0])
    assert np.abs(again.pixels.astype(int) - expected.pixels).max() <= 1
    own: Any = kind
    pipeline = own.from_pretrained(tmp_path / "again" / "tiny", local_files_only=True, **NOT_SAVED.get(name, {}))
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        assert_near(expected.latents[0], run(pipeline, file))
    file.close()
    folder.close()
