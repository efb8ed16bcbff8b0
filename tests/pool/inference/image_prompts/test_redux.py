"""Images of Flux with Redux are those of diffusers' pipelines on the same weights, texts and noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPriorReduxPipeline
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder
from safetensors.torch import save_file
from torch import Tensor
from transformers import SiglipImageProcessor

from modelpool.pool.values.core.errors import UnusableField
from tests.pool.families.test_from_images import image
from tests.pool.families.test_transformer_controlnets import CFG, FIELDS, HEIGHT, SEED, STEPS, WIDTH
from tests.pool.families.tiny_model import Made
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES, seeded
from tests.pool.families.tiny_transformers import WIDTH as TEXT_WIDTH
from tests.pool.families.told_pipelines import parts_of, texts_of
from tests.pool.inference.image_prompts.tiny_adapters import PATCH, SIDE, siglip, write_encoder

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TOLERANCE = 1e-5
STATES = (SIDE // PATCH) ** 2


def latent(tiny: TinyFamilyModel, made: Made, encoder: Any, redux: Any, strength: float) -> Tensor:
    """What diffusers comes to; the strength is the strength of the tokens of the image."""
    processor = SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    prior = FluxPriorReduxPipeline(image_encoder=encoder, feature_extractor=processor, image_embedder=redux)
    tokens = prior.image_embedder(prior.encode_image(image(), "cpu", 1)).image_embeds
    texts = texts_of(made)
    texts["prompt_embeds"] = torch.cat([texts["prompt_embeds"], tokens * strength], dim=1)
    vae, model = parts_of(tiny)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=1.15, base_shift=0.5)
    pipeline = diffusers.FluxPipeline(scheduler, vae, None, None, None, None, model)
    pipeline.set_progress_bar_config(disable=True)
    found = pipeline(
        **texts, width=WIDTH, height=HEIGHT, num_inference_steps=STEPS, guidance_scale=CFG, output_type="latent",
        generator=torch.Generator().manual_seed(SEED),
    ).images  # fmt: skip
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked


def test_redux_is_that_of_diffusers(tmp_path: Path) -> None:
    encoder = siglip()
    write_encoder(tmp_path / "clip_vision" / "siglip", encoder)
    redux = seeded(lambda: ReduxImageEncoder(encoder.config.hidden_size, TEXT_WIDTH), 8)
    (tmp_path / "style_models").mkdir()
    save_file(redux.state_dict(), tmp_path / "style_models" / "flux1-redux-dev.safetensors")
    tiny = TinyFamilyModel(tmp_path, FAMILIES["flux_dev"])
    prompt = {"model": "flux1-redux-dev", "image": image()}
    for strength in (1.0, 0.4):
        made = tiny.made(image_prompts=[{**prompt, "strength": strength}], **FIELDS)
        expected = latent(tiny, made, encoder, redux, strength)
        found = made.latents[0]
        assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    (work,) = [work for work in made.works.values() if getattr(work, "image_prompts", ())]
    assert work.image_prompts[0].appended == STATES
    with pytest.raises(UnusableField, match=r"image_prompts\.start, image_prompts\.end: found '0 to 0\.5'"):
        tiny.made(image_prompts=[{**prompt, "end": 0.5}], **FIELDS)
    tiny.close()
