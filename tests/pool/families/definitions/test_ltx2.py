"""LTX-2, compared with its pipelines in diffusers: frames and audio."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.loaders.single_file_utils import (
    convert_ltx2_audio_vae_to_diffusers,
    convert_ltx2_transformer_to_diffusers,
)
from diffusers.pipelines.ltx2 import pipeline_ltx2_condition, pipeline_ltx2_ic_lora, pipeline_ltx2_image2video
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from diffusers.video_processor import VideoProcessor
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.families.definitions.ltx2 import SOUND
from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.parts.audio_tracks import SoundTrack, cells_of_frames, joined, sound_cells, sound_length
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.guidance.guiders import Predictions
from modelpool.pool.inference.guidance.model_guiders import guider_of
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.partial_run import GuidanceMemory
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.components.text.connectors import plan_connectors
from modelpool.pool.models.components.vae.audio_decoders import plan_sound
from modelpool.pool.models.components.vae.build_vae import plan_vae
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.pipelines import scheduler_facts
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.encoded_videos import FirstFrames
from modelpool.pool.values.core.run_options import Isolation, RunOptions, SoundScale
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    DecodeParams,
    Encoded,
    EncodeImageParams,
    GuidanceParams,
    GuideCondition,
    ImagePixels,
    KeptSoundCondition,
    Latent,
    OutputShape,
    SampleParams,
    SamplingSchedule,
    StartCondition,
    StepPart,
    VideoFrames,
    VoiceCondition,
)
from modelpool.pool.values.specs.spec import Role, Stage
from tests.pool.families.definitions.compared import Compared
from tests.pool.families.test_transformers_as_folders import assert_same_model
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import TinyFamily, prefixed, seeded
from tests.pool.families.whole_transformer import FRAME_RATE, NEGATIVE, PROMPT, SEED, STEPS, Whole
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.components.diffusion.video_published import renamed
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import cases as vaes
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny
from tests.pool.pipeline import QUIET

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
#: of the text encoder, and of what joins its states: two heads of the width that no shape tells
TEXT, TEXT_LAYERS, HEAD = 256, 2, 128
REGISTERS = 64


def _model(**more: Any) -> Any:
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=32, attention_head_dim=4, cross_attention_dim=128,
        audio_num_attention_heads=32, audio_attention_head_dim=2, audio_cross_attention_dim=64, num_layers=2,
        caption_channels=TEXT, rope_type="split", **more,
    )  # fmt: skip


_ADALN = (
    (r"^proj_in\.", "patchify_proj."),
    (r"^audio_proj_in\.", "audio_patchify_proj."),
    (r"^time_embed\.", "adaln_single."),
    (r"^audio_time_embed\.", "audio_adaln_single."),
    (r"^av_cross_attn_video_scale_shift\.", "av_ca_video_scale_shift_adaln_single."),
    (r"^av_cross_attn_audio_scale_shift\.", "av_ca_audio_scale_shift_adaln_single."),
    (r"^av_cross_attn_video_a2v_gate\.", "av_ca_a2v_gate_adaln_single."),
    (r"^av_cross_attn_audio_v2a_gate\.", "av_ca_v2a_gate_adaln_single."),
    (r"\.video_a2v_cross_attn_scale_shift_table$", ".scale_shift_table_a2v_ca_video"),
    (r"\.audio_a2v_cross_attn_scale_shift_table$", ".scale_shift_table_a2v_ca_audio"),
    (r"\.norm_q\.", ".q_norm."),
    (r"\.norm_k\.", ".k_norm."),
)


def _publish(state: State) -> File:
    return renamed(state, _ADALN)


def _connectors() -> Any:
    sizes = {"num_attention_heads": TEXT // HEAD, "attention_head_dim": HEAD, "num_layers": 1}
    sizes["num_learnable_registers"] = REGISTERS
    return LTX2TextConnectors(
        caption_channels=TEXT, text_proj_in_factor=TEXT_LAYERS + 1, rope_type="split",
        **{f"{part}_connector_{name}": value for part in ("video", "audio") for name, value in sizes.items()},
    )  # fmt: skip


def _published_connectors(state: State) -> File:
    """The projection is outside of the diffusion model, the connectors are inside."""
    return renamed(
        state,
        (
            (r"^text_proj_in\.", "text_embedding_projection.aggregate_embed."),
            (r"^(video|audio)_connector\.", r"model.diffusion_model.\1_embeddings_connector."),
            (r"\.transformer_blocks\.", ".transformer_1d_blocks."),
            *_ADALN[-2:],
        ),
    )


def _audio_vae() -> Any:
    return diffusers.AutoencoderKLLTX2Audio(base_channels=128, ch_mult=(1, 1, 1), num_res_blocks=1)


def _published_audio_vae(state: State) -> File:
    names = ((r"^latents_mean$", "mean-of-means"), (r"^latents_std$", "std-of-means"))
    statistics = renamed({name: state[name] for name in ("latents_mean", "latents_std")}, names)
    file = {key: value for key, value in state.items() if not key.startswith("latents_")}
    return prefixed("audio_vae.", {**file, **prefixed("per_channel_statistics.", statistics)})


def _vocoder() -> Any:
    return LTX2Vocoder(hidden_channels=32)


def _published_vocoder(state: State) -> File:
    rules = (
        (r"^conv_in\.", "conv_pre."),
        (r"^conv_out\.", "conv_post."),
        (r"^upsamplers\.", "ups."),
        (r"^resnets\.", "resblocks."),
    )
    return prefixed("vocoder.", renamed(state, rules))


def _gemma() -> Any:
    config = transformers.Gemma3TextConfig(
        **{
            **texts.DECODER, "vocab_size": tiny("gemma").get_vocab_size(), "num_hidden_layers": TEXT_LAYERS,
            "hidden_size": TEXT,
        },
        query_pre_attn_scalar=256,
        sliding_window=1024,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    return texts.seeded(transformers.Gemma3TextModel(config))


@functools.cache
def _sound_file() -> File:
    """The tensors of a whole file besides those of other families."""
    parts = (
        _published_connectors(seeded(_connectors, 3).state_dict()),
        _published_audio_vae(seeded(_audio_vae, 4).state_dict()),
        _published_vocoder(_quiet(seeded(_vocoder, 5)).state_dict()),
    )
    return {key: value.contiguous().clone() for part in parts for key, value in part.items()}


def _quiet(vocoder: Any) -> Any:
    """So that its samples are not all as loud as can be."""
    vocoder.conv_out.weight.mul_(0.02)
    vocoder.conv_out.bias.zero_()
    return vocoder


@dataclass(frozen=True, eq=False)
class _TinySounding(TinyFamily):
    """A family with a file that has more parts."""

    def file(self, left_out: tuple[str, ...] = ()) -> File:
        """The whole file."""
        return {**super().file(left_out), **_sound_file()}


SOUNDING = _TinySounding(
    "ltx2", _model, _publish, {"gemma3_12b": (_gemma, texts.under("model."))}, vaes.CASES["ltx2"].make, published.ltx
)


def _pipeline(whole: Whole, cls: type) -> Any:
    vae = whole.module(Role.VAE)
    return cls(
        scheduler=FlowMatchEulerDiscreteScheduler(**scheduler_facts(TRANSFORMERS["ltx2"]).settings),
        vae=vae,
        audio_vae=vae.sound.vae,
        text_encoder=whole.module(Role.TEXT_ENCODER),
        tokenizer=for_transformers("gemma"),
        connectors=whole.module(Role.TEXT_ENCODER_2),
        transformer=whole.module(Role.DIFFUSION_MODEL),
        vocoder=vae.sound.vocoder,
    )


def _noises(whole: Whole) -> tuple[Tensor, Tensor]:
    """The noise that a run starts from: of frames, and of audio."""
    width, height = whole.sides
    own = latent_shape(width, height, whole.frames, whole.opened.latent)
    more = sound_cells(SOUND, whole.frames, FRAME_RATE, own[0] * own[2] * own[3])
    noise = ImageNoise(SEED).draw((1, own[0], own[1] + more, *own[2:]))
    return SoundTrack(SOUND, own[1], sound_length(SOUND, whole.frames, FRAME_RATE)).parted(noise)


def _run(whole: Whole, output: str, cls: type = diffusers.LTX2Pipeline, **call: Any) -> tuple[Any, Any]:
    """Frames and audio that the pipeline makes of the same noise."""
    pipeline, (video, audio) = _pipeline(whole, cls), _noises(whole)
    pipeline.tokenizer_padding_side = "left"  # one of them reads it before it is set
    vae = pipeline.audio_vae
    width, height = whole.sides
    given = {
        "prompt": PROMPT, "negative_prompt": NEGATIVE, "height": height, "width": width, "num_frames": whole.frames,
        "frame_rate": FRAME_RATE, "num_inference_steps": STEPS, "stg_scale": 0.0, "audio_stg_scale": 0.0,
        "modality_scale": 1.0, "audio_modality_scale": 1.0, "latents": pipeline._pack_latents(video),
        "audio_latents": audio * vae.latents_std + vae.latents_mean, "output_type": output, "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        found: tuple[Any, Any] = pipeline(**{**given, **call})
    return found


def _assert_same_latents(whole: Whole, latent: Latent, theirs: tuple[Tensor, Tensor], tolerance: float = 2e-5) -> None:
    """The tolerance is relative to the deviation: processors round differently (1.2e-5 at most, in one of 4,480)."""
    vae, (frames, sound) = whole.module(Role.VAE), theirs
    assert latent.sound_LA is not None
    own = torch.from_numpy(latent.samples_CHW)[None] * vae.latents_std.view(1, -1, 1, 1, 1)
    own += vae.latents_mean.view(1, -1, 1, 1, 1)
    torch.testing.assert_close(own, frames, rtol=1e-4, atol=tolerance * float(frames.std()))
    own_sound = torch.from_numpy(latent.sound_LA)[None] * vae.sound.vae.latents_std + vae.sound.vae.latents_mean
    own_sound = own_sound.unflatten(2, (8, -1)).transpose(1, 2)
    torch.testing.assert_close(own_sound, sound, rtol=1e-4, atol=tolerance * float(sound.std()))


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    found: Tensor = _run(whole, "latent")[0]
    return found


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"ltx2": ("transformer_blocks.0.attn1.to_q", "diffusion_model.{}")}
#: the first test compares texts and latents
CASES = {"ltx2": Compared(SOUNDING, diffusers.LTX2Pipeline, _latent, lambda *_: {}, LORAS["ltx2"])}


def test_frames_and_audio_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """From the words of a prompt on: texts, latents, frames and samples."""
    whole = Whole(tmp_path, SOUNDING)
    latent = whole.latent(whole.texts())
    made = whole.run(DecodeParams(whole.model, OutputShape(*whole.sides, whole.frames, FRAME_RATE)), latent)
    vae = whole.module(Role.VAE)
    theirs, their_sound = _run(whole, "latent")
    _assert_same_latents(whole, latent, (theirs, their_sound))
    with torch.no_grad():
        decoded = vae.decode(theirs).sample
        samples = vae.sound.vocoder(vae.sound.vae.decode(their_sound).sample)
    frames = VideoProcessor().postprocess_video(decoded, output_type="np")
    assert isinstance(made, VideoFrames)
    assert made.sound is not None
    # rounded to whole numbers
    assert np.abs(made.frames_THWC / 255 - frames[0]).max() <= 0.5 / 255 + 1e-5
    assert float(samples.abs().max()) < 1.0
    assert float(samples.std()) > 0.01
    np.testing.assert_allclose(made.sound.samples_SC, samples[0].T, atol=1e-5)
    assert made.sound.samples_per_second == 24000
    whole.engine.close()


def test_previews_show_a_frame_and_no_audio(tmp_path: Path) -> None:
    """Of the small frames of this model, most of the latent that is sampled is audio."""
    whole, shown = Whole(tmp_path, SOUNDING), list[Any]()
    hooks = replace(QUIET, preview=lambda latents: shown.append(latents()[0]))
    latent = whole.latent(whole.texts()[:1], steps=1, hooks=hooks)
    np.testing.assert_allclose(shown[-1], latent.samples_CHW[:, latent.samples_CHW.shape[1] // 2], atol=1e-5)
    whole.engine.close()


def _tones(seconds: float, rate: int = 44100) -> AudioSamples:
    """A falling and a rising tone with some noise."""
    times = np.arange(int(seconds * rate)) / rate
    tones = [np.sin(2 * np.pi * (500 - 900 * times) * times), np.sin(2 * np.pi * (700 + 1300 * times) * times)]
    noise = np.random.default_rng(3).normal(0, 0.05, (len(times), 2))
    return AudioSamples((0.4 * np.stack(tones, 1) + noise).astype(np.float32), rate)


@pytest.mark.parametrize("guided", [True, False])
def test_frames_that_follow_given_audio_are_those_of_a_pipeline_that_keeps_it(tmp_path: Path, guided: bool) -> None:
    """The audio has noise level 0 in all steps, also where frames read it, as in the pipeline of Lightricks. It is the
    audio of the result, and the one that is heard."""
    whole = Whole(tmp_path, SOUNDING)
    length = sound_length(SOUND, whole.frames, FRAME_RATE)
    given = whole.run(EncodeImageParams(whole.model, 0, 0, sound=length), _tones(1.0))
    assert isinstance(given, Latent)
    assert given.sound_LA is not None
    assert given.sound_LA.shape == (length, 128)
    texts = whole.texts()[: 1 + guided]
    plain = whole.sampling(len(texts))
    work = replace(plain, conditions=(KeptSoundCondition(),))
    latent = whole.run(work, *texts, given)
    assert isinstance(latent, Latent)
    np.testing.assert_array_equal(latent.sound_LA, given.sound_LA)

    own, vae = whole.module(Role.DIFFUSION_MODEL), whole.module(Role.VAE).sound.vae
    forward = type(own).forward

    def keeping(self: Any, **call: Any) -> Any:
        silent = torch.zeros_like(call["sigma"])
        frames, sound = forward(self, **{**call, "audio_timestep": silent, "audio_sigma": silent})
        return frames, torch.zeros_like(sound)

    sound = torch.from_numpy(given.sound_LA)[None] * vae.latents_std + vae.latents_mean
    without = {} if guided else {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}
    with mock.patch.object(type(own), "forward", keeping):
        theirs = _run(whole, "latent", audio_latents=sound, **without)
    _assert_same_latents(whole, latent, theirs)
    other = whole.run(plain, *texts)
    assert isinstance(other, Latent)
    assert not np.allclose(other.samples_CHW, latent.samples_CHW, atol=1e-3), "frames follow the audio"

    made = whole.run(DecodeParams(whole.model, OutputShape(*whole.sides, whole.frames, FRAME_RATE)), latent)
    with torch.no_grad():
        decoded = vae.decode(sound.unflatten(2, (8, -1)).transpose(1, 2)).sample
        samples = whole.module(Role.VAE).sound.vocoder(decoded)
    assert isinstance(made, VideoFrames)
    assert made.sound is not None
    np.testing.assert_allclose(made.sound.samples_SC, samples[0].T, atol=1e-5)
    whole.engine.close()


@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_audio_with_a_given_voice_is_that_of_id_lora(tmp_path: Path, scale: float) -> None:
    """Its positions lead the audio, end one position before it, and have no noise. Guidance adds the difference of the
    clean audio with and without it; frames have none of it."""
    whole, length = Whole(tmp_path, SOUNDING), 7
    given = whole.run(EncodeImageParams(whole.model, 0, 0, sound=length), _tones(0.25))
    assert isinstance(given, Latent)
    assert given.sound_LA is not None
    texts = whole.texts()[:1] if scale else whole.texts()
    work = replace(whole.sampling(len(texts)), conditions=(VoiceCondition(length, scale),))
    latent = whole.run(work, *texts, given)
    assert isinstance(latent, Latent)
    own, voice_1RA = whole.module(Role.DIFFUSION_MODEL), torch.from_numpy(given.sound_LA)[None]
    forward = type(own).forward

    def with_voice(self: Any, **call: Any) -> Any:
        sound, level = call["audio_hidden_states"], call["timestep"]
        batch, positions = sound.shape[:2]
        # seconds of a position of four spectra, of which the first begins before the audio: 0 to 0.01, to 0.05, ...
        # (in this order: a rotation multiplies what the last bit of a place differs by)
        ends = (torch.arange(max(positions, length)) * 4.0 + 1) * 160 / 16000
        bounds = torch.stack((torch.cat((torch.zeros(1), ends[:-1])), ends), dim=-1)
        before = bounds[:length] - bounds[length - 1, 1] - 0.04
        places = torch.cat((before, bounds[:positions])).expand(batch, 1, -1, -1)
        steps = torch.cat((torch.zeros(batch, length), level.view(-1, 1).expand(batch, positions)), dim=1)
        read = torch.cat((voice_1RA.expand(batch, -1, -1), sound), dim=1)
        more = {"audio_hidden_states": read, "audio_timestep": steps, "audio_coords": places, "audio_sigma": level}
        frames, found = forward(self, **{**call, **more})
        found = found[:, length:]
        return frames, found + scale * (found - forward(self, **call)[1]) if scale else found

    without = {"guidance_scale": 1.0, "audio_guidance_scale": 1.0} if scale else {}
    with mock.patch.object(type(own), "forward", with_voice):
        theirs = _run(whole, "latent", **without)
    _assert_same_latents(whole, latent, theirs)
    plain = whole.run(whole.sampling(len(texts)), *texts)
    assert isinstance(plain, Latent)
    assert plain.sound_LA is not None
    assert latent.sound_LA is not None
    assert not np.allclose(plain.sound_LA, latent.sound_LA, atol=1e-3), "the voice acts"
    whole.engine.close()


@pytest.mark.parametrize("guided", [True, False])
def test_frames_and_audio_apart_are_the_modality_guidance_of_the_pipeline(tmp_path: Path, guided: bool) -> None:
    whole = Whole(tmp_path, SOUNDING)
    options = RunOptions(isolation=Isolation(3.0, 2.0))
    latent = whole.latent(whole.texts()[: 1 + guided], options=options)
    without = {} if guided else {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}
    theirs = _run(whole, "latent", modality_scale=3.0, audio_modality_scale=2.0, **without)
    _assert_same_latents(whole, latent, theirs)
    whole.engine.close()


def test_a_video_from_an_image_is_that_of_the_pipeline(tmp_path: Path) -> None:
    """Without guidance, which the pipeline scales by a prediction for the frame that it keeps as well."""
    whole = Whole(tmp_path, SOUNDING)
    width, height = whole.sides
    pixels = np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)
    first = whole.run(EncodeImageParams(whole.model, width, height), ImagePixels(pixels))
    assert isinstance(first, Latent)
    latent = whole.latent(whole.texts()[:1], beginning=first)
    video, _ = _noises(whole)
    drawn = {video.shape: video}
    with mock.patch.object(
        pipeline_ltx2_image2video, "randn_tensor", side_effect=lambda shape, **_: drawn.get(shape, torch.zeros(shape))
    ):
        theirs, their_sound = _run(
            whole, "latent", diffusers.LTX2ImageToVideoPipeline, image=Image.fromarray(pixels), image_crf=0,
            latents=None, guidance_scale=1.0, audio_guidance_scale=1.0,
        )  # fmt: skip
    _assert_same_latents(whole, latent, (theirs, their_sound))
    whole.engine.close()


#: frame and strength of images, and whether texts guide, too
GUIDES: dict[str, tuple[bool, tuple[tuple[int, float], ...]]] = {
    "a first frame in part": (False, ((0, 0.6),)),
    "a frame at the end": (False, ((9, 1.0),)),
    "three frames, guided by a text": (True, ((0, 0.8), (1, 0.7), (9, 1.0))),
}


def test_videos_that_images_guide_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """With guidance by a text, guided cells of both have the predictions of the model in the scale of the others."""
    whole = Whole(tmp_path, SOUNDING)
    width, height = whole.sides
    random = np.random.default_rng(7)
    images = [random.integers(0, 256, (height, width, 3), np.uint8) for _ in range(3)]
    encoded = [whole.run(EncodeImageParams(whole.model, width, height), ImagePixels(each)) for each in images]
    texts = whole.texts()

    def check(guided: bool, guides: tuple[tuple[int, float], ...]) -> None:
        leading, frames, read = sum(frame > 0 for frame, _ in guides), 17, texts[: 1 + guided]
        plain = whole.sampling(len(read))
        shape, conditions = replace(plain.shape, frames=frames, leading=leading), [GuideCondition(*g) for g in guides]
        work = replace(plain, shape=shape, conditions=tuple(conditions))
        latent = whole.run(work, *read, *encoded[: len(guides)])
        assert isinstance(latent, Latent)
        theirs = _guided(whole, guided, guides, images, latent.samples_CHW.shape, frames)
        _assert_same_latents(whole, latent, theirs)

    for guided, guides in GUIDES.values():
        check(guided, guides)
    whole.engine.close()


def _guided(
    whole: Whole, guided: bool, guides: Any, images: Sequence[Any], made: tuple[int, ...], frames: int
) -> tuple[Tensor, Tensor]:
    """What the pipeline makes of the same noise, with the levels of the pool, which do not depend on images."""
    channels, cells, high, wide = made
    leading = sum(frame > 0 for frame, _ in guides)
    more = sound_cells(SOUND, frames, FRAME_RATE, channels * high * wide)
    noise = ImageNoise(SEED).draw((1, channels, leading + cells + more, high, wide))
    video, sound = SoundTrack(SOUND, leading + cells, sound_length(SOUND, frames, FRAME_RATE)).parted(noise)
    ordered = torch.cat((video[:, :, leading:], video[:, :, :leading]), dim=2).flatten(2).transpose(1, 2)
    drawn = {ordered.shape: ordered, sound.shape: sound}
    tokens, shift = cells * high * wide, pipeline_ltx2_condition.calculate_shift
    conditions = [
        LTX2VideoCondition(Image.fromarray(image), 0 if not frame else 1 + (frame - 1) // 8, strength, 0)
        for image, (frame, strength) in zip(images, guides, strict=False)
    ]
    without = {} if guided else {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}
    with (
        mock.patch.object(pipeline_ltx2_condition, "randn_tensor", side_effect=lambda shape, **_: drawn[shape]),
        mock.patch.object(pipeline_ltx2_condition, "calculate_shift", lambda _, *sizes: shift(tokens, *sizes)),
    ):
        return _run(
            whole, "latent", diffusers.LTX2ConditionPipeline, conditions=conditions, num_frames=frames, latents=None,
            audio_latents=None, noise_scale=1.0, **without,
        )  # fmt: skip


#: strength, and width and height of the video over those of the frames
FRAMES_THAT_GUIDE: dict[str, tuple[bool, float, int]] = {
    "frames of the size of the video": (False, 1.0, 1),
    "frames in part, guided by a text": (True, 0.7, 1),
    "frames of half the size": (False, 0.8, 2),
}


def test_videos_that_frames_guide_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """Next to a first frame; frames of a lower resolution are at the places of the cells that they cover."""
    whole = Whole(tmp_path, SOUNDING)
    width, height, frames = 128, 64, 17
    random = np.random.default_rng(7)
    image = random.integers(0, 256, (height, width, 3), np.uint8)
    first = whole.run(EncodeImageParams(whole.model, width, height), ImagePixels(image))
    texts = whole.texts()

    def check(guided: bool, strength: float, factor: int) -> None:
        video = random.integers(0, 256, (9, height // factor, width // factor, 3), np.uint8)
        encode = EncodeImageParams(whole.model, width // factor, height // factor, video=FirstFrames(9))
        guide = whole.run(encode, VideoFrames(video, FRAME_RATE))
        assert isinstance(guide, Latent)
        assert guide.samples_CHW.shape == (8, 2, height // 32 // factor, width // 32 // factor)
        plain = whole.sampling(1 + guided)
        conditions = GuideCondition(0, 1.0), GuideCondition(0, strength, 2, factor if factor > 1 else 0)
        shape = replace(plain.shape, width=width, height=height, frames=frames, leading=2)
        latent = whole.run(replace(plain, shape=shape, conditions=conditions), *texts[: 1 + guided], first, guide)
        assert isinstance(latent, Latent)
        theirs = _in_context(whole, guided, image, (video, strength, factor), latent.samples_CHW.shape, frames)
        _assert_same_latents(whole, latent, theirs)

    for guided, strength, factor in FRAMES_THAT_GUIDE.values():
        check(guided, strength, factor)
    whole.engine.close()


def _in_context(
    whole: Whole, guided: bool, image: Any, reference: tuple[Any, float, int], made: tuple[int, ...], frames: int
) -> tuple[Tensor, Tensor]:
    """What the pipeline makes of the same noise."""
    channels, cells, high, wide = made
    video_THWC, strength, factor = reference
    leading = 1 + (len(video_THWC) - 1) // 8
    more = sound_cells(SOUND, frames, FRAME_RATE, channels * high * wide)
    noise = ImageNoise(SEED).draw((1, channels, leading + cells + more, high, wide))
    video, sound = SoundTrack(SOUND, leading + cells, sound_length(SOUND, frames, FRAME_RATE)).parted(noise)
    parts = video[:, :, leading:], video[:, :, :leading, ::factor, ::factor]
    ordered = torch.cat([part.flatten(2).transpose(1, 2) for part in parts], dim=1)
    drawn = {ordered.shape: ordered, sound.shape: sound}
    tokens, shift = cells * high * wide, pipeline_ltx2_ic_lora.calculate_shift
    without = {} if guided else {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}
    references = [
        pipeline_ltx2_ic_lora.LTX2ReferenceCondition([Image.fromarray(each) for each in video_THWC], strength)
    ]
    with (
        mock.patch.object(pipeline_ltx2_ic_lora, "randn_tensor", side_effect=lambda shape, **_: drawn[shape]),
        mock.patch.object(pipeline_ltx2_ic_lora, "calculate_shift", lambda _, *sizes: shift(tokens, *sizes)),
    ):
        return _run(
            whole, "latent", pipeline_ltx2_ic_lora.LTX2InContextPipeline, width=wide * 32, height=high * 32,
            conditions=[LTX2VideoCondition(Image.fromarray(image), 0, 1.0, 0)], reference_conditions=references,
            reference_downscale_factor=factor, num_frames=frames, latents=None, audio_latents=None, noise_scale=1.0,
            **without,
        )  # fmt: skip


def test_a_run_continues_from_frames_and_audio(tmp_path: Path) -> None:
    """A run of one step that keeps its noise, and one of the others: the latents of the whole run."""
    whole = Whole(tmp_path, SOUNDING)
    texts = whole.texts()
    whole_run = whole.latent(texts)
    plain = whole.sampling(len(texts))
    first = whole.run(replace(plain, part=StepPart(1, keeps_noise=True)), *texts)
    schedule = replace(plain.schedule, first_step=1)
    rest = replace(plain, schedule=schedule, conditions=(StartCondition(),), part=StepPart(adds_noise=False))
    second = whole.run(rest, *texts, first)
    assert isinstance(second, Latent)
    assert second.sound_LA is not None
    assert whole_run.sound_LA is not None
    np.testing.assert_allclose(second.samples_CHW, whole_run.samples_CHW, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(second.sound_LA, whole_run.sound_LA, rtol=1e-4, atol=1e-4)
    whole.engine.close()


def test_audio_has_the_guidance_that_an_option_sets(tmp_path: Path) -> None:
    whole = Whole(tmp_path, SOUNDING)
    latent = whole.latent(whole.texts(), options=RunOptions(sound=SoundScale(2.0, 0.0)))
    theirs = _run(whole, "latent", audio_guidance_scale=2.0, guidance_rescale=0.0, audio_guidance_rescale=0.0)
    _assert_same_latents(whole, latent, theirs)
    whole.engine.close()


def test_both_namings_are_one_model_and_the_published_is_that_of_diffusers() -> None:
    CASES["ltx2"].check_namings()
    state = seeded(_model, 1).state_dict()
    assert convert_ltx2_transformer_to_diffusers(dict(_publish(state))).keys() == state.keys()
    state = seeded(_audio_vae, 4).state_dict()
    assert convert_ltx2_audio_vae_to_diffusers(_published_audio_vae(state)).keys() == state.keys()


def test_files_and_folders_are_the_same_model(tmp_path: Path) -> None:
    CASES["ltx2"].check_files(tmp_path)


def test_a_lora_gives_what_the_merged_file_gives(tmp_path: Path) -> None:
    CASES["ltx2"].check_lora(tmp_path)


def test_the_next_version_is_recognised_and_does_not_run() -> None:
    """It has gates in its attention."""
    with torch.device("meta"):
        state = _model(gated_attn=True, audio_gated_attn=True).state_dict()
    for file in (state, _publish(state)):
        found = recognise_diffusion({key: tuple(value.shape) for key, value in file.items()})
        assert found is not None
        assert found.name == "ltx23"


def test_audio_is_behind_the_frames_and_found_there() -> None:
    for frames, rate, (channels, height, width) in (
        (9, 12.0, (8, 2, 3)),
        (121, 24.0, (128, 16, 24)),
        (1, 60.0, (128, 1, 1)),
        (33, 29.97, (128, 3, 5)),
    ):
        numbers = channels * height * width
        cells, length = 1 + (frames - 1) // 8, sound_length(SOUND, frames, rate)
        total = cells + sound_cells(SOUND, frames, rate, numbers)
        assert cells_of_frames(SOUND, total, numbers, 8, float(torch.tensor(rate, dtype=torch.float32))) == cells
        x = torch.randn(2, channels, total, height, width, generator=torch.Generator().manual_seed(0))
        track = SoundTrack(SOUND, cells, length)
        video, sound = track.parted(x)
        assert sound.shape == (2, length, SOUND.width)
        assert torch.equal(joined(video, sound, track.rest(x)), x)


def test_audio_is_not_guided_where_frames_are_not() -> None:
    facts = TRANSFORMERS["ltx2"].sampling
    shape = OutputShape(96, 64, 9, FRAME_RATE)
    cond, uncond = torch.randn(2, 1, 8, 2 + 51, 2, 3, generator=torch.Generator().manual_seed(1)).unbind()
    for cfg in (1.0, 4.0):
        work = SampleParams("tiny", (), shape, SamplingSchedule(1, "euler", "normal"), GuidanceParams(cfg), SEED)
        text = Condition(torch.zeros(1, 1, 1))
        guider = guider_of(facts, work, text, tuple(cond.shape), torch.device("cpu"), GuidanceMemory())
        guided = guider.combine_clean(cond, Predictions(cond, uncond), 1.0)
        track = SoundTrack.of(facts.video, 9, FRAME_RATE)
        assert track is not None
        for one, plain in zip(track.parted(guided), track.parted(cond), strict=True):
            assert torch.allclose(one, plain, atol=1e-5) == (cfg == 1)


@pytest.mark.parametrize("options", [{}, {"isolation": True}])
@pytest.mark.counted
def test_requests_make_videos_with_sound_and_stages_need_what_was_estimated(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    sim.install()
    sim.configure(0, 1 << 30)
    sim.recover(0)
    save_file(SOUNDING.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, SOUNDING)
    model = TinyModel.of_folder(tmp_path, device="sim")
    made = model.made(width=96, height=64, steps=1, frames=9, options=options)
    (latent,) = made.of(SampleParams)
    (video,) = made.of(DecodeParams)
    model.close()
    assert isinstance(latent, Latent)
    assert isinstance(video, VideoFrames)
    assert latent.sound_LA is not None
    assert video.sound is not None
    length = sound_length(SOUND, 9, 24.0)
    assert (latent.samples_CHW.shape, latent.sound_LA.shape) == ((8, 2, 2, 3), (length, 128))
    assert (video.frames_THWC.shape, video.sound.samples_SC.shape) == ((9, 64, 96, 3), ((4 * length - 3) * 240, 2))
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if task.stage is not Stage.ENCODE:
            assert 0.9 * task.activation_bytes <= cost.working_bytes <= task.activation_bytes, task.stage


def test_a_file_without_what_decodes_audio_makes_silent_videos(tmp_path: Path) -> None:
    file = {key: x for key, x in SOUNDING.file().items() if not key.startswith(("audio_vae.", "vocoder."))}
    save_file(file, tmp_path / "tiny.safetensors")
    whole = Whole(tmp_path, SOUNDING, write=False)
    write_tokenizers(tmp_path, SOUNDING)
    made = whole.run(
        DecodeParams(whole.model, OutputShape(96, 64, 9, FRAME_RATE)),
        Latent(np.zeros((8, 2, 2, 3), np.float32), np.zeros((19, 128), np.float32)),
    )
    assert isinstance(made, VideoFrames)
    assert made.sound is None
    whole.engine.close()


def test_published_sizes_are_read_from_shapes() -> None:
    """The arguments of every part, without a configuration."""
    with torch.device("meta"):
        model = diffusers.LTX2VideoTransformer3DModel(num_layers=1, rope_type="split")
        connectors = LTX2TextConnectors(rope_type="split")
        audio_vae, vocoder = diffusers.AutoencoderKLLTX2Audio(), LTX2Vocoder()
        ratios = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
        vae = diffusers.AutoencoderKLLTX2Video(decoder_causal=False, **ratios)
    plan = plan_diffusion_model(_shapes(_publish(model.state_dict())))
    assert_has(model.config, plan.config)
    assert_has(vae.config, plan_vae(_shapes(published.ltx(vae.state_dict()))).config)
    found, _ = plan_connectors(_shapes(_published_connectors(connectors.state_dict())))
    assert_has(connectors.config, _own(found))
    file = {**_published_audio_vae(audio_vae.state_dict()), **_published_vocoder(vocoder.state_dict())}
    sound, key_map = plan_sound(_shapes(file), {})
    assert not key_map.unused
    assert_has(audio_vae.config, _own(sound.vae))
    assert_has(vocoder.config, _own(sound.vocoder))


def _shapes(file: State) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in file.items()}


def _own(module: Any) -> dict[str, Any]:
    return {name: value for name, value in module.config.items() if name[0] != "_"}


def assert_has(config: Any, arguments: dict[str, Any]) -> None:
    """A configuration has all of the arguments."""
    as_lists = {name: (config[name], value) for name, value in arguments.items()}
    differing = {
        name: pair
        for name, pair in as_lists.items()
        if not (list(pair[0]) == list(pair[1]) if isinstance(pair[1], list | tuple) else pair[0] == pair[1])
    }
    assert not differing


def test_the_text_encoder_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    """As it is published: the checkpoint has everything else."""
    save_file(SOUNDING.file(("gemma3_12b",)), tmp_path / "checkpoint.safetensors")
    make, file = SOUNDING.encoders["gemma3_12b"]
    save_file({key: x.contiguous().clone() for key, x in file(make()).items()}, tmp_path / "gemma.safetensors")
    assembly = Assembly(
        "tiny", str(tmp_path / "checkpoint.safetensors"), text_encoders=(str(tmp_path / "gemma.safetensors"),)
    )
    save_file(SOUNDING.file(), tmp_path / "whole.safetensors")
    assert_same_model(open_checkpoint(tmp_path / "whole.safetensors"), open_checkpoint(assembly))
