"""Stable Diffusion 2.1 unCLIP makes of an image what diffusers makes of it: on the same weights, texts and noise, from
a file and from the folder that is saved of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.embeddings import get_timestep_embedding
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.placeholders import with_placeholders
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.inference.conditioning.image_labels import image_labels
from modelpool.pool.inference.conditioning.micro_conditioning import CLASS_LABELS
from modelpool.pool.inference.sampling.noise import ImageNoise, image_noise_seed
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.core.refs import ModelRef
from modelpool.pool.values.core.sampling_facts import ImageLabels
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    OutputShape,
    SampleParams,
    SamplingSchedule,
    SeenImages,
    StartCondition,
    VisionEncodeParams,
)
from modelpool.pool.values.specs.spec import JobId
from tests.pool.families.test_from_images import image, mask
from tests.pool.families.test_shown_folders import assert_near
from tests.pool.families.tiny_model import Made, OurLevels, TinyModel
from tests.pool.families.tiny_unclip import layout_of, statistics
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
PROMPT, NEGATIVE, STEPS, SEED, CFG = "a photo of a red cube", "blurry", 3, 11, 5.0
WIDTH, HEIGHT = 64, 48
RUN: dict[str, Any] = {
    "prompt": PROMPT, "negative": NEGATIVE, "steps": STEPS, "seed": SEED, "cfg": CFG, "width": WIDTH, "height": HEIGHT,
}  # fmt: skip
#: the pipeline of each family
PIPELINES: Mapping[str, Any] = {
    "sd21_unclip_l": diffusers.StableUnCLIPImg2ImgPipeline,
    "sd21_unclip_h": diffusers.StableUnCLIPImg2ImgPipeline,
}
#: as large as what is made of it: the driver scales images to the size of the request
IMAGE = image(WIDTH, HEIGHT)


def _expected(pipeline: Any, prompt: str, cfg: float, seed: int) -> Tensor:
    pipeline.scheduler = OurLevels(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction"
    )
    pipeline.scheduler.set_timesteps(STEPS)
    latents: Tensor = pipeline(
        IMAGE, prompt, negative_prompt=NEGATIVE, num_inference_steps=STEPS, guidance_scale=cfg, width=WIDTH,
        height=HEIGHT, output_type="latent", generator=torch.Generator().manual_seed(image_noise_seed(seed)),
        # this pipeline scales no latents that it is given
        latents=ImageNoise(seed).draw((1, 4, HEIGHT // 8, WIDTH // 8)) * pipeline.scheduler.init_noise_sigma,
    ).images  # fmt: skip
    return latents


@pytest.mark.parametrize("name", PIPELINES)
def test_an_image_is_varied_as_diffusers_does(name: str, tmp_path: Path) -> None:
    """File, folder and pipeline: with texts, without, and without guidance."""
    for place in ("file", "again"):
        (tmp_path / place).mkdir()
    file = TinyModel(tmp_path / "file", layout_of(name), tensors=statistics(name))
    assert file.family.name == name
    saved = save_diffusers(open_checkpoint(file.model.source), tmp_path / "again" / "tiny")
    assert (saved.missing, saved.left_out) == ((), ())
    folder = TinyModel.of_folder(tmp_path / "again")
    assert folder.family.sampling == file.family.sampling
    pipeline = PIPELINES[name].from_pretrained(tmp_path / "again" / "tiny", local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    for fields in ({}, {"prompt": ""}, {"cfg": 1.0, "seed": 12}):
        run = RUN | fields
        made, again = file.made(image=IMAGE, **run), folder.made(image=IMAGE, **run)
        assert_near(again.latents[0], made.latents[0])
        with torch.no_grad():
            expected = _expected(pipeline, run["prompt"], run["cfg"], run["seed"])
            decoded = pipeline.vae.decode(expected / pipeline.vae.config.scaling_factor).sample
        assert_near(made.latents[0], expected)
        pixels = (decoded[0].movedim(0, -1) / 2 + 0.5).clamp(0, 1).numpy()
        assert np.abs(made.pixels / 255 - pixels).max() <= 1 / 255
    file.close()
    folder.close()


def _tasks(made: Made, kind: type) -> dict[Any, Any]:
    works = {task.task_id: made.works[task.task_id] for task in made.tasks}
    return {task: work for task, work in works.items() if isinstance(work, kind)}


def test_an_image_is_encoded_once_for_all_seeds_and_texts_and_second_passes_begin_at_the_first(tmp_path: Path) -> None:
    model = TinyModel(tmp_path, layout_of("sd21_unclip_l"))
    first = model.made(image=IMAGE, **RUN)
    other = model.made(image=IMAGE, **RUN | {"seed": 12, "prompt": "", "hires": {"scale": 2, "strength": 0.7}})
    seen = _tasks(first, VisionEncodeParams)
    assert len(seen) == 1
    assert _tasks(other, VisionEncodeParams).keys() == seen.keys()
    starts = [work.has(StartCondition) for work in _tasks(other, SampleParams).values()]
    assert starts == [False, True]
    assert [tuple(latent.shape[2:]) for latent in other.latents] == [(6, 8), (12, 16)]
    model.close()


def test_left_out_fields_are_those_of_the_model_and_not_of_the_image(tmp_path: Path) -> None:
    """Requests are planned without an image, too."""
    model = TinyModel(tmp_path, layout_of("sd21_unclip_l"))
    asked = GenerateRequest(model="tiny", prompt="", seed=SEED)
    shown, _ = InputImages(lambda result: result).bring(
        GenerateRequest(model="tiny", prompt="", seed=SEED, image=IMAGE)
    )
    planned = with_placeholders(asked, model.catalog.model_defaults(model.model))
    for request in (shown, planned):
        _, graph = build_graph(request, JobId("job"), model.catalog)
        work = next(each for each in graph.works.values() if isinstance(each, SampleParams))
        assert (work.shape.width, work.shape.height) == (768, 768)
        assert (work.schedule.steps, work.schedule.first_step, work.guidance.cfg) == (20, 0, 10.0)
    model.close()


def test_what_such_a_model_cannot_use_is_refused_by_name(tmp_path: Path) -> None:
    model = TinyModel(tmp_path, layout_of("sd21_unclip_l"))
    refused: Mapping[str, dict[str, Any]] = {
        "image: missing; model 'tiny' makes an image that resembles a given one": {},
        "strength: not supported by model 'tiny'": {"image": IMAGE, "strength": 0.5},
        "mask: not supported by model 'tiny'": {"image": image(), "mask": mask()},
        "noise_level: found 5, not supported": {"image": IMAGE, "noise_level": 5},
    }
    for message, fields in refused.items():
        with pytest.raises(UnusableField, match=message):
            model.made(**RUN, **fields)
    model.close()


def test_encoders_and_statistics_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "a.safetensors", layout=layout_of("sd21_unclip_l", embedded=512))
    with pytest.raises(UnknownArchitecture, match="gives states of width 512, expected 768"):
        open_checkpoint(path)
    sizes: Mapping[str, tuple[int, str]] = {
        "few": (700, "found 700 and 700 numbers, expected 768 finite ones each"),
        "zero": (768, "noise_augmentor.data_std: found 0.0, expected numbers above 0"),
    }
    for name, (width, message) in sizes.items():
        keys = {f"noise_augmentor.data_{part}": (1, width) for part in ("mean", "std")}
        path = write_tiny_checkpoint(tmp_path / f"{name}.safetensors", layout=layout_of("sd21_unclip_l") | keys)
        if name == "zero":
            _fill_with_zeros(path, "noise_augmentor.data_std")
        with pytest.raises(UnknownArchitecture, match=message):
            open_checkpoint(path)


def _fill_with_zeros(path: Path, key: str) -> None:
    tensors = load_file(path)
    save_file({**tensors, key: torch.zeros_like(tensors[key])}, path)


def test_several_images_are_one_embedding_with_their_noise_and_strengths() -> None:
    """As the sum of ComfyUI: each with its noise and strength, and then with the noise of 0.05 of the levels."""
    facts = ImageLabels((0.5,) * 8, (2.0,) * 8)
    levels = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", num_train_timesteps=1000)
    states_ND = np.random.default_rng(3).standard_normal((2, 8)).astype(np.float32)
    noise_ND = ImageNoise(image_noise_seed(SEED)).draw((3, 8))

    def noisy(states_1D: Tensor, noise_1D: Tensor, level: int) -> Tensor:
        return levels.add_noise((states_1D - 0.5) / 2.0, noise_1D, torch.tensor([level])) * 2.0 + 0.5

    def labels(states: Any, seen: SeenImages | None) -> Tensor:
        work = SampleParams(
            ModelRef("m", "m", "0"), (), OutputShape(64, 64), SamplingSchedule(3, "euler", "normal"),
            GuidanceParams(1.0), SEED,
            () if seen is None else (seen,),
        )  # fmt: skip
        return image_labels([work], [states], facts)[CLASS_LABELS]

    for noise, strength in ((0.0, 1.0), (0.4, 0.5), (1.0, 2.0)):
        level = round(999 * noise)
        first = torch.from_numpy(states_ND[:1])
        drawn = ImageNoise(image_noise_seed(SEED)).draw((1, 8))
        expected = torch.cat([noisy(first, drawn, level), get_timestep_embedding(torch.tensor([level]), 8, True, 0)], 1)
        found = labels(states_ND[:1], SeenImages((strength,), (noise,)))
        assert torch.allclose(found, expected * strength, atol=1e-5), (noise, strength)
    assert torch.equal(labels(states_ND[:1], None), labels(states_ND[:1], SeenImages((1.0,), (0.0,))))
    merged = sum(
        noisy(torch.from_numpy(states_ND[place : place + 1]), noise_ND[place : place + 1], level) * strength
        for place, (level, strength) in enumerate(((400, 0.5), (0, 0.75)))
    )
    expected = torch.cat([noisy(merged, noise_ND[2:], 50), get_timestep_embedding(torch.tensor([50]), 8, True, 0)], 1)
    assert torch.allclose(labels(states_ND, SeenImages((0.5, 0.75), (0.4, 0.0))), expected, atol=1e-5)


def test_images_with_strength_and_noise_are_image_prompts_of_the_model_itself(tmp_path: Path) -> None:
    model = TinyModel(tmp_path, layout_of("sd21_unclip_l"))
    other = image(HEIGHT, WIDTH)
    alone = model.made(image=IMAGE, **RUN)
    same = model.made(image_prompts=[{"model": "tiny", "image": IMAGE}], **RUN)
    assert np.array_equal(same.latents[0], alone.latents[0])
    prompts = [{"model": "tiny", "image": each, "strength": 0.5, "noise": 0.4} for each in (IMAGE, other)]
    both = model.made(image_prompts=prompts, **RUN)
    (work,) = _tasks(both, SampleParams).values()
    assert work.all_of(SeenImages) == (SeenImages((0.5, 0.5), (0.4, 0.4)),)
    (seen,) = _tasks(both, VisionEncodeParams).values()
    assert seen.images == 2
    assert not np.allclose(both.latents[0], alone.latents[0])
    one = model.made(image_prompts=prompts[:1], **RUN)
    assert not np.allclose(both.latents[0], one.latents[0])
    for wrong, expected in (({"model": "redux"}, "image_prompts.model"), ({"start": 0.5}, "image, strength and noise")):
        with pytest.raises(UnusableField, match=expected):
            model.made(image_prompts=[prompts[0] | wrong], **RUN)
    model.close()
