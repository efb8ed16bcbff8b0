"""Kandinsky 6, compared with its pipeline in diffusers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.kandinsky6 import pipeline_kandinsky6_ti2va
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.core.sampling_facts import NoiseFacts, NoiseKind
from modelpool.pool.core.stage_params import Encoded, EncodeImageParams, ImagePixels, Latent, VideoFrames
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.families.modules import kandinsky6
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.loading.transformer_folder import _check_scheduler, _noise
from modelpool.pool.models.diffusion.build import plan_diffusion_model
from modelpool.pool.ops.classes import swap_to_casting
from modelpool.pool.ops.context import compute
from modelpool.pool.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.saving.pipelines import scheduler_facts
from modelpool.pool.specs.spec import Role
from tests.pool.families.modules.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import CLIP_L, WIDTH, TinyFamily, _hunyuan_video_vae, seeded, words
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.models.diffusion.image_published import File, State
from tests.pool.models.text import cases as texts
from tests.pool.models.text.pipelines import L, clip_tokenizer, encoded
from tests.pool.models.vae import published
from tests.pool.text.tiny_tokenizers import for_transformers

CHANNELS, AUDIO_CHANNELS = 16, 8
#: names of diffusers, and those of the original code
_RENAMED = (
    (r"^visual_transformer_blocks\.", "visual_blocks."),
    (r"\.(video|audio)_dec_block\.", r".\1T."),
    (r"^audio_out_layer\.", "audio_outLayer."),
    (r"_time_embeddings\.timestep_embedder\.linear_1\.", "_time_embeddings.in_layer."),
    (r"_time_embeddings\.timestep_embedder\.linear_2\.", "_time_embeddings.out_layer."),
    (r"\.feed_forward\.net\.0\.proj\.", ".feed_forward.in_layer."),
    (r"\.feed_forward\.net\.2\.", ".feed_forward.out_layer."),
    (r"_text_transformer_blocks\.(\d+)\.attn\.", r"_text_transformer_blocks.\1.self_attention."),
)


def _model(**more: Any) -> Any:
    return diffusers.Kandinsky6Transformer3DModel(
        **{
            "in_visual_dim": CHANNELS, "out_visual_dim": CHANNELS, "in_text_dim": WIDTH, "in_text_dim2": WIDTH,
            "time_dim": 24, "model_dim": 64, "ff_dim": 48, "num_text_blocks": 1, "num_visual_blocks": 2,
            "axes_dims": (8, 12, 12), "in_audio_dim": AUDIO_CHANNELS, "out_audio_dim": AUDIO_CHANNELS,
            "model_dim_a": 32, "time_dim_a": 16, "ff_dim_a": 40, "axes_dims_a": (4, 6, 6),
            "audio_freqs_scaling": 0.144, "text_token_padding": True, "ca_rope": True, "cross_gates": True,
            "fix_modulation": True, "visual_token_type_num_embeddings": 2,
        }
        | more
    )  # fmt: skip


def _publish(state: State) -> File:
    file: File = {}
    for key, tensor in state.items():
        for pattern, name in _RENAMED:
            key = re.sub(pattern, name, key)
        file[key] = tensor
    return file


def _pipeline(modules: list[Any], vae: Any, model: Any, scheduler: Any = None) -> Any:
    tokenizer = for_transformers("qwen")
    return diffusers.Kandinsky6TI2VAPipeline(
        model, vae, modules[1], lambda images, videos, **call: tokenizer(**call), modules[0], clip_tokenizer(L),
        scheduler or FlowMatchEulerDiscreteScheduler(**scheduler_facts(TRANSFORMERS["kandinsky6"]).settings),
    )  # fmt: skip


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    clip = getattr(modules[0], "text_model", modules[0])
    pipeline = _pipeline([clip, modules[1]], None, None)
    context, pooled, mask, *_ = encoded(pipeline, prompt, do_classifier_free_guidance=False)
    return {"context": context[:, mask[0]], "pooled": pooled}


def _told(whole: Whole, texts: tuple[Encoded, ...]) -> dict[str, Any]:
    width, height = whole.sides
    told: dict[str, Any] = {}
    for side, text in zip(("", "negative_"), texts, strict=False):
        assert text.pooled_V is not None
        told[f"{side}prompt_embeds"] = states(text)
        told[f"{side}pooled_prompt_embeds"] = torch.from_numpy(text.pooled_V)[None]
    return told | {
        "height": height, "width": width, "num_frames": whole.frames, "num_inference_steps": STEPS,
        "latents": noise_of(whole), "output_type": "latent", "sample_audio": False,
    }  # fmt: skip


def _whole_pipeline(whole: Whole, scheduler: Any = None) -> Any:
    modules = [whole.module(role) for role in whole.family.text_encoders]
    return _pipeline(modules, whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL), scheduler)


def _latent(whole: Whole, texts: tuple[Encoded, ...], **more: Any) -> Tensor:
    found: Tensor = _whole_pipeline(whole)(**_told(whole, texts), **more).frames
    return found


def _tiny(name: str, model: Any) -> TinyFamily:
    return TinyFamily(
        name,
        model,
        _publish,
        {"clip_l": CLIP_L, "qwen25_7b": (lambda: texts.qwen2(words=words("qwen")), texts.under("model."))},
        _hunyuan_video_vae,
        partial(published.ldm, dimensions=3),
    )


def _distilled_latent(whole: Whole, texts: tuple[Encoded, ...], **more: Any) -> Tensor:
    scheduler = diffusers.PiflowScheduler(**scheduler_facts(TRANSFORMERS["kandinsky6_distilled"]).settings)
    found: Tensor = _whole_pipeline(whole, scheduler)(guidance_scale=1.0, **_told(whole, texts), **more).frames
    return found


def _distilled() -> Any:
    return _model(out_visual_dim=10 * CHANNELS, out_audio_dim=10 * AUDIO_CHANNELS)


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {
    "kandinsky6": ("visual_blocks.0.videoT.self_attention.to_query", "diffusion_model.{}"),
    "kandinsky6_distilled": ("visual_blocks.1.videoT.feed_forward.in_layer", "diffusion_model.{}"),
}
CASES = {
    "kandinsky6": Compared(
        _tiny("kandinsky6", _model), diffusers.Kandinsky6TI2VAPipeline, _latent, _texts, LORAS["kandinsky6"]
    ),
    "kandinsky6_distilled": Compared(
        _tiny("kandinsky6_distilled", _distilled),
        diffusers.Kandinsky6TI2VAPipeline,
        _distilled_latent,
        _texts,
        LORAS["kandinsky6_distilled"],
    ),
}


class TestKandinsky6(FamilyTests):
    case = CASES["kandinsky6"]


class TestKandinsky6Distilled(FamilyTests):
    case = CASES["kandinsky6_distilled"]


@pytest.mark.parametrize("name", CASES)
def test_a_video_of_an_image_is_that_of_the_pipeline(name: str, tmp_path: Path) -> None:
    """Its encoder draws from what it says of an image; here, as in ours, it is the mean."""
    whole = Whole(tmp_path, CASES[name].tiny)
    texts = whole.texts()
    width, height = whole.sides
    pixels = np.random.default_rng(4).integers(0, 256, (height, width, 3), np.uint8)
    beginning = whole.run(EncodeImageParams(whole.model, width, height), ImagePixels(pixels))
    assert isinstance(beginning, Latent)
    ours = whole.latent(texts, beginning=beginning).samples_CHW
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255
    whole.module(Role.VAE).register_to_config(scaling_factor=whole.opened.latent.scaling_factor)
    means = partial(pipeline_kandinsky6_ti2va.retrieve_latents, sample_mode="argmax")
    with (
        mock.patch.object(pipeline_kandinsky6_ti2va, "retrieve_latents", lambda output, **_: means(output)),
        torch.no_grad(),
    ):
        theirs = (_latent if name == "kandinsky6" else _distilled_latent)(whole, texts, image=image)[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(1.0, float(theirs.std())))
    assert not np.allclose(ours, whole.latent(texts).samples_CHW, atol=1e-3)
    whole.engine.close()


def test_a_model_without_types_of_frames_refuses_an_image() -> None:
    """That for text-to-video alone was published without them."""
    module = seeded(partial(_model, visual_token_type_num_embeddings=0), 1)
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in _publish(module.state_dict()).items()})
    assert plan.config["visual_token_type_num_embeddings"] == 0
    x, told = torch.zeros(1, CHANNELS, 2, 4, 6), {"context": torch.zeros(1, 3, WIDTH), "pooled": torch.zeros(1, WIDTH)}
    assert kandinsky6.forward(module, x, torch.tensor([0.5]), told).shape == x.shape
    with pytest.raises(UnusableField, match="image: found 'a first frame', expected none"):
        kandinsky6.forward(module, x, torch.tensor([0.5]), {**told, "image": x[:, :, :1]})


def test_a_text_that_is_padded_is_that_text_alone() -> None:
    module = seeded(_model, 1)
    generator = torch.Generator().manual_seed(0)
    x, context = torch.randn(2, CHANNELS, 2, 4, 6, generator=generator), torch.randn(2, 9, WIDTH, generator=generator)
    pooled, level = torch.randn(2, WIDTH, generator=generator), torch.tensor([0.4, 0.7])
    mask = torch.arange(9)[None] < torch.tensor([[9], [4]])
    both = kandinsky6.forward(module, x, level, {"context": context, "context_mask": mask, "pooled": pooled})
    alone = kandinsky6.forward(module, x[1:], level[1:], {"context": context[1:, :4], "pooled": pooled[1:]})
    torch.testing.assert_close(both[1:], alone)
    unmasked = kandinsky6.forward(module, x, level, {"context": context, "pooled": pooled})
    assert not torch.allclose(both[1:], unmasked[1:], atol=1e-3)


def test_published_sizes_are_recognised() -> None:
    """The configurations of both sizes, with one block of each kind."""
    for width, audio, time, axes in ((4096, 2048, 1024, (32, 48, 48)), (1792, 896, 512, (16, 24, 24))):
        expected = {
            "in_text_dim": 3584, "in_text_dim2": 768, "time_dim": time, "model_dim": width, "ff_dim": 4 * width,
            "axes_dims": axes, "in_audio_dim": 40, "out_audio_dim": 40, "model_dim_a": audio, "time_dim_a": time,
            "ff_dim_a": 4 * audio, "axes_dims_a": axes,
        }  # fmt: skip
        with torch.device("meta"):
            state = _model(**expected, num_visual_blocks=1).state_dict()
        for file in (_publish(state), dict(state)):
            plan = plan_diffusion_model({key: tuple(value.shape) for key, value in file.items()})
            assert plan.recognised.name == "kandinsky6"
            assert {name: plan.config[name] for name in expected} == expected


def _inputs(cells: int = 2) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A latent, its level and what the model is told."""
    generator = torch.Generator().manual_seed(0)
    x, context = (torch.randn(1, *shape, generator=generator) for shape in ((CHANNELS, cells, 4, 6), (9, WIDTH)))
    return x, torch.tensor([0.4]), {"context": context, "pooled": torch.randn(1, WIDTH, generator=generator)}


