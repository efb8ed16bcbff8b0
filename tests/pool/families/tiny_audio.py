"""A tiny Stable Audio as a whole file: diffusion model, what embeds seconds, autoencoder of audio, and T5 beside."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import diffusers
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from torch import Tensor

from tests.pool.families.tiny_transformers import T5_WORDS, WIDTH, File, TinyFamily, seeded
from tests.pool.models.components.diffusion import video_published as layouts
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published

#: of the tiny latents, and samples that one cell stands for
CHANNELS, CELL = 6, 8
_RENAMED = (
    ("start_number_conditioner.", "conditioner.conditioners.seconds_start."),
    ("end_number_conditioner.", "conditioner.conditioners.seconds_total."),
)


def _model() -> Any:
    return diffusers.StableAudioDiTModel(
        sample_size=1024, in_channels=CHANNELS, out_channels=CHANNELS, num_layers=2, attention_head_dim=64,
        num_attention_heads=1, num_key_value_attention_heads=1, cross_attention_dim=64, time_proj_dim=16,
        global_states_input_dim=2 * WIDTH, cross_attention_input_dim=WIDTH,
    )  # fmt: skip


def seconds_model() -> Any:
    return StableAudioProjectionModel(WIDTH, WIDTH, 0, 512)


def _vae() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*weight_norm.* is deprecated", category=FutureWarning)
        return diffusers.AutoencoderOobleck(
            encoder_hidden_size=4, downsampling_ratios=[2, 4], channel_multiples=[1, 2], decoder_channels=4,
            decoder_input_channels=CHANNELS,
        )  # fmt: skip


def _seconds_file(state: Mapping[str, Tensor]) -> File:
    file = {}
    for key, tensor in state.items():
        for ours, theirs in _RENAMED:
            key = key.replace(ours, theirs)
        file[key.replace("time_positional_embedding.", "embedder.embedding.")] = tensor
    return file


class TinyAudio(TinyFamily):
    """As the published file begins its keys."""

    def file(self, left_out: tuple[str, ...] = ()) -> File:
        own = super().file(left_out)
        renamed = {
            key.replace("model.diffusion_model.", "model.model.").replace("vae.", "pretransform.model."): value
            for key, value in own.items()
        }
        return renamed | _seconds_file(seeded(seconds_model, 3).state_dict())


STABLE_AUDIO = TinyAudio(
    "stable_audio_1",
    _model,
    layouts.stable_audio,
    {"t5_base": (lambda: texts.t5(words=T5_WORDS, gated=False), texts.t5_file)},
    _vae,
    published.oobleck,
)
