"""Images that flows make anew in part are those of diffusers' pipelines on the same weights, texts and noise.

Of the steps that a strength asks for in part the pipelines of flows make the whole: 1.2 of four are two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.values.core.stage_params import SampleParams
from tests.pool.families.test_from_images import image
from tests.pool.families.tiny_model import Made
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.told_pipelines import parts_of, texts_of

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
WIDTH, HEIGHT, STEPS, SEED, CFG = 64, 48, 4, 11, 3.0


def _flux(tiny: TinyFamilyModel, made: Made, call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=1.15, base_shift=0.5)
    pipeline = diffusers.FluxImg2ImgPipeline(scheduler, vae, None, None, None, None, model)
    found = pipeline(**texts_of(made), **call, guidance_scale=CFG).images
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked


def _sd3(tiny: TinyFamilyModel, made: Made, call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    pipeline = diffusers.StableDiffusion3Img2ImgPipeline(
        model, FlowMatchEulerDiscreteScheduler(shift=3.0), vae, None, None, None, None, None, None
    )
    found: Tensor = pipeline(**texts_of(made), **call, guidance_scale=CFG).images
    return found


def _qwen_image(tiny: TinyFamilyModel, made: Made, call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    pipeline = diffusers.QwenImageImg2ImgPipeline(scheduler, vae, None, None, model)
    found = pipeline(**texts_of(made, "prompt_embeds_mask"), **call, true_cfg_scale=CFG).images
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked[:, :, 0]


def _z_image(tiny: TinyFamilyModel, made: Made, call: dict[str, Any]) -> Tensor:
    vae, model = parts_of(tiny)
    pipeline = diffusers.ZImageImg2ImgPipeline(FlowMatchEulerDiscreteScheduler(shift=3.0), vae, None, None, model)
    context = texts_of(made)["prompt_embeds"]
    found: Tensor = pipeline(prompt_embeds=[context[0]], **call, guidance_scale=0.0).images
    return found


def _chroma(tiny: TinyFamilyModel, made: Made, call: dict[str, Any]) -> Tensor:
    """With the mask of the pipeline that makes images of texts alone. This one's own makes numbers of it, 1 and 0,
    which attention adds to its scores: nothing is hidden by them, and the model was trained with what is."""
    vae, model = parts_of(tiny)
    pipeline = diffusers.ChromaImg2ImgPipeline(FlowMatchEulerDiscreteScheduler(), vae, None, None, model)
    pipeline._prepare_attention_mask = partial(diffusers.ChromaPipeline._prepare_attention_mask, pipeline)
    given = texts_of(made, "prompt_attention_mask")
    given = {key: one.bool() if key.endswith("mask") else one for key, one in given.items()}
    found = pipeline(**given, **call, guidance_scale=CFG).images
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked


PIPELINES: Mapping[str, Callable[[TinyFamilyModel, Made, dict[str, Any]], Tensor]] = {
    "flux_dev": _flux,
    "sd35_large": _sd3,
    "qwen_image": _qwen_image,
    "z_image": _z_image,
    "chroma": _chroma,
}


@pytest.fixture
def mean_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers draws a latent from what its VAE says of an image; here it takes the mean, as we do."""
    folders = {"flux": "flux", "stable_diffusion_3": "stable_diffusion_3", "qwenimage": "qwenimage"}
    for folder, name in (folders | {"z_image": "z_image", "chroma": "chroma"}).items():
        place = f"diffusers.pipelines.{folder}.pipeline_{name}_img2img.retrieve_latents"
        monkeypatch.setattr(place, lambda encoded, **_: encoded.latent_dist.mode())


@pytest.mark.parametrize(("strength", "made_steps"), [(0.3, 2), (0.75, 3)])
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.usefixtures("mean_latents")
def test_a_image_made_anew_in_part_is_that_of_diffusers(
    name: str, strength: float, made_steps: int, tmp_path: Path
) -> None:
    tiny = TinyFamilyModel(tmp_path, FAMILIES[name])
    assert tiny.family.name == name
    made = tiny.made(image=image(), strength=strength, steps=STEPS, cfg=CFG, negative="blurry")
    (work,) = [work for work in made.works.values() if isinstance(work, SampleParams)]
    assert work.steps_run == made_steps
    call = {
        "image": image(), "strength": strength, "height": HEIGHT, "width": WIDTH, "num_inference_steps": STEPS,
        "generator": torch.Generator().manual_seed(SEED), "output_type": "latent",
    }  # fmt: skip
    with torch.no_grad():
        expected = PIPELINES[name](tiny, made, call)
    assert float(expected.std()) > 0
    np.testing.assert_allclose(made.latents[0], expected, atol=1e-4 * max(1.0, float(expected.std())))
    tiny.close()
