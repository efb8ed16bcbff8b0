"""CogView 4, compared with its pipelines in diffusers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor

from modelpool.pool.families.definitions import cogview4
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.models.saving.pipelines import scheduler_facts
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states, timestep_read
from tests.pool.families.test_from_images import image
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, kl_vae, seeded, words
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.inference.conditioning.test_image_concat import assert_equal
from tests.pool.models.components.text import cases as texts
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny

(READING,) = cogview4.FAMILIES[0].text.readings


def _model(**more: Any) -> Any:
    return diffusers.CogView4Transformer2DModel(
        num_layers=2, attention_head_dim=64, num_attention_heads=1, text_embed_dim=WIDTH, time_embed_dim=24,
        condition_dim=8, **more,
    )  # fmt: skip


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**scheduler_facts(TRANSFORMERS["cogview4"]).settings)


def _pipeline(encoder: Any, vae: Any, model: Any) -> Any:
    tokenizer = for_transformers("glm", padding_side="left")
    return diffusers.CogView4Pipeline(tokenizer, encoder, vae, model, _scheduler())


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    with torch.no_grad():
        found, _ = _pipeline(modules[0], None, None).encode_prompt(prompt, do_classifier_free_guidance=False)
    return {"context": found}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    width, height = whole.sides
    found: Tensor = _pipeline(*modules)(
        prompt_embeds=states(texts[0]), negative_prompt_embeds=states(texts[1]), height=height, width=width,
        num_inference_steps=STEPS, guidance_scale=5.0, latents=noise_of(whole), output_type="latent",
    ).images  # fmt: skip
    return found


def _tiny(name: str, model: Any) -> TinyFamily:
    encoders = {"glm4_9b": (lambda: texts.glm(words=words("glm")), texts.under("model."))}
    return TinyFamily(name, model, dict, encoders, lambda: kl_vae(16))


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"cogview4": ("transformer_blocks.0.attn1.to_q", "transformer.{}")}
PIPELINES = {"cogview4": diffusers.CogView4Pipeline, "cogview4_control": diffusers.CogView4ControlPipeline}
CASES = {
    name: Compared(_tiny(name, model), PIPELINES[name], _latent, _texts, LORAS["cogview4"])
    for name, model in (("cogview4", _model), ("cogview4_control", partial(_model, in_channels=32, out_channels=16)))
}
FOLLOWING = CASES["cogview4_control"]


class TestCogView4(FamilyTests):
    case = CASES["cogview4"]


def test_an_image_is_followed_as_the_pipeline_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws from what its encoder says of the image; here, as in ours, it is the mean."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda said, generator=None: said.mode())
    tiny = TinyFamilyModel(tmp_path, FOLLOWING.tiny)
    assert tiny.family.name == "cogview4_control"
    shown = image(96, 64)
    made = tiny.made(image=shown, negative="a dog", steps=STEPS)
    tiny.module(Role.VAE).register_to_config(scaling_factor=tiny.family.scaling_factor)
    parts = [tiny.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline = diffusers.CogView4ControlPipeline(for_transformers("glm", padding_side="left"), *parts, _scheduler())
    prompt, negative = (made.texts[f"{side}prompt_embeds"] for side in ("", "negative_"))
    length = max(prompt.shape[1], negative.shape[1])
    assert prompt.shape[1] == negative.shape[1] == length, "its pipeline takes texts of one length"
    expected = pipeline(
        prompt_embeds=prompt, negative_prompt_embeds=negative, control_image=shown, height=64, width=96,
        num_inference_steps=STEPS, guidance_scale=5.0, output_type="latent",
        latents=ImageNoise(11).draw((1, *latent_shape(96, 64, 0, tiny.engine._opened(tiny.model).latent))),
    ).images  # fmt: skip
    assert_equal(made.latents[0], expected)
    other = tiny.made(image=image(96, 64).rotate(180), negative="a dog", steps=STEPS)
    assert not np.allclose(made.latents[0], other.latents[0], atol=1e-3)
    with pytest.raises(UserError, match="image"):
        tiny.made(steps=STEPS)
    tiny.close()


def test_a_model_that_follows_an_image_has_both_namings_and_folders(tmp_path: Path) -> None:
    FOLLOWING.check_namings()
    FOLLOWING.check_files(tmp_path)


def test_texts_have_a_multiple_of_sixteen_tokens_whatever_they_are_read_with() -> None:
    """The encoder reads their padding, but not that of a batch."""
    module, own = texts.glm(words=words("glm")), TextTokenizer(tiny("glm"), "glm")
    prompts = ("a red cat", "", "two dogs on the moon, " * 8, "cats, " * 1000)
    for prompt, found in zip(prompts, read_texts(module, own, prompts, torch.device("cpu"), READING), strict=True):
        expected = _texts([module], prompt)["context"][0]
        assert found.mask_L is None
        torch.testing.assert_close(found.context_LD, expected, rtol=1e-4, atol=2e-5)


def test_texts_of_different_lengths_run_alone() -> None:
    module = seeded(_model, 1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, 8, 8, generator=generator)
    context = torch.randn(2, 32, WIDTH, generator=generator)
    mask = torch.arange(32)[None] < torch.tensor([[32], [16]])
    level = torch.tensor([0.5, 0.5])
    with torch.no_grad():
        both = cogview4.forward(module, x, level, {"context": context, "context_mask": mask})
        alone = cogview4.forward(module, x[1:], level[1:], {"context": context[1:, :16]})
    torch.testing.assert_close(both[1:], alone)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("side", [512, 1024, 2048])
def test_levels_are_those_of_the_pipeline(side: int) -> None:
    """And the model reads the timesteps before their shift."""
    tokens = (side // 16) ** 2
    noise, scheduler = TRANSFORMERS["cogview4"].sampling.noise, _scheduler()
    mu = diffusers.pipelines.cogview4.pipeline_cogview4.calculate_shift(tokens, 256, 0.25, 0.75)
    timesteps = torch.linspace(1000.0, 1.0, 50, dtype=torch.float64).to(torch.int64).to(torch.float32).numpy()
    scheduler.set_timesteps(timesteps=timesteps, sigmas=timesteps / 1000, mu=mu)
    ours = make_sigmas("linspace", 50, sigma_table(noise, tokens))
    torch.testing.assert_close(ours, scheduler.sigmas, rtol=0.0, atol=1e-6)
    x = torch.zeros(50, 16, side // 8, 1).expand(-1, -1, -1, side // 8)
    read = timestep_read(cogview4.forward, seeded(_model, 1), x, ours[:-1], {"context": torch.zeros(50, 16, WIDTH)})
    torch.testing.assert_close(read, scheduler.timesteps, rtol=1e-4, atol=1e-2)
