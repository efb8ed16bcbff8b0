"""Ovis-Image, compared with its pipeline in diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from modelpool.pool.families.definitions import ovis_image
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, kl_vae, words
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.models.components.diffusion import image_published as layouts
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.text.pipelines import QWEN3_CHAT, encoded
from tests.pool.models.text.tiny_tokenizers import for_transformers

#: cells along a side of a patch, times pixels along a side of a cell
_PIXELS = 16


def _model() -> Any:
    return diffusers.OvisImageTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 14, 14),
    )  # fmt: skip


def _publish(state: State) -> File:
    """Flux's names, with the parts of gated feed-forwards as tensors of their own."""
    flux = {key.replace("timestep_embedder.", "time_text_embed.timestep_embedder."): x for key, x in state.items()}
    file: File = {}
    for key, tensor in layouts.flux(flux).items():
        head, found, end = key.partition("_mlp.0.")
        if found:
            file[f"{head}_mlp.up_proj.{end}"], file[f"{head}_mlp.gate_proj.{end}"] = tensor.chunk(2)
        else:
            key = key.replace("_mlp.2.", "_mlp.down_proj.").replace("context_embedder_norm.weight", "txt_norm.scale")
            file[key] = tensor
    return file


def _pipeline(*parts: Any) -> Any:
    encoder, tokenizer, vae, model = parts
    return diffusers.OvisImagePipeline(
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae, encoder, tokenizer, model
    )


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    pipeline = _pipeline(modules[0], for_transformers("qwen", chat_template=QWEN3_CHAT), None, None)
    return {"context": encoded(pipeline, prompt, do_classifier_free_guidance=False)[0]}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline = _pipeline(modules[0], None, *modules[1:])
    noise, (width, height) = noise_of(whole), whole.sides
    text_ids = torch.arange(texts[0].context_LD.shape[0])[:, None] * torch.tensor([0.0, 1.0, 1.0])
    pipeline.encode_prompt = lambda **_: (states(texts[0]), states(texts[1]), text_ids, text_ids)
    found = pipeline(
        prompt="", negative_prompt="", height=height, width=width, num_inference_steps=STEPS, output_type="latent",
        latents=pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[2:]),
    ).images  # fmt: skip
    unpacked: Tensor = pipeline._unpack_latents(found, height, width, pipeline.vae_scale_factor)
    return unpacked


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"ovis_image": ("double_blocks.0.img_attn.qkv", "diffusion_model.{}")}
CASES = {
    "ovis_image": Compared(
        TinyFamily(
            "ovis_image",
            _model,
            _publish,
            {"qwen3_2b": (lambda: texts.qwen3(words=words("qwen")), texts.under("model."))},
            lambda: kl_vae(16),
        ),
        diffusers.OvisImagePipeline,
        _latent,
        _texts,
        LORAS["ovis_image"],
    )
}
(CASE,) = CASES.values()


class TestOvisImage(FamilyTests):
    case = CASE


def test_the_saved_tokenizer_adds_the_instruction_once(tmp_path: Path) -> None:
    """The pipeline adds it to the prompt, the chat template adds the rest."""
    save_file(CASE.tiny.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, CASE.tiny)
    save_diffusers(open_checkpoint(tmp_path / "tiny.safetensors"), tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder/tokenizer")
    (message,) = _pipeline(None, tokenizer, None, None)._get_messages("a cat")
    (reading,) = ovis_image.FAMILIES[0].text.readings
    assert message == reading.template.format("a cat")
