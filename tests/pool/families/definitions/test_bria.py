"""Bria 3.2, compared with its pipeline in diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.models.loading.transformer_folder import _check_scheduler
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_transformers import T5, WIDTH, TinyFamily, kl_vae
from tests.pool.families.whole_transformer import Whole
from tests.pool.models.components.diffusion import image_published as layouts
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.components.text.pipelines import encoded
from tests.pool.models.text.tiny_tokenizers import for_transformers

#: of these the levels are whole timesteps; the pipeline rounds others down, by up to a thousandth
WHOLE_STEPS = 4


def _model() -> Any:
    return diffusers.BriaTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=WIDTH, axes_dims_rope=[0, 16, 16],
    )  # fmt: skip


def _publish(state: State) -> File:
    return layouts.flux({key.replace("time_embed.", "time_text_embed."): tensor for key, tensor in state.items()})


def _pipeline(encoder: Any, tokenizer: Any, vae: Any, model: Any) -> Any:
    return diffusers.BriaPipeline(model, FlowMatchEulerDiscreteScheduler(), vae, encoder, tokenizer)


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    pipeline = _pipeline(modules[0], for_transformers("t5"), kl_vae(4), torch.nn.Linear(1, 1))
    pipeline.transformer.dtype = torch.float32
    return {"context": encoded(pipeline, prompt, do_classifier_free_guidance=False)[0]}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline = _pipeline(modules[0], None, *modules[1:])
    noise, (width, height) = noise_of(whole), whole.sides
    found = pipeline(
        prompt_embeds=states(texts[0]), negative_prompt_embeds=states(texts[1]), height=height, width=width,
        num_inference_steps=WHOLE_STEPS, output_type="latent",
        latents=pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[2:]),
    ).images  # fmt: skip
    unpacked: Tensor = pipeline._unpack_latents(found, height, width, pipeline.vae_scale_factor)
    return unpacked


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"bria": ("double_blocks.0.img_attn.qkv", "diffusion_model.{}")}
CASES = {
    "bria": Compared(
        TinyFamily("bria", _model, _publish, {"t5xxl": T5}, lambda: kl_vae(4)),
        diffusers.BriaPipeline,
        _latent,
        _texts,
        LORAS["bria"],
        WHOLE_STEPS,
    )
}
(CASE,) = CASES.values()


class TestBria(FamilyTests):
    case = CASE


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ({"_class_name": "DDIMScheduler"}, "class_name: found 'DDIMScheduler', expected a scheduler of flows"),
        (
            {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True},
            "use_dynamic_shifting: found True, expected false: the pipeline of Bria 3 does not pass the size",
        ),
    ],
)
def test_a_scheduler_that_the_pipeline_would_run_otherwise_is_refused(said: Mapping[str, Any], refusal: str) -> None:
    """Found: a folder with one of these ran with the levels of another scheduler."""
    with pytest.raises(UnknownArchitecture, match=f"configuration of scheduler: {refusal}"):
        _check_scheduler(TRANSFORMERS["bria"], said)
    for fitting in (
        {},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": False},
        {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True},
    ):
        _check_scheduler(TRANSFORMERS["bria"], fitting)