def test_weights_in_few_bits_compute_in_full() -> None:
    """diffusers' class would embed the level in the type of the weights, 8 bits."""
    sim.install()
    sim.configure(0, 1 << 29)
    sim.recover(0)
    device = torch.device("sim", 0)
    file = {key: value.to(torch.float8_e4m3fn) for key, value in _publish(seeded(_model, 1).state_dict()).items()}
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in file.items()})
    x, level, told = _inputs()
    streamed = plan.build(file)
    swap_to_casting(streamed)
    with torch.no_grad():
        expected = plan.call(plan.build({key: value.float() for key, value in file.items()}), x, level, told)
        with compute(device, torch.float32):
            elsewhere = {name: value.to(device) for name, value in told.items()}
            found = plan.call(streamed, x.to(device), level.to(device), elsewhere)
            short = {name: value.bfloat16() for name, value in elsewhere.items()}
        with compute(device, torch.bfloat16):
            half = plan.call(streamed, x.to(device, torch.bfloat16), level.to(device), short)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert float((half.cpu().float() - expected).std()) < 0.02 * float(expected.std())


def test_videos_of_every_length_have_positions() -> None:
    """diffusers' tables end at 128 latent frames."""
    module = plan_diffusion_model({key: tuple(value.shape) for key, value in _model().state_dict().items()})
    built = module.build(seeded(_model, 1).state_dict())
    x, level, told = _inputs(cells=130)
    with torch.no_grad():
        longer = kandinsky6.forward(built, x, level, {**told, "image": x[:, :, :1]})
    assert longer.shape == x.shape


