"""Ernie Image, compared with its pipeline in diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.families.definitions import ernie_image
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, flux2_vae, words
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.models.components.text import cases as texts
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny


def _model() -> Any:
    return diffusers.ErnieImageTransformer2DModel(
        hidden_size=64, num_attention_heads=2, num_layers=2, ffn_hidden_size=48, text_in_dim=WIDTH,
        in_channels=16, out_channels=16,
        rope_axes_dim=(8, 12, 12),
    )  # fmt: skip


def _pipeline(encoder: Any, vae: Any, model: Any) -> Any:
    tokenizer = for_transformers("mistral", bos_token="<s>")
    return diffusers.ErnieImagePipeline(model, vae, encoder, tokenizer, FlowMatchEulerDiscreteScheduler(shift=3.0))


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    (states,) = _pipeline(modules[0], None, None).encode_prompt(prompt, torch.device("cpu"))
    return {"context": states[None]}


def _run(whole: Whole, texts: tuple[Encoded, ...], output: str) -> Any:
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    width, height = whole.sides
    prompt, negative = ([torch.from_numpy(text.context_LD)] for text in texts)
    return _pipeline(*modules)(
        prompt_embeds=prompt, negative_prompt_embeds=negative, height=height, width=width, num_inference_steps=STEPS,
        guidance_scale=4.0, latents=noise_of(whole), output_type=output, use_pe=False,
    ).images  # fmt: skip


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    found: Tensor = _run(whole, texts, "latent")
    return found


def _decoded(whole: Whole, latent: Tensor) -> Tensor:
    """As the pipeline has it, with the deviations of the VAE's batch norm."""
    vae = whole.module(Role.VAE)
    mean, variance = (x.view(1, -1, 1, 1) for x in (vae.bn.running_mean, vae.bn.running_var))
    unpatched = diffusers.ErnieImagePipeline._unpatchify_latents(latent * torch.sqrt(variance + 1e-5) + mean)
    decoded: Tensor = vae.decode(unpatched).sample
    return decoded


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"ernie_image": ("layers.0.self_attention.to_q", "diffusion_model.{}")}
CASES = {
    "ernie_image": Compared(
        TinyFamily(
            "ernie_image",
            _model,
            dict,
            {"ministral3_3b": (lambda: texts.ministral3(words=words("mistral")), texts.under("model."))},
            flux2_vae,
        ),
        diffusers.ErnieImagePipeline,
        _latent,
        _texts,
        LORAS["ernie_image"],
        decode=_decoded,
    )
}


class TestErnieImage(FamilyTests):
    case = CASES["ernie_image"]


def test_texts_of_several_lengths_are_read_alone() -> None:
    """An empty one is the first token."""
    module = texts.ministral3(words=words("mistral"))
    reading, own = ernie_image.FAMILIES[0].text.readings[0], TextTokenizer(tiny("mistral"), "mistral")
    prompts = ("a red cat", "", "two dogs on the moon, " * 5)
    for prompt, found in zip(prompts, read_texts(module, own, prompts, torch.device("cpu"), reading), strict=True):
        with torch.no_grad():
            expected = _texts([module], prompt)["context"][0]
        torch.testing.assert_close(found.context_LD, expected, rtol=1e-4, atol=2e-5)
