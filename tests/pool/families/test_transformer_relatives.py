"""More families that run on transformers, whole: equal to diffusers on the same weights, texts and noise. And the texts
of all of them: what the pipelines read of a prompt, with tokenizers of their own kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.guiders import AdaptiveProjectedMixGuidance, ClassifierFreeGuidance
from torch import Tensor

from modelpool.pool.families.parts.text_reading import Pooled
from modelpool.pool.families.text_readings import READINGS, ROW_OF
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.inference.guidance import apg as late_projection
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.lora_names.naming import naming_of
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_transformer_families import _decoded, _hunyuan_dit, _masked, _sd3, _told
from tests.pool.families.tiny_relatives import ALL_FAMILIES, RELATIVES
from tests.pool.families.whole_transformer import PROMPT, SEED, STEPS, Whole
from tests.pool.models.components.text.pipelines import PIPELINES as TEXTS

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]
#: with words to be written, which Hunyuan's newer models read by their bytes
WRITTEN = 'a sign "OPEN" on the moon'


def _cfg(whole: Whole) -> float:
    assert whole.family.sampling.defaults is not None
    return whole.family.sampling.defaults.cfg


def _call(whole: Whole) -> dict[str, Any]:
    width, height = whole.sides
    noise = ImageNoise(SEED).draw((1, *latent_shape(width, height, whole.frames, whole.opened.latent)))
    return {
        "height": height, "width": width, "num_inference_steps": STEPS, "output_type": "latent", "latents": noise,
    }  # fmt: skip


def _pixart(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    scheduler = diffusers.EulerDiscreteScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
    pipeline = diffusers.PixArtAlphaPipeline(
        None, None, whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL), scheduler
    )
    found: Tensor = pipeline(
        **_masked(texts), negative_prompt=None, guidance_scale=_cfg(whole), use_resolution_binning=False,
        **_call(whole),
    ).images  # fmt: skip
    return found


def _flux2(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    vae, model = whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL)
    pipeline = diffusers.Flux2Pipeline(scheduler, vae, None, None, model)
    ((context, _),) = map(_told, texts)
    packed = pipeline(prompt_embeds=context, guidance_scale=_cfg(whole), **_call(whole)).images
    width, height = (side // 16 for side in whole.sides)
    latent: Tensor = packed.transpose(1, 2).unflatten(2, (height, width))
    return latent


def _both_read(texts: tuple[Encoded, ...]) -> dict[str, Tensor]:
    """What Qwen and ByT5 read of both texts, with their masks, as the pipelines of Hunyuan call them."""
    given: dict[str, Tensor] = {}
    for side, text in zip(("", "negative_"), texts, strict=True):
        for number, own in (("", "context"), ("_2", "context_2")):
            states = text.context_LD if own == "context" else text.others[own]
            mask = text.others.get(f"{own}_mask", np.ones(len(states), bool))
            given[f"{side}prompt_embeds{number}"] = torch.from_numpy(states)[None]
            given[f"{side}prompt_embeds_mask{number}"] = torch.from_numpy(mask)[None].long()
    return given


def _hunyuan_image(whole: Whole, texts: tuple[Encoded, ...], steps: int = STEPS) -> Tensor:
    """Its guiders count the steps that are guided plainly less one."""
    guider, words_guider = (
        AdaptiveProjectedMixGuidance(_cfg(whole), adaptive_projected_guidance_start_step=plain - 1)
        for plain in (late_projection.CFG_STEPS, late_projection.CFG_STEPS_WITH_TEXT)
    )
    pipeline = diffusers.HunyuanImagePipeline(
        FlowMatchEulerDiscreteScheduler(shift=5.0), whole.module(Role.VAE), None, None, None, None,
        whole.module(Role.DIFFUSION_MODEL), guider, words_guider,
    )  # fmt: skip
    found: Tensor = pipeline(**_both_read(texts), **_call(whole) | {"num_inference_steps": steps}).images
    return found


def _hunyuan_video_15(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    pipeline = diffusers.HunyuanVideo15Pipeline(
        None, None, whole.module(Role.DIFFUSION_MODEL), whole.module(Role.VAE),
        FlowMatchEulerDiscreteScheduler(shift=7.0), None, None, ClassifierFreeGuidance(_cfg(whole)),
    )  # fmt: skip
    found: Tensor = pipeline(**_both_read(texts), num_frames=whole.frames, **_call(whole)).frames
    return found


#: text, latent and pixels are compared
PIPELINES: Mapping[str, Callable[[Whole, tuple[Encoded, ...]], Tensor]] = {
    "sd35_medium": _sd3,
    "pixart_alpha_512": _pixart,
    "hunyuan_dit_1": _hunyuan_dit,
    "flux2": _flux2,
    "hunyuan_image_21": _hunyuan_image,
    "hunyuan_video_15": _hunyuan_video_15,
}
#: told from a compared one by the published width alone, and equal to it but in name: Flux 2 dev is 6144 wide
ALIKE = {"flux2_dev": "flux2"}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_image_is_that_of_diffusers(name: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path, RELATIVES[name])
    assert whole.family.name == name
    texts = whole.texts(WRITTEN)
    latent = whole.latent(texts)
    with torch.no_grad():
        expected = PIPELINES[name](whole, texts)
    np.testing.assert_allclose(latent.samples_CHW, expected[0], atol=1e-4 * max(1.0, float(expected.std())))
    with torch.no_grad():
        decoded = _decoded(whole, expected)
    pixels = (decoded[0].movedim(0, -1) / 2 + 0.5).clamp(0, 1).numpy()
    made = whole.pixels(latent)
    assert made.shape == pixels.shape
    assert np.abs(made / 255 - pixels).max() <= 1 / 255
    whole.engine.close()


@pytest.mark.parametrize("prompt", [PROMPT, WRITTEN], ids=["plain", "words"])
def test_a_run_of_hunyuan_image_is_that_of_diffusers_to_its_end(
    prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the steps that are guided otherwise. Where words are to be read in the image those are others, here
    earlier ones, so that the run is short."""
    monkeypatch.setattr(late_projection, "CFG_STEPS_WITH_TEXT", 4)
    whole = Whole(tmp_path, RELATIVES["hunyuan_image_21"])
    texts = whole.texts(prompt)
    latent = whole.latent(texts, steps=8).samples_CHW
    with torch.no_grad():
        expected = _hunyuan_image(whole, texts, steps=8)
    np.testing.assert_allclose(latent, expected[0], atol=1e-4 * max(1.0, float(expected.std())))
    whole.engine.close()