def test_levels_of_distilled_models_are_those_of_their_scheduler() -> None:
    family = TRANSFORMERS["kandinsky6_distilled"]
    scheduler = diffusers.PiflowScheduler(**scheduler_facts(family).settings)
    defaults = family.sampling.defaults
    assert defaults is not None
    for steps in (1, 2, 10, 16):
        scheduler.set_timesteps(steps)
        ours = make_sigmas(defaults.schedule, steps, sigma_table(family.sampling.noise))
        torch.testing.assert_close(ours, scheduler.sigmas, rtol=1e-5, atol=1e-6)


def test_a_step_of_any_length_is_that_of_the_scheduler() -> None:
    """Of any shift, and of as many predictions as the model makes. They are near each other: the scheduler finds the
    place between two of them with few digits."""
    generator = torch.Generator().manual_seed(2)
    for steps, shift, grids in ((1, 5.0, 10), (4, 3.0, 2), (16, 5.0, 10)):
        scheduler = diffusers.PiflowScheduler(shift=shift, n_grid=grids)
        scheduler.set_timesteps(steps)
        latent = torch.randn(1, 2, 4, 6, CHANNELS, generator=generator)
        levels = scheduler.sigmas.tolist()
        for step in range(steps):
            about, more = (torch.randn(1, 2, 4, 6, count * CHANNELS, generator=generator) for count in (1, grids))
            predicted = about.repeat(1, 1, 1, 1, grids) + 0.05 * more
            x = latent.movedim(-1, 1)
            told = {"step": torch.tensor([[*levels[step : step + 2], shift]])}
            with mock.patch.object(kandinsky6, "forward", lambda *_, predicted=predicted: predicted.movedim(-1, 1)):
                velocity = kandinsky6.distilled_forward(torch.nn.Identity(), x, torch.tensor(levels[step]), told)
            latent = scheduler.step(predicted, scheduler.timesteps[step], latent).prev_sample
            ours = x + velocity * (levels[step + 1] - levels[step])
            torch.testing.assert_close(ours, latent.movedim(-1, 1), rtol=1e-4, atol=1e-5)


