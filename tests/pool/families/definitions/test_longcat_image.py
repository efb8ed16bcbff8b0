"""LongCat-Image, compared with its pipeline in diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation
from torch import Tensor

from modelpool.pool.families.definitions import longcat_image
from modelpool.pool.families.parts.text_reading import spelled
from modelpool.pool.inference.guidance.cfg_rescale import rescale
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.models.text.templates import whole_text
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.sampling_facts import CfgRescale
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, kl_vae, words
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.models.components.diffusion import image_published as layouts
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.components.text import cases as texts
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny

QUOTING = (
    'a sign that says "Open 24 h!" on a red door',
    "it isn't a 'cat' and \u201ca dog\u201d or \u2018a fox\u2019",
    '"\u4e00\u53ea" "" and "not closed',
    "plain",
    "",
)


def _model() -> Any:
    return diffusers.LongCatImageTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=WIDTH, axes_dims_rope=[4, 14, 14],
    )  # fmt: skip


def _publish(state: State) -> File:
    return layouts.flux({key.replace("time_embed.", "time_text_embed."): tensor for key, tensor in state.items()})


def _pipeline(encoder: Any, tokenizer: Any, vae: Any, model: Any) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.LongCatImagePipeline(scheduler, vae, encoder, tokenizer, None, model)


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    """The tiny tokenizer has one token more for the template than the published one: the last one, a line break, counts
    as part of the prompt."""
    pipeline = _pipeline(modules[0], for_transformers("qwen"), None, None)
    prefix = pipeline.prompt_template_encode_prefix
    assert prefix.endswith("\n")
    pipeline.prompt_template_encode_prefix = prefix[:-1]
    with torch.no_grad():
        return {"context": pipeline.encode_prompt("\n" + prompt)[0]}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline = _pipeline(modules[0], None, *modules[1:])
    noise, (width, height) = noise_of(whole), whole.sides
    encoding, read = pipeline.encode_prompt, iter(texts)
    pipeline.encode_prompt = lambda prompt, **_: encoding([prompt], prompt_embeds=states(next(read)))
    found = pipeline(
        prompt="", enable_prompt_rewrite=False, height=height, width=width, num_inference_steps=STEPS,
        output_type="latent", latents=pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[2:]),
    ).images  # fmt: skip
    unpacked: Tensor = pipeline._unpack_latents(found, height, width, pipeline.vae_scale_factor)
    return unpacked


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"longcat_image": ("double_blocks.0.img_attn.qkv", "diffusion_model.{}")}
CASES = {
    "longcat_image": Compared(
        TinyFamily(
            "longcat_image",
            _model,
            _publish,
            {"qwen25_7b": (lambda: texts.qwen2(words=words("qwen")), texts.under("model."))},
            lambda: kl_vae(16),
        ),
        diffusers.LongCatImagePipeline,
        _latent,
        _texts,
        LORAS["longcat_image"],
    )
}
(CASE,) = CASES.values()


class TestLongCatImage(FamilyTests):
    case = CASE


def test_quoted_text_is_read_by_character_as_by_the_pipeline() -> None:
    """Of texts with at most one apostrophe in a word: the pipeline confuses several of them."""
    (reading,) = longcat_image.FAMILIES[0].text.readings
    module, own = texts.qwen2(words=words("qwen")), TextTokenizer(tiny("qwen"), "qwen")
    assert reading.template.startswith(_pipeline(None, None, None, None).prompt_template_encode_prefix)
    for prompt in QUOTING:
        theirs = [c for part, quoted in split_quotation(prompt) for c in (part if quoted else [part])]
        assert list(spelled(prompt)) == theirs
        (read,) = read_texts(module, own, (prompt,), torch.device("cpu"), reading)
        torch.testing.assert_close(read.context_LD, _texts([module], prompt)["context"][0], rtol=1e-4, atol=2e-5)
    assert list(spelled("isn't it '90s or she's 'x'?")) == ["isn't it ", *"'90s or she's '", "x'?"]


def test_weights_of_spelled_tokens_are_those_of_their_characters() -> None:
    (reading,) = longcat_image.FAMILIES[0].text.readings
    own = TextTokenizer(tiny("qwen"), "qwen")
    row = whole_text(own, 'a (red "cat":1.5) x', reading)
    ids = [own.encode(piece).ids for piece in ("a red ", *'"cat"', " x")]
    weighted = [place for place, weight in enumerate(row.weights) if weight == 1.5]
    before = len(own.encode(reading.around()[0]).ids)
    first = before + len(own.encode("a").ids)
    assert weighted == list(range(first, before + sum(map(len, ids[:-1]))))


def test_patches_are_rescaled_only_downwards() -> None:
    generator = torch.Generator().manual_seed(0)
    cond, guided = (torch.randn(1, 4, 4, 4, generator=generator) for _ in range(2))
    cond[..., :2, :2] *= 9.0
    cond[..., 2:, 2:] *= 0.1
    found = rescale(guided, cond, CfgRescale.PATCHES_DOWN)
    assert torch.equal(found[..., :2, :2], guided[..., :2, :2])
    expected = rescale(guided, cond, CfgRescale.PATCHES)
    torch.testing.assert_close(found[..., 2:, 2:], expected[..., 2:, 2:])
