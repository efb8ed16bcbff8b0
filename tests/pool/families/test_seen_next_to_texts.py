"""Images that a model reads next to a text: Stable Cascade reads their embeddings as states, and Stable Diffusion XL in
the place of the pooled text ("revision"). On the same weights, texts and noise as in diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers.pipelines.stable_cascade import pipeline_stable_cascade_prior
from diffusers.schedulers import scheduling_ddpm_wuerstchen
from safetensors.torch import save_file
from torch import Tensor

from modelpool.actors.graph.recipe_request import requests_of
from modelpool.pool.inference.conditioning.image_labels import image_states, pooled_images
from modelpool.pool.inference.sampling.noise import ImageNoise, image_noise_seed
from modelpool.pool.models.components.vision.preprocess import preprocess_image
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.sampling_facts import VisionEncoderUse
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    ModelRef,
    OutputShape,
    SampleParams,
    SamplingSchedule,
    SeenImages,
)
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_from_images import image
from tests.pool.families.test_shown_folders import assert_near
from tests.pool.families.tiny_cascade import STAGE_C, Pair, seeing_stage_c_file, vision_encoder, write_files
from tests.pool.families.tiny_model import OurLevels, TinyModel
from tests.pool.families.tiny_transformers import seeded
from tests.pool.models.components.text.pipelines import clip_tokenizer
from tests.pool.models.loading import layouts

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SEED, STEPS, CFG, WIDTH, HEIGHT = 11, 3, 4.0, 256, 128
PROMPT, NEGATIVE = "a small red cat on the moon", "a dog"
RUN: dict[str, Any] = {
    "model": STAGE_C, "prompt": PROMPT, "negative": NEGATIVE, "seed": SEED, "width": WIDTH, "height": HEIGHT,
    "steps": STEPS, "cfg": CFG, "decoder": {"steps": 1},
}  # fmt: skip
PHOTOS = image(40, 30), image(30, 40)


def prompts_of(model: str, *strengths: float, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"model": model, "image": photo, "strength": strength, **fields}
        for photo, strength in zip(PHOTOS, strengths, strict=False)
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("cascade")
    write_files(folder, seeing_stage_c_file())
    opened = Pair(folder)
    yield opened
    opened.engine.close()


def prior_of_diffusers(pair: Pair, count: int, cfg: float) -> Tensor:
    tokenizer, noise = clip_tokenizer("<|endoftext|>"), ImageNoise(SEED)
    pipeline = diffusers.StableCascadePriorPipeline(
        tokenizer, pair.module(STAGE_C, Role.TEXT_ENCODER), pair.module(STAGE_C, Role.DIFFUSION_MODEL),
        diffusers.DDPMWuerstchenScheduler(),
        feature_extractor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
        ),
        image_encoder=pair.module(STAGE_C, Role.VISION_ENCODER),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    draw = lambda shape, **_: noise.draw(shape)  # noqa: E731
    with (
        torch.no_grad(),
        mock.patch.object(pipeline_stable_cascade_prior, "randn_tensor", draw),
        mock.patch.object(scheduling_ddpm_wuerstchen, "randn_tensor", draw),
    ):
        found: Tensor = pipeline(
            prompt=PROMPT, negative_prompt=NEGATIVE, images=list(PHOTOS[:count]), width=WIDTH, height=HEIGHT,
            num_inference_steps=STEPS, guidance_scale=cfg, output_type="pt",
        ).image_embeddings  # fmt: skip
    return found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("cfg", [CFG, 1.0])
def test_stable_cascade_reads_images_as_diffusers_does(count: int, cfg: float, pair: Pair) -> None:
    ran = pair.run(**RUN | {"cfg": cfg, "image_prompts": prompts_of(STAGE_C, *[1.0] * count)})
    expected = prior_of_diffusers(pair, count, cfg)
    (_, first), _ = ran.sampled()
    np.testing.assert_allclose(first.samples_CHW, expected[0], atol=1e-4 * max(1.0, float(expected.std())))


def test_strengths_of_images_of_stable_cascade_act_and_recipes_name_them(pair: Pair) -> None:
    plain, whole, half = (
        pair.run(**RUN | {"image_prompts": prompts}) for prompts in ([], *(prompts_of(STAGE_C, s) for s in (1.0, 0.5)))
    )
    latents = [ran.sampled()[0][1].samples_CHW for ran in (plain, whole, half)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not np.allclose(latents[one], latents[other])
    (work, _), (second, _) = half.sampled()
    assert work.all_of(SeenImages) == (SeenImages((0.5,), (0.0,)),)
    assert not second.all_of(SeenImages)
    assert half.recipe.pictures is not None
    (prompt,) = half.recipe.pictures.image_prompts
    assert (prompt.name, prompt.strength, prompt.encoder) == (STAGE_C, 0.5, "")


def test_what_stable_cascade_does_not_read_of_images_is_refused(pair: Pair, tmp_path: Path) -> None:
    for fields, expected in (
        ({"noise": 0.5}, "image_prompts.noise: found 0.5, expected 0"),
        ({"start": 0.5}, "image, strength and noise alone"),
        ({"encoder": "nothing"}, "nothing"),
    ):
        with pytest.raises(Exception, match=expected):
            pair.run(**RUN | {"image_prompts": prompts_of(STAGE_C, 1.0, **fields)})
    box = [{"prompt": "a hat", "box": (0, 0, 64, 64)}]
    with pytest.raises(UnusableField, match="regions: found 1 region"):
        pair.run(**RUN | {"image_prompts": prompts_of(STAGE_C, 1.0), "regions": box})
    write_files(tmp_path)
    blind = Pair(tmp_path)
    with pytest.raises(UnusableField, match="none, and 0 that fit"):
        blind.run(**RUN | {"image_prompts": prompts_of(STAGE_C, 1.0)})
    blind.engine.close()


def test_stable_cascade_reads_images_by_a_separate_encoder_of_the_right_width(pair: Pair, tmp_path: Path) -> None:
    write_files(tmp_path)
    save_file(dict(vision_encoder().state_dict()), tmp_path / "clip_vision_l.safetensors")
    separate = Pair(tmp_path)
    found = [each.run(**RUN | {"image_prompts": prompts_of(STAGE_C, 1.0)}) for each in (separate, pair)]
    ours, expected = (ran.sampled()[0][1].samples_CHW for ran in found)
    # some processors round otherwise where weights begin at other places of a file
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.std()))
    pictures = found[0].recipe.pictures
    assert pictures is not None
    assert pictures.image_prompts[0].encoder == "clip_vision_l"
    PHOTOS[0].save(tmp_path / "photo.png")
    prompts = [{"model": STAGE_C, "image": str(tmp_path / "photo.png"), "strength": 0.5}]
    written = separate.run(**RUN | {"image_prompts": prompts})
    again, *_ = requests_of(written.recipe, lambda file: str(tmp_path / file))
    (prompt,) = again.image_prompts
    assert (prompt.model, prompt.encoder, prompt.strength, prompt.noise) == (STAGE_C, "clip_vision_l", 0.5, 0.0)
    separate.engine.close()


def vision_of(width: int) -> Any:
    config = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=16, image_size=28, patch_size=14,
        projection_dim=width, hidden_act="gelu",
    )  # fmt: skip
    return seeded(lambda: transformers.CLIPVisionModelWithProjection(config), 6)


@pytest.fixture(scope="module")
def revision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModel]:
    folder = tmp_path_factory.mktemp("revision")
    model = TinyModel(folder, layouts.tiny_sdxl())
    width = int(model.module(Role.TEXT_ENCODER_2).config.projection_dim)
    save_file(dict(vision_of(width).state_dict()), folder / "clip_vision_g.safetensors")
    save_file(dict(vision_of(width + 8).state_dict()), folder / "clip_vision_l.safetensors")
    model.close()
    opened = TinyModel.of_folder(folder)
    yield opened
    opened.close()


SHORT: dict[str, Any] = {
    "prompt": PROMPT, "negative": NEGATIVE, "steps": STEPS, "seed": SEED, "cfg": CFG, "width": 64, "height": 48,
    "sampler": "euler", "schedule": "normal",
}  # fmt: skip


def test_images_take_the_place_of_the_pooled_text_of_stable_diffusion_xl(revision: TinyModel) -> None:
    """In diffusers, the pooled prompt is given: the embedding with the noise of the seed, and the strength."""
    made = revision.made(**SHORT, image_prompts=prompts_of("tiny", 0.75, noise=0.3))
    plain = revision.made(**SHORT)
    (work,) = [each for each in made.works.values() if isinstance(each, SampleParams)]
    encoder = vision_of(int(revision.module(Role.TEXT_ENCODER_2).config.projection_dim))
    shown = preprocess_image(np.asarray(PHOTOS[0]), 28, VisionEncoderUse.CENTER_PROJECTED)
    with torch.no_grad():
        embedding = encoder(pixel_values=shown).image_embeds
    levels = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", num_train_timesteps=1000)
    noise = ImageNoise(image_noise_seed(SEED)).draw(tuple(embedding.shape))
    pooled = levels.add_noise(embedding, noise, torch.tensor([300])) * 0.75
    assert_near(pooled_images([work], [embedding.numpy()]), pooled)
    texts = made.texts
    pipeline = diffusers.StableDiffusionXLPipeline(
        revision.module(Role.VAE), None, None, None, None, revision.module(Role.DIFFUSION_MODEL),
        OurLevels(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"), add_watermarker=False,
        force_zeros_for_empty_prompt=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        expected = pipeline(
            **{**texts, "pooled_prompt_embeds": pooled}, num_inference_steps=STEPS, guidance_scale=CFG, width=64,
            height=48, latents=ImageNoise(SEED).draw((1, 4, 6, 8)), output_type="latent",
        ).images  # fmt: skip
    assert_near(made.latents[0], expected)
    assert not np.allclose(made.latents[0], plain.latents[0])


def test_several_images_are_one_pooled_text_and_encoders_of_another_width_are_refused(revision: TinyModel) -> None:
    one, both = (revision.made(**SHORT, image_prompts=prompts_of("tiny", *[0.75] * count)) for count in (1, 2))
    named = revision.made(**SHORT, image_prompts=prompts_of("tiny", 0.75, encoder="clip_vision_g"))
    assert not np.allclose(one.latents[0], both.latents[0])
    assert np.array_equal(one.latents[0], named.latents[0])
    with pytest.raises(UnusableField, match=r"image_prompts\.encoder: found .*clip_vision_l.* with states of width 40"):
        revision.made(**SHORT, image_prompts=prompts_of("tiny", 0.75, encoder="clip_vision_l"))
    mixed = [*prompts_of("tiny", 0.75), {"model": "adapter", "image": PHOTOS[1]}]
    with pytest.raises(UnusableField, match=r"image_prompts\.model: found 'adapter'"):
        revision.made(**SHORT, image_prompts=mixed)


def test_states_of_images_have_their_strengths() -> None:
    work = SampleParams(
        ModelRef("m", "m", "0"), (), OutputShape(64, 64), SamplingSchedule(3, "euler", "normal"), GuidanceParams(1.0),
        SEED, (SeenImages((0.5, 2.0), (0.0, 0.0)),),
    )  # fmt: skip
    ones = np.ones((2, 4), np.float32)
    assert image_states([work, work], [ones, ones])[1].tolist() == [[0.5] * 4, [2.0] * 4]