def test_folders_of_distilled_models_have_the_shift_of_their_scheduler(tmp_path: Path) -> None:
    """Settings that this version has fixed are refused."""
    family = TRANSFORMERS["kandinsky6_distilled"]
    settings = {"_class_name": "PiflowScheduler", **scheduler_facts(family).settings}
    assert _noise(family.sampling.noise, {**settings, "shift": 3.0}).shift == 3.0
    shifted = replace(family, sampling=replace(family.sampling, noise=NoiseFacts(NoiseKind.FLOW, shift=3.0)))
    assert scheduler_facts(shifted).settings["shift"] == 3.0
    _check_scheduler(family, settings)
    with pytest.raises(UnknownArchitecture, match="num_policy_substeps: found 64, expected 128"):
        _check_scheduler(family, {**settings, "num_policy_substeps": 64})
    with pytest.raises(UnknownArchitecture, match="PiflowScheduler"):
        _check_scheduler(TRANSFORMERS["kandinsky6"], settings)


def test_distilled_models_refuse_other_samplers_than_that_of_their_steps(tmp_path: Path) -> None:
    sim.install()
    sim.configure(0, 1 << 29)
    sim.recover(0)
    save_file(CASES["kandinsky6_distilled"].tiny.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, CASES["kandinsky6_distilled"].tiny)
    tiny = TinyModel.of_folder(tmp_path, device="sim")
    made = tiny.made(width=96, height=64, steps=2, frames=9)
    (video,) = (each for each in made.results.values() if isinstance(each, VideoFrames))
    assert video.frames_THWC.shape == (9, 64, 96, 3)
    for fields in ({"sampler": "heun"}, {"sampler": "euler", "s_churn": 1.0}):
        with pytest.raises(UnusableField, match=r"sampler: found .* expected euler without s_churn"):
            tiny.made(width=96, height=64, steps=2, frames=9, **fields)
    tiny.close()
