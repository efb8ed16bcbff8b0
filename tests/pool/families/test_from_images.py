"""Images made from images are those of diffusers' pipelines on the same weights and noise: an image made anew in
part, a hole filled by a plain model and by one that was trained for it, for SD1 and SDXL; and a second pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
)
from PIL import Image

from modelpool.pool.inference.conditioning.starts import scaled_latent
from modelpool.pool.values.core.stage_params import EncodeImageParams, SampleParams
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_model import Made, TinyModel, euler
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout, ldm_unet

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WIDTH, HEIGHT, STEPS, CFG, SEED = 64, 48, 10, 5.0, 11
FIELDS: dict[str, Any] = {"steps": STEPS, "cfg": CFG, "sampler": "euler", "schedule": "normal", "negative": "blurry"}
PLAIN = {"sd1": layouts.tiny_sd1, "sdxl": layouts.tiny_sdxl}


def filling(name: str) -> Layout:
    """A file of a model of 9 channels."""
    unet = replace({"sd1": layouts.TINY_UNET, "sdxl": layouts.TINY_SDXL_UNET}[name], in_channels=9)
    return {**PLAIN[name](), **ldm_unet(unet)}


def image(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Colours that go on smoothly, with a bright square."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], axis=-1)
    pixels[height // 4 : height // 2, width // 4 : width // 2] = 240
    return Image.fromarray(pixels.astype(np.uint8))


def mask() -> Image.Image:
    """White in whole latent cells."""
    pixels = np.zeros((HEIGHT, WIDTH), np.uint8)
    pixels[16:40, 8:40] = 255
    return Image.fromarray(pixels)


@pytest.fixture
def mean_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers draws a latent from what its VAE says of an image; here it takes the mean, as we do."""
    for module in ("stable_diffusion.pipeline_stable_diffusion", "stable_diffusion_xl.pipeline_stable_diffusion_xl"):
        for kind in ("img2img", "inpaint"):
            place = f"diffusers.pipelines.{module}_{kind}.retrieve_latents"
            monkeypatch.setattr(place, lambda encoded, generator=None: encoded.latent_dist.mode())


def diffusers_latent(tiny: TinyModel, made: Made, kind: type, **arguments: Any) -> torch.Tensor:
    """What a pipeline of diffusers comes to."""
    vae, unet = tiny.module(Role.VAE), tiny.module(Role.DIFFUSION_MODEL)
    vae.register_to_config(scaling_factor=tiny.family.scaling_factor)
    unet.register_to_config(sample_size=64)
    parts: dict[str, Any] = {"vae": vae, "unet": unet, "scheduler": euler(), "text_encoder": None, "tokenizer": None}
    if "XL" in kind.__name__:
        parts |= {"text_encoder_2": None, "tokenizer_2": None}
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipeline = kind(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        **made.texts,
        **arguments,
        num_inference_steps=STEPS,
        guidance_scale=CFG,
        generator=torch.Generator().manual_seed(SEED),
        output_type="latent",
    ).images


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Random weights make latents wider than trained ones."""
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, float(expected.std())))


@pytest.mark.parametrize("strength", [0.35, 0.6])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.usefixtures("mean_latents")
def test_a_image_made_anew_in_part_is_that_of_diffusers(name: str, strength: float, tmp_path: Path) -> None:
    tiny = TinyModel(tmp_path, PLAIN[name]())
    made = tiny.made(image=image(), strength=strength, **FIELDS)
    kind = {"sd1": StableDiffusionImg2ImgPipeline, "sdxl": StableDiffusionXLImg2ImgPipeline}[name]
    assert_equal(made.latents[0], diffusers_latent(tiny, made, kind, image=image(), strength=strength))
    assert made.pixels.shape == (HEIGHT, WIDTH, 3)
    tiny.close()


@pytest.mark.parametrize("trained_for_it", [False, True], ids=["plain", "trained for it"])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.usefixtures("mean_latents")
def test_a_hole_is_filled_as_diffusers_does(name: str, trained_for_it: bool, tmp_path: Path) -> None:
    """And what is not in it is left, to the bit."""
    tiny = TinyModel(tmp_path, filling(name) if trained_for_it else PLAIN[name]())
    assert tiny.catalog.model_defaults(tiny.model).sampling.inpaints == trained_for_it
    kind = {"sd1": StableDiffusionInpaintPipeline, "sdxl": StableDiffusionXLInpaintPipeline}[name]
    strengths = (0.6, 1.0) if trained_for_it else (0.6,)
    for strength in strengths:
        made = tiny.made(image=image(), mask=mask(), strength=strength, **FIELDS)
        expected = diffusers_latent(
            tiny, made, kind, image=image(), mask_image=mask(), strength=strength, height=HEIGHT, width=WIDTH
        )
        assert_equal(made.latents[0], expected)
        kept = np.asarray(mask()) == 0
        assert (made.pixels[kept] == np.asarray(image())[kept]).all()
        assert (made.pixels[~kept] != np.asarray(image())[~kept]).any()
    tiny.close()


@pytest.mark.parametrize("via", ["latent", "picture"])
@pytest.mark.usefixtures("mean_latents")
def test_a_second_pass_is_a_image_made_anew_in_part(via: str, tmp_path: Path) -> None:
    """What diffusers' pipeline makes of the first latent, scaled up, or of the first image, scaled up."""
    tiny = TinyModel(tmp_path, layouts.tiny_sd1())
    made = tiny.made(width=32, height=24, hires={"scale": 2, "strength": 0.5, "via": via}, **FIELDS)
    first, second = made.latents
    assert (first.shape[2:], second.shape[2:]) == ((3, 4), (6, 8))
    alone = tiny.made(width=32, height=24, **FIELDS)
    assert torch.equal(alone.latents[0], first)
    assert len(made.of(SampleParams)) == 2
    if via == "latent":
        image: Any = scaled_latent(first, (6, 8))
    else:
        image = Image.fromarray(alone.pixels).resize((64, 48), Image.Resampling.LANCZOS)
        assert len(made.of(EncodeImageParams)) == 1
    expected = diffusers_latent(tiny, made, StableDiffusionImg2ImgPipeline, image=image, strength=0.5)
    assert_equal(second, expected)
    assert made.pixels.shape == (48, 64, 3)
    tiny.close()