@pytest.mark.parametrize("name", ALIKE)
def test_a_family_of_another_size_is_run_alike(name: str) -> None:
    own, other = TRANSFORMERS[name], TRANSFORMERS[ALIKE[name]]
    sampling = replace(own.sampling, model=other.sampling.model)
    names = {"name": other.name, "title": other.title, "text_set": other.text_set, "relative": other.relative}
    assert replace(own, sampling=sampling, **names) == other
    assert naming_of(own.relative) == naming_of(other.relative)
    assert ROW_OF[name] == ROW_OF[other.name]


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_texts_are_those_that_the_pipeline_reads(name: str, tmp_path: Path) -> None:
    """Of the whole file and its tokenizer, through the pipeline's own tokenizer and encoding."""
    whole = Whole(tmp_path, ALL_FAMILIES[name])
    prompt = WRITTEN if "byt5_small_glyph" in ALL_FAMILIES[name].encoders else PROMPT
    readings = READINGS[ROW_OF[name]]
    modules = [whole.module(role) for role in whole.family.text_encoders]
    for place, reading in enumerate(readings):
        if reading.pooled is Pooled.PLAIN:  # the pipeline takes a model without a projection
            modules[place] = getattr(modules[place], "text_model", modules[place])
    mine = whole.texts(prompt)[0]
    theirs = TEXTS[ROW_OF[name]].theirs(tuple(modules), prompt, False)
    own = {"context": mine.context_LD, "pooled": mine.pooled_V, **mine.others}
    for told, states in theirs.items():
        found = own.get(told)
        if found is None:  # a mask of which all is real is not told
            assert states is None or (told.endswith("mask") and states.all()), told
            continue
        assert states is not None, told
        expected = states[0].float().numpy()
        np.testing.assert_allclose(found.astype(np.float32), expected, rtol=1e-4, atol=2e-5)
    whole.engine.close()
