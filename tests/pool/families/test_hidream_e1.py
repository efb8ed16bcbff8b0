"""HiDream E1 edits an image as its published pipeline does: the image beside the latents, guidance by text and by the
image in both published forms, and each with the norm of the prediction for the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import EncodeImageParams, EncodeParams, SampleParams
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_from_images import image
from tests.pool.families.test_transformer_families import _flow
from tests.pool.families.tiny_model import Made
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
WIDTH, HEIGHT, STEPS, SEED, CFG, IMAGE_CFG = 64, 48, 3, 11, 3.0, 1.5
#: tokens of an image without one beside it; the published number makes attention of 8192 tokens
TOKENS = 16
FIELDS: dict[str, Any] = {"steps": STEPS, "cfg": CFG, "seed": SEED, "image_cfg": IMAGE_CFG, "prompt": "make it red"}
FIELDS |= {"negative": "blurry"}
#: (predictions for the prompt, for the negative prompt, and without the image, the latent, its level) -> the guided one
Formula = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def regular(full: Tensor, seen: Tensor, blind: Tensor, x_BCHW: Tensor, sigma: float) -> Tensor:
    """`clip_cfg_norm=False` of HiDreamImageEditingPipeline."""
    return blind + IMAGE_CFG * (seen - blind) + CFG * (full - seen)


def shortened(clean_BCHW: Tensor, wanted_BCHW: Tensor) -> Tensor:
    """Scaled down to the length of another one at each position."""
    lengths = [torch.linalg.vector_norm(each, dim=1, keepdim=True) for each in (clean_BCHW, wanted_BCHW)]
    return clean_BCHW * (lengths[1] / (lengths[0] + 1e-8)).clamp(max=1.0)


def nested(full: Tensor, seen: Tensor, blind: Tensor, x_BCHW: Tensor, sigma: float) -> Tensor:
    """`clip_cfg_norm=True`, with the norm of clean latents, as CFGNorm has it."""
    clean, wanted = x_BCHW - (seen + CFG * (full - seen)) * sigma, x_BCHW - full * sigma
    scale = torch.linalg.vector_norm(wanted, dim=1, keepdim=True) / (
        torch.linalg.vector_norm(clean, dim=1, keepdim=True)
    )
    guided = (x_BCHW - clean * scale.clamp(max=1.0)) / sigma
    return blind + IMAGE_CFG * (guided - blind)


def by_image(full: Tensor, seen: Tensor, blind: Tensor, x_BCHW: Tensor, sigma: float) -> Tensor:
    """The norm of the prediction for the negative prompt, on guidance by the image."""
    clean, wanted = x_BCHW - (blind + IMAGE_CFG * (seen - blind)) * sigma, x_BCHW - seen * sigma
    scale = torch.linalg.vector_norm(wanted, dim=1, keepdim=True) / (
        torch.linalg.vector_norm(clean, dim=1, keepdim=True)
    )
    return (x_BCHW - clean * scale.clamp(max=1.0)) / sigma + CFG * (full - seen)


def edited(tiny: TinyFamilyModel, made: Made, of_prompt: bool, formula: Formula) -> Tensor:
    """The loop of the published pipeline, with zeros in the place of the image for a prediction without it."""
    module = tiny.module(Role.DIFFUSION_MODEL)
    (latent,) = made.of(EncodeImageParams)
    seen_BCHW = torch.from_numpy(latent.samples_CHW.copy())[None]  # type: ignore[union-attr]
    prompt, negative = made.of(EncodeParams)
    texts: list[Any] = [prompt if of_prompt else negative, negative, prompt]
    t5 = torch.stack([torch.from_numpy(text.context_LD) for text in texts])
    llama = torch.stack([torch.from_numpy(text.others["context_2"]) for text in texts], dim=1)
    pooled = torch.stack([torch.from_numpy(text.pooled_V) for text in texts])
    scheduler: Any = _flow(shift=3.0)
    scheduler.set_timesteps(STEPS)
    facts = tiny.engine._opened(tiny.model).latent
    x_BCHW = ImageNoise(SEED).draw((1, *latent_shape(WIDTH, HEIGHT, 0, facts)))
    most = module.max_seq
    module.max_seq = 2 * most
    try:
        for place, t in enumerate(scheduler.timesteps):
            images = torch.cat([torch.zeros_like(seen_BCHW), seen_BCHW, seen_BCHW])
            with torch.no_grad():
                (out,) = module(
                    hidden_states=torch.cat([x_BCHW.repeat(3, 1, 1, 1), images], dim=-1), timesteps=t.expand(3),
                    encoder_hidden_states_t5=t5, encoder_hidden_states_llama3=llama, pooled_embeds=pooled,
                    return_dict=False,
                )  # fmt: skip
            blind, seen, full = (-out[..., : x_BCHW.shape[-1]]).chunk(3)
            guided = formula(full, seen, blind, x_BCHW, float(scheduler.sigmas[place]))
            x_BCHW = scheduler.step(guided, t, x_BCHW, return_dict=False)[0]
    finally:
        module.max_seq = most
    return x_BCHW


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyFamilyModel]:
    found = TinyFamilyModel(tmp_path_factory.mktemp("hidream"), FAMILIES["hidream_i1"])
    found.module(Role.DIFFUSION_MODEL).max_seq = TOKENS
    yield found
    found.close()


def photo() -> Image.Image:
    return image(WIDTH, HEIGHT)


def workflow(**more: Any) -> dict[str, Any]:
    request = {"model": "tiny", **FIELDS, **more.pop("request", {})}
    nodes = {
        "photo": {"kind": "image", "image": photo()},
        "sample": {"kind": "sample", "request": request, "inputs": {"reference.0": "photo"}, **more},
        "image": {"kind": "decode", "model": "tiny", "inputs": {"latent": "sample"}},
    }
    return {"nodes": nodes, "output": "image"}


def assert_close(made: Made, expected: Tensor) -> None:
    assert float(expected.std()) > 0
    np.testing.assert_allclose(made.latents[-1], expected, atol=1e-4 * max(1.0, float(expected.std())))


def test_an_image_is_edited_as_the_published_pipeline_does(tiny: TinyFamilyModel) -> None:
    made = tiny.made(**FIELDS, reference=photo(), width=WIDTH, height=HEIGHT)
    assert_close(made, edited(tiny, made, of_prompt=False, formula=regular))
    plain = tiny.made(**{**FIELDS, "image_cfg": None}, width=WIDTH, height=HEIGHT)
    assert not torch.allclose(plain.latents[-1], made.latents[-1], atol=1e-2)


def test_an_image_with_more_patches_than_the_model_counts_has_room(tiny: TinyFamilyModel) -> None:
    """As those of most photos; before, an error of the module."""
    module = tiny.module(Role.DIFFUSION_MODEL)
    module.max_seq = 8  # of 12
    try:
        made = tiny.made(**FIELDS, reference=photo(), width=WIDTH, height=HEIGHT)
        module.max_seq = 12
        assert_close(made, edited(tiny, made, of_prompt=False, formula=regular))
    finally:
        module.max_seq = TOKENS


@pytest.mark.parametrize(
    ("said", "of_prompt", "formula"),
    [
        ({}, False, regular),
        ({"prompt_without_image": True}, True, regular),
        ({"prompt_without_image": True, "nested": True, "request": {"options": {"cfg_norm": True}}}, True, nested),
        ({"request": {"options": {"cfg_norm": True}}}, False, by_image),
    ],
    ids=["E1", "prompt without image", "E1.1", "changed guidance by the image"],
)
def test_all_forms_of_guidance_are_workflows(
    tiny: TinyFamilyModel, said: dict[str, Any], of_prompt: bool, formula: Formula
) -> None:
    """The output has the size of the image."""
    made = tiny.made(workflow=workflow(**said))
    (work,) = [each for each in made.works.values() if isinstance(each, SampleParams)]
    assert (work.shape.width, work.shape.height) == (WIDTH, HEIGHT)
    assert_close(made, edited(tiny, made, of_prompt, formula))


def test_what_it_does_not_read_is_refused(tiny: TinyFamilyModel) -> None:
    with pytest.raises(UnusableField, match="image_cfg requires reference"):
        tiny.made(**FIELDS, width=WIDTH, height=HEIGHT)
    with pytest.raises(UnusableField, match="accepts only one"):
        tiny.made(**FIELDS, reference=[photo(), image(48, 48)], width=WIDTH, height=HEIGHT)
