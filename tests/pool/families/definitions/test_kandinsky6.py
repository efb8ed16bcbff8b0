"""Kandinsky 6, compared with its pipeline in diffusers."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
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

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.families.definitions import kandinsky6
from modelpool.pool.families.parts.audio_tracks import SoundTrack, sound_cells, sound_length
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.loading.transformer_folder import _check_scheduler, _noise
from modelpool.pool.models.saving.pipelines import scheduler_facts
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    Encoded,
    EncodeImageParams,
    ImagePixels,
    Latent,
    OutputShape,
    VideoFrames,
)
from modelpool.pool.values.specs.spec import Role, Stage
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.families.definitions.compared import Compared, FamilyTests, states
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import CLIP_L, WIDTH, TinyFamily, _hunyuan_video_vae, prefixed, seeded, words
from tests.pool.families.whole_transformer import FRAME_RATE, SEED, STEPS, Whole
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.text.pipelines import L, clip_tokenizer, encoded
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers

CHANNELS, AUDIO_CHANNELS = 16, kandinsky6.SOUND.width
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
            "model_dim_a": 32, "time_dim_a": 16, "ff_dim_a": 40, "axes_dims_a": (8, 12, 12),
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


def _audio_vae() -> Any:
    return diffusers.MMAudioVAE(mel_bins=16, hidden_channels=8, channel_multipliers=(1, 2), layers_per_block=1)


def _vocoder() -> Any:
    return diffusers.MMAudioVocoder(num_mels=16, upsample_initial_channel=64)


@functools.cache
def _sound_file() -> File:
    """Its samples can be heard, and are not all as loud as can be."""
    vocoder = seeded(_vocoder, 5)
    vocoder.conv_post.weight.mul_(4.0)
    parts = prefixed("audio_vae.", seeded(_audio_vae, 4).state_dict()) | prefixed("vocoder.", vocoder.state_dict())
    return {key: value.contiguous().clone() for key, value in parts.items()}


@dataclass(frozen=True, eq=False)
class _TinySounding(TinyFamily):
    """A family with a file that has what decodes audio."""

    def file(self, left_out: tuple[str, ...] = ()) -> File:
        """The whole file."""
        return {**super().file(left_out), **_sound_file()}


def _noises(whole: Whole) -> tuple[Tensor, Tensor]:
    """The noise that a run starts from: of frames, and of audio."""
    width, height = whole.sides
    own = latent_shape(width, height, whole.frames, whole.opened.latent)
    more = sound_cells(kandinsky6.SOUND, whole.frames, FRAME_RATE, own[0] * own[2] * own[3])
    noise = ImageNoise(SEED).draw((1, own[0], own[1] + more, *own[2:]))
    length = sound_length(kandinsky6.SOUND, whole.frames, FRAME_RATE)
    return SoundTrack(kandinsky6.SOUND, own[1], length).parted(noise)


def _pipeline(modules: list[Any], vae: Any, model: Any, scheduler: Any = None) -> Any:
    tokenizer = for_transformers("qwen")
    return diffusers.Kandinsky6TI2VAPipeline(
        model, vae, modules[1], lambda images, videos, **call: tokenizer(**call), modules[0], clip_tokenizer(L),
        scheduler or FlowMatchEulerDiscreteScheduler(**scheduler_facts(TRANSFORMERS["kandinsky6"]).settings),
        None if vae is None else vae.sound.vae, None if vae is None else vae.sound.vocoder,
    )  # fmt: skip


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    clip = getattr(modules[0], "text_model", modules[0])
    pipeline = _pipeline([clip, modules[1]], None, None)
    context, pooled, mask, *_ = encoded(pipeline, prompt, do_classifier_free_guidance=False)
    return {"context": context[:, mask[0]], "pooled": pooled}


def _told(whole: Whole, texts: tuple[Encoded, ...]) -> dict[str, Any]:
    (width, height), (video, audio) = whole.sides, _noises(whole)
    told: dict[str, Any] = {}
    for side, text in zip(("", "negative_"), texts, strict=False):
        assert text.pooled_V is not None
        told[f"{side}prompt_embeds"] = states(text)
        told[f"{side}pooled_prompt_embeds"] = torch.from_numpy(text.pooled_V)[None]
    return told | {
        "height": height, "width": width, "num_frames": whole.frames, "num_inference_steps": STEPS,
        "frame_rate": FRAME_RATE, "latents": video, "audio_latents": audio.transpose(1, 2), "output_type": "latent",
    }  # fmt: skip


def _whole_pipeline(whole: Whole, scheduler: Any = None) -> Any:
    modules = [whole.module(role) for role in whole.family.text_encoders]
    return _pipeline(modules, whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL), scheduler)


def _run(whole: Whole, texts: tuple[Encoded, ...], **more: Any) -> Any:
    """What the pipeline makes: frames and audio."""
    told, scheduler = _told(whole, texts), None
    if whole.family.name == "kandinsky6_distilled":
        told["guidance_scale"] = 1.0
        scheduler = diffusers.PiflowScheduler(**scheduler_facts(TRANSFORMERS["kandinsky6_distilled"]).settings)
    with torch.no_grad():
        return _whole_pipeline(whole, scheduler)(**{**told, **more})


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    found: Tensor = _run(whole, texts).frames
    return found


def _tiny(name: str, model: Any) -> TinyFamily:
    return _TinySounding(
        name,
        model,
        _publish,
        {"clip_l": CLIP_L, "qwen25_7b": (lambda: texts.qwen2(words=words("qwen")), texts.under("model."))},
        _hunyuan_video_vae,
        partial(published.ldm, dimensions=3),
    )


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
        _latent,
        _texts,
        LORAS["kandinsky6_distilled"],
    ),
}


class TestKandinsky6(FamilyTests):
    case = CASES["kandinsky6"]


class TestKandinsky6Distilled(FamilyTests):
    case = CASES["kandinsky6_distilled"]


#: rounding of float32, relative to the latent: a distilled step is a sum of 128 parts, and comes within 1.1e-5
ROUNDING = {"kandinsky6": 1e-5, "kandinsky6_distilled": 2e-5}


@pytest.mark.parametrize("name", CASES)
def test_audio_is_that_of_the_pipeline(name: str, tmp_path: Path) -> None:
    """Its latent and its samples."""
    whole = Whole(tmp_path, CASES[name].tiny)
    texts = whole.texts()
    latent, theirs = whole.latent(texts), _run(whole, texts).audio
    assert latent.sound_LA is not None
    np.testing.assert_allclose(latent.sound_LA.T, theirs[0], atol=ROUNDING[name] * max(1.0, float(theirs.std())))
    made = whole.run(DecodeParams(whole.model, OutputShape(*whole.sides, whole.frames, FRAME_RATE)), latent)
    assert isinstance(made, VideoFrames)
    assert made.sound is not None
    sound = whole.module(Role.VAE).sound
    assert sound.vae.config.scaling_factor == (0.5302 if name == "kandinsky6" else 0.417)
    with torch.no_grad():
        samples = sound.vocoder(sound.vae.decode(theirs / sound.vae.config.scaling_factor).sample).sample[0]
    assert float(samples.std()) > 0.01
    assert float(samples.abs().max()) < 1.0
    np.testing.assert_allclose(made.sound.samples_SC, samples.T, atol=1e-5)
    assert made.sound.samples_per_second == 44100
    whole.engine.close()


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
        theirs = _run(whole, texts, image=image).frames[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(1.0, float(theirs.std())))
    assert not np.allclose(ours, whole.latent(texts).samples_CHW, atol=1e-3)
    whole.engine.close()


def test_a_model_without_types_of_frames_refuses_an_image() -> None:
    """That for text-to-video alone was published without them."""
    module = seeded(partial(_model, visual_token_type_num_embeddings=0), 1)
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in _publish(module.state_dict()).items()})
    assert plan.config["visual_token_type_num_embeddings"] == 0
    x, _, told = _inputs()
    assert kandinsky6.forward(module, x, torch.tensor([0.5]), told).shape == x.shape
    with pytest.raises(UnusableField, match="image: found 'a first frame', expected no image"):
        kandinsky6.forward(module, x, torch.tensor([0.5]), {**told, "image": x[:, :, :1]})


def test_a_text_that_is_padded_is_that_text_alone() -> None:
    module = seeded(_model, 1)
    generator = torch.Generator().manual_seed(0)
    x, context = _inputs()[0].repeat(2, 1, 1, 1, 1), torch.randn(2, 9, WIDTH, generator=generator)
    pooled, level = torch.randn(2, WIDTH, generator=generator), torch.tensor([0.4, 0.7])
    mask, rate = torch.arange(9)[None] < torch.tensor([[9], [4]]), torch.tensor([24.0])
    told = {"context": context, "pooled": pooled, "frame_rate": rate}
    both = kandinsky6.forward(module, x, level, {**told, "context_mask": mask})
    alone = kandinsky6.forward(module, x[1:], level[1:], {**told, "context": context[1:, :4], "pooled": pooled[1:]})
    torch.testing.assert_close(both[1:], alone)
    unmasked = kandinsky6.forward(module, x, level, told)
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
    """A latent of so many cells of frames, with audio, its level and what the model is told."""
    generator = torch.Generator().manual_seed(0)
    total = cells + sound_cells(kandinsky6.SOUND, 1 + 4 * (cells - 1), 24.0, CHANNELS * 4 * 6)
    x, context = (torch.randn(1, *shape, generator=generator) for shape in ((CHANNELS, total, 4, 6), (9, WIDTH)))
    told = {"context": context, "pooled": torch.randn(1, WIDTH, generator=generator)}
    return x, torch.tensor([0.4]), {**told, "frame_rate": torch.tensor([24.0])}


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
            elsewhere = {name: value if name == "frame_rate" else value.to(device) for name, value in told.items()}
            found = plan.call(streamed, x.to(device), level.to(device), elsewhere)
            short = {name: value if name == "frame_rate" else value.bfloat16() for name, value in elsewhere.items()}
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
            scaled = predicted.unflatten(-1, (grids, CHANNELS)).movedim(-2, 1)
            velocity = kandinsky6.mean_over_step(latent, scaled, *levels[step : step + 2], shift)
            ours = latent + velocity * (levels[step + 1] - levels[step])
            latent = scheduler.step(predicted, scheduler.timesteps[step], latent).prev_sample
            torch.testing.assert_close(ours, latent, rtol=1e-4, atol=1e-5)


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
    assert video.sound is not None
    # as many positions as begin in the video
    assert video.sound.samples_SC.shape == (1024 * math.ceil(9 / 24 * 44100 / 1024), 1)
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if task.stage is not Stage.ENCODE:
            assert 0.9 * task.activation_bytes <= cost.working_bytes <= task.activation_bytes, task.stage
    for fields in ({"sampler": "heun"}, {"sampler": "euler", "s_churn": 1.0}):
        with pytest.raises(UnusableField, match=r"sampler: found .* expected euler without s_churn"):
            tiny.made(width=96, height=64, steps=2, frames=9, **fields)
    tiny.close()
