"""Kandinsky 5 for images, compared with its pipeline in diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.families.definitions import defined_families, kandinsky5_image
from modelpool.pool.families.detection.detect_diffusion_model import DiffusionFacts, recognise_diffusion
from modelpool.pool.models.components.diffusion.build_diffusion_model import architecture_of
from modelpool.pool.models.components.text.lengths import context_tokens
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_transformers import CLIP_L, WIDTH, TinyFamily, kl_vae, seeded, words
from tests.pool.families.whole_transformer import PROMPT, STEPS, Whole
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.text.pipelines import L, clip_tokenizer, encoded
from tests.pool.models.text.tiny_tokenizers import for_transformers


def _model() -> Any:
    return diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=16, out_visual_dim=16, in_text_dim=WIDTH, in_text_dim2=WIDTH, time_dim=24, model_dim=64,
        ff_dim=48, num_text_blocks=1, num_visual_blocks=2, axes_dims=(8, 12, 12),
    )  # fmt: skip


def _pipeline(modules: list[Any], vae: Any, model: Any) -> Any:
    tokenizer = for_transformers("qwen")
    return diffusers.Kandinsky5T2IPipeline(
        model, vae, modules[1], lambda images, videos, **call: tokenizer(**call), modules[0], clip_tokenizer(L),
        FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    clip = getattr(modules[0], "text_model", modules[0])
    context, pooled, _ = encoded(_pipeline([clip, modules[1]], None, None), prompt)
    return {"context": context, "pooled": pooled}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    modules = [whole.module(role) for role in whole.family.text_encoders]
    pipeline = _pipeline(modules, whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL))
    width, height = whole.sides
    pipeline.resolutions = [(width, height)]
    told = {}
    for side, text in zip(("", "negative_"), texts, strict=True):
        assert text.pooled_V is not None
        told[f"{side}prompt_embeds_qwen"] = states(text)
        told[f"{side}prompt_embeds_clip"] = torch.from_numpy(text.pooled_V)[None]
        told[f"{side}prompt_cu_seqlens"] = torch.tensor([0, len(text.context_LD)], dtype=torch.int32)
    noise = noise_of(whole).movedim(1, -1)[:, None]
    found: Tensor = pipeline(
        **told, height=height, width=width, num_inference_steps=STEPS, latents=noise, output_type="latent"
    ).image
    return found[:, 0].movedim(-1, 1)


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"kandinsky5_image": ("visual_transformer_blocks.0.self_attention.to_query", "diffusion_model.{}")}
CASES = {
    "kandinsky5_image": Compared(
        TinyFamily(
            "kandinsky5_image",
            _model,
            dict,
            {
                "clip_l": CLIP_L,
                "qwen25_7b": (lambda: texts.qwen2(words=words("qwen")), texts.under("model.")),
            },
            lambda: kl_vae(16),
        ),
        diffusers.Kandinsky5T2IPipeline,
        _latent,
        _texts,
        LORAS["kandinsky5_image"],
    )
}
(CASE,) = CASES.values()


class TestKandinsky5Image(FamilyTests):
    case = CASE


def test_the_pipeline_of_a_saved_folder_reads_a_prompt_as_this_project_does(tmp_path: Path) -> None:
    """The pipeline calls its tokenizer as a processor of images and texts; the saved tokenizer takes that call."""
    whole = Whole(tmp_path, CASE.tiny)
    save_diffusers(whole.opened.checkpoint, tmp_path / "folder")
    pipeline = diffusers.Kandinsky5T2IPipeline.from_pretrained(tmp_path / "folder")
    context, lengths = pipeline._encode_prompt_qwen([PROMPT])
    expected = states(whole.texts()[0])
    assert lengths.tolist() == [0, expected.shape[1]]
    torch.testing.assert_close(context.float(), expected)


def test_images_may_be_larger_than_the_tables_of_diffusers() -> None:
    """Found: from 2,064 pixels a side, an index out of bounds, which ends a process with a GPU."""
    model = architecture_of(recognise()).module(**dict(seeded(_model, 1).config)).eval()
    x, level = torch.zeros(1, 16, 2, 260), torch.tensor([0.5])
    told = {"context": torch.zeros(1, 3, WIDTH), "pooled": torch.zeros(1, WIDTH)}
    with torch.no_grad():
        assert kandinsky5_image.forward(model, x, level, told).shape == x.shape


def test_the_length_of_a_text_is_that_of_the_encoder_whose_states_are_read() -> None:
    """Found: texts of Qwen counted as 77 tokens, the length of CLIP's."""
    assert context_tokens("kandinsky5_image", [77, 12]) == 12
    for family in defined_families():
        lengths = [100 + place for place in range(len(family.text.readings))]
        read = [length for length, text in zip(lengths, family.text.readings, strict=True) if text.reads_states]
        if family.readings_name != "sd3":  # with states that are concatenated
            assert context_tokens(family.readings_name, lengths) == read[0], family.name


def test_models_for_video_are_another_family() -> None:
    for width, is_image in ((2560, True), (64, True), (1792, False), (4096, False)):
        assert kandinsky5_image.is_for_images({"visual_embed_dim": 64, "model_dim": width}) is is_image
    assert not kandinsky5_image.is_for_images({"visual_embed_dim": 132, "model_dim": 2560})


def recognise() -> DiffusionFacts:
    found = recognise_diffusion({key: tuple(value.shape) for key, value in seeded(_model, 1).state_dict().items()})
    assert found is not None
    return found


def test_texts_of_different_lengths_in_one_batch_are_those_alone() -> None:
    """The model has no mask: padding must not reach it."""
    module = seeded(_model, 1)
    generator = torch.Generator().manual_seed(2)
    x, level = torch.randn(2, 16, 8, 4, generator=generator), torch.tensor([0.7, 0.3])
    context, pooled = torch.randn(2, 7, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    with torch.no_grad():
        both = kandinsky5_image.forward(module, x, level, {"context": context, "pooled": pooled, "context_mask": mask})
        alone = [
            kandinsky5_image.forward(
                module, x[i : i + 1], level[i : i + 1],
                {"context": context[i : i + 1, :length], "pooled": pooled[i : i + 1]},
            )
            for i, length in enumerate((7, 4))
        ]  # fmt: skip
    np.testing.assert_allclose(both, torch.cat(alone), atol=1e-5)
