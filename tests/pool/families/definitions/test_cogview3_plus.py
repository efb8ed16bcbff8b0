"""CogView 3+, compared with its pipeline in diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import CogVideoXDDIMScheduler
from torch import Tensor

from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.models.saving.pipelines import scheduler_facts
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_transformers import T5, WIDTH, TinyFamily, kl_vae
from tests.pool.families.whole_transformer import Whole
from tests.pool.models.text.tiny_tokenizers import for_transformers

#: by which the steps of the scheduler are whole numbers
EVEN_STEPS = 4


def _model() -> Any:
    return diffusers.CogView3PlusTransformer2DModel(
        num_layers=2, attention_head_dim=40, num_attention_heads=1, text_embed_dim=WIDTH, time_embed_dim=24,
        condition_dim=8,
    )  # fmt: skip


def _pipeline(encoder: Any, vae: Any, model: Any) -> Any:
    scheduler = CogVideoXDDIMScheduler(**scheduler_facts(TRANSFORMERS["cogview3_plus"]).settings)
    return diffusers.CogView3PlusPipeline(for_transformers("t5"), encoder, vae, model, scheduler)


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    with torch.no_grad():
        found, _ = _pipeline(modules[0], None, None).encode_prompt(prompt, do_classifier_free_guidance=False)
    return {"context": found}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    width, height = whole.sides
    prompt, negative = (states(text) for text in texts)
    pipeline = _pipeline(*modules)
    # the pipeline replaces the negative prompt by zeros if only its states are given
    pipeline.encode_prompt = lambda *_, **__: (prompt, negative)
    found: Tensor = pipeline(
        "", height=height, width=width, num_inference_steps=EVEN_STEPS, guidance_scale=5.0, latents=noise_of(whole),
        output_type="latent",
    ).images  # fmt: skip
    return found


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"cogview3_plus": ("transformer_blocks.0.attn1.to_q", "transformer.{}")}
CASES = {
    "cogview3_plus": Compared(
        TinyFamily("cogview3_plus", _model, dict, {"t5xxl": T5}, lambda: kl_vae(16)),
        diffusers.CogView3PlusPipeline,
        _latent,
        _texts,
        LORAS["cogview3_plus"],
        EVEN_STEPS,
    )
}


class TestCogView3Plus(FamilyTests):
    case = CASES["cogview3_plus"]


def test_published_sizes_are_told_apart() -> None:
    """Of the published configurations: 64 heads of 40, and 32 heads of 128."""
    with torch.device("meta"):
        models = {
            "cogview3_plus": diffusers.CogView3PlusTransformer2DModel(num_layers=1),
            "cogview4": diffusers.CogView4Transformer2DModel(
                num_layers=1, attention_head_dim=128, num_attention_heads=32
            ),
            "cogview4_control": diffusers.CogView4Transformer2DModel(
                num_layers=1, attention_head_dim=128, num_attention_heads=32, in_channels=32, out_channels=16
            ),
        }
    for name, model in models.items():
        found = recognise_diffusion({key: tuple(value.shape) for key, value in model.state_dict().items()})
        assert found is not None
        assert found.name == name
        assert name in TRANSFORMERS
