"""The refiner of Hunyuan Image 2.1, compared with its pipeline in diffusers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.hunyuan_image import pipeline_hunyuanimage_refiner as refiner
from torch import Tensor

from modelpool.pool.inference.sampling.noise import ImageNoise, image_noise_seed
from modelpool.pool.values.core.stage_params import Encoded, EncodeImageParams, ImagePixels, Latent
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, noise_of, states
from tests.pool.families.test_videos_from_images import louder
from tests.pool.families.tiny_relatives import RELATIVES
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, words
from tests.pool.families.whole_transformer import PROMPT, SEED, STEPS, Whole
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers

#: channels of the autoencoder: half of a latent's
CHANNELS = 8


def _model() -> Any:
    return diffusers.HunyuanImageTransformer2DModel(
        in_channels=4 * CHANNELS, out_channels=2 * CHANNELS, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        num_single_layers=2, num_refiner_layers=2, text_embed_dim=WIDTH, text_embed_2_dim=None, patch_size=(1, 1, 1),
        rope_axes_dim=(4, 14, 14), guidance_embeds=True,
    )  # fmt: skip


def _vae() -> Any:
    return diffusers.AutoencoderKLHunyuanImageRefiner(
        latent_channels=CHANNELS, block_out_channels=(16, 32, 32, 32, 32), layers_per_block=1,
        spatial_compression_ratio=16, temporal_compression_ratio=4,
    )  # fmt: skip


def _pipeline(encoder: Any, vae: Any, model: Any) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=4.0)
    return diffusers.HunyuanImageRefinerPipeline(scheduler, vae, encoder, for_transformers("qwen"), model)


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    states, mask = _pipeline(modules[0], None, None).encode_prompt(prompt, torch.device("cpu"))
    return {"context": states, "context_mask": mask.bool()}


def _refined(whole: Whole, texts: tuple[Encoded, ...], image: Tensor) -> Tensor:
    """With the noise on the image that a run draws. Its encoder draws from what it says of an image; here, as in ours,
    it is the mean."""
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    modules[1].register_to_config(scaling_factor=whole.opened.latent.scaling_factor)
    width, height = whole.sides
    noise, drawn = noise_of(whole)[:, :, None], ImageNoise(image_noise_seed(SEED))
    means = partial(refiner.retrieve_latents, sample_mode="argmax")

    def mean(encoded: Any, **_: Any) -> Tensor:
        found: Tensor = means(encoded)
        return found

    with (
        mock.patch.object(refiner, "randn_tensor", lambda shape, **_: drawn.draw(shape)),
        mock.patch.object(refiner, "retrieve_latents", mean),
    ):
        found: Tensor = _pipeline(*modules)(
            prompt_embeds=states(texts[0]),
            prompt_embeds_mask=torch.from_numpy(texts[0].others["context_mask"])[None].long(), image=image,
            height=height, width=width, num_inference_steps=STEPS, distilled_guidance_scale=3.25, latents=noise,
            output_type="latent",
        ).images  # fmt: skip
    return found[:, :, 0]


PIPELINES = {"hunyuan_image_21_refiner": diffusers.HunyuanImageRefinerPipeline}
CASE = Compared(
    TinyFamily(
        "hunyuan_image_21_refiner",
        _model,
        RELATIVES["hunyuan_image_21"].publish,
        {"qwen25_7b": (lambda: texts.qwen2(words=words("qwen")), texts.under("model."))},
        _vae,
        lambda state: published.ldm(louder(state), going_up_backwards=False),
    ),
    PIPELINES["hunyuan_image_21_refiner"],
    lambda whole, texts: torch.zeros(()),
    _texts,
    ("double_blocks.0.img_attn.qkv", "diffusion_model.{}"),
)


def test_both_namings_are_one_model() -> None:
    CASE.check_namings()


def test_files_and_folders_are_the_same_model(tmp_path: Path) -> None:
    CASE.check_files(tmp_path)


def test_a_refined_image_is_that_of_the_pipeline(tmp_path: Path) -> None:
    """Texts, latent and pixels. Its latent is two cells of its autoencoder, of which the first is a repetition."""
    whole = Whole(tmp_path, CASE.tiny)
    texts_read, (width, height) = whole.texts(), whole.sides
    with torch.no_grad():
        told = _texts([whole.module(Role.TEXT_ENCODER)], PROMPT)
    np.testing.assert_allclose(texts_read[0].context_LD, told["context"][0].numpy(), rtol=1e-4, atol=2e-5)
    assert np.array_equal(texts_read[0].others["context_mask"], told["context_mask"][0].numpy())
    pixels = np.random.default_rng(4).integers(0, 256, (height, width, 3), np.uint8)
    image = whole.run(EncodeImageParams(whole.model, width, height), ImagePixels(pixels))
    assert isinstance(image, Latent)
    latent = whole.latent(texts_read, beginning=image)
    with torch.no_grad():
        expected = _refined(whole, texts_read, torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255)
        cells = diffusers.HunyuanImageRefinerPipeline._restore_image_tokens_order(
            expected[:, :, None] / whole.opened.latent.scaling_factor
        )
        decoded = whole.module(Role.VAE).decode(cells).sample[0, :, 0]
    np.testing.assert_allclose(latent.samples_CHW, expected[0], atol=1e-4 * max(1.0, float(expected.std())))
    shown = (decoded.movedim(0, -1) / 2 + 0.5).clamp(0, 1).numpy()
    assert np.abs(whole.pixels(latent) / 255 - shown).max() <= 1 / 255
    other = whole.latent(texts_read, beginning=Latent(image.samples_CHW * 0)).samples_CHW
    assert not np.allclose(latent.samples_CHW, other, atol=1e-3)
    whole.engine.close()
