"""Kandinsky 5 for video, compared with its pipeline in diffusers."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.families.definitions import kandinsky5_video
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_transformers import CLIP_L, WIDTH, TinyFamily, _hunyuan_video_vae, seeded, words
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.text.pipelines import L, clip_tokenizer, encoded
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers


def _model(reads_frame: bool = True) -> Any:
    return diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=16, out_visual_dim=16, in_text_dim=WIDTH, in_text_dim2=WIDTH, time_dim=24,
        model_dim=64 if reads_frame else 1792, ff_dim=48, num_text_blocks=1, num_visual_blocks=2,
        axes_dims=(8, 12, 12), visual_cond=reads_frame,
    )  # fmt: skip


def _pipeline(modules: list[Any], vae: Any, model: Any) -> Any:
    tokenizer = for_transformers("qwen")
    return diffusers.Kandinsky5T2VPipeline(
        model, vae, modules[1], lambda images, videos, **call: tokenizer(**call), modules[0], clip_tokenizer(L),
        FlowMatchEulerDiscreteScheduler(shift=10.0),
    )  # fmt: skip


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    clip = getattr(modules[0], "text_model", modules[0])
    context, pooled, _ = encoded(_pipeline([clip, modules[1]], None, None), prompt)
    return {"context": context, "pooled": pooled}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    modules = [whole.module(role) for role in whole.family.text_encoders]
    pipeline = _pipeline(modules, whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL))
    width, height = whole.sides
    told = {}
    for side, text in zip(("", "negative_"), texts, strict=True):
        assert text.pooled_V is not None
        told[f"{side}prompt_embeds_qwen"] = states(text)
        told[f"{side}prompt_embeds_clip"] = torch.from_numpy(text.pooled_V)[None]
        told[f"{side}prompt_cu_seqlens"] = torch.tensor([0, len(text.context_LD)], dtype=torch.int32)
    noise = noise_of(whole).movedim(1, -1)
    empty = torch.zeros((*noise.shape[:-1], noise.shape[-1] + 1))  # the pipeline adds it to noise of its own
    found: Tensor = pipeline(
        **told, height=height, width=width, num_frames=whole.frames, num_inference_steps=STEPS,
        latents=torch.cat((noise, empty), dim=-1), output_type="latent",
    ).frames  # fmt: skip
    return found.movedim(-1, 1)


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"kandinsky5_video": ("visual_transformer_blocks.0.self_attention.to_query", "diffusion_model.{}")}
CASES = {
    "kandinsky5_video": Compared(
        TinyFamily(
            "kandinsky5_video",
            _model,
            dict,
            {"clip_l": CLIP_L, "qwen25_7b": (lambda: texts.qwen2(words=words("qwen")), texts.under("model."))},
            _hunyuan_video_vae,
            partial(published.ldm, dimensions=3),
        ),
        diffusers.Kandinsky5T2VPipeline,
        _latent,
        _texts,
        LORAS["kandinsky5_video"],
    )
}


class TestKandinsky5Video(FamilyTests):
    case = CASES["kandinsky5_video"]


@pytest.mark.parametrize(("side", "scale"), [(480, (1.0, 2.0, 2.0)), (64, (1.0, 3.16, 3.16)), (864, (1.0, 3.16, 3.16))])
def test_positions_have_the_scale_of_the_training_size(side: int, scale: tuple[float, ...]) -> None:
    """As the pipeline has it, by the sides in pixels."""
    pipeline: Any = diffusers.Kandinsky5T2VPipeline
    assert pipeline._get_scale_factor(None, side, side) == scale
    module, seen = seeded(_model, 1), []

    def call(**told: Any) -> Tensor:
        seen.append(told["scale_factor"])
        return told["hidden_states"][..., :16]

    module.forward = call
    x = torch.zeros(1, 16, 1, side // 8, side // 8)
    told = {"context": torch.zeros(1, 3, WIDTH), "pooled": torch.zeros(1, WIDTH)}
    assert kandinsky5_video.forward(module, x, torch.tensor([0.5]), told).shape == x.shape
    assert seen == [scale]


def test_a_model_that_reads_latents_alone_is_built_too() -> None:
    with torch.device("meta"):
        state = _model(reads_frame=False).state_dict()
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in state.items()})
    assert plan.recognised.name == "kandinsky5_video"
    assert plan.config["visual_cond"] is False
    assert plan.empty().state_dict().keys() == state.keys()
