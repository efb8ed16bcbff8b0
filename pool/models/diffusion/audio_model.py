"""Stable Audio: class arguments, key names in its file, and its call.

A separate model embeds start and length of the audio (`pool.models.diffusion.audio_seconds`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor, nn

from modelpool.pool.detection.layouts.shape_sizes import Config
from modelpool.pool.families.parts.forward import Arguments, ModelKwargs, Shapes, sample_of
from modelpool.pool.models.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.diffusion.audio_seconds import SECONDS, seconds_states
from modelpool.pool.models.diffusion.video_calls import config_of

#: width of a head. Source: the model_config.json of stabilityai/stable-audio-open-1.0
HEAD_WIDTH = 64
#: latents of audio that it was trained on: 47.55 seconds. Source: as above
SAMPLE_SIZE = 1024

_BLOCK = {
    "pre_norm.gamma": "norm1.weight",
    "pre_norm.beta": "norm1.bias",
    "cross_attend_norm.gamma": "norm2.weight",
    "cross_attend_norm.beta": "norm2.bias",
    "ff_norm.gamma": "norm3.weight",
    "ff_norm.beta": "norm3.bias",
    "self_attn.to_out.weight": "attn1.to_out.0.weight",
    "cross_attn.to_q.weight": "attn2.to_q.weight",
    "cross_attn.to_out.weight": "attn2.to_out.0.weight",
    "ff.ff.0.proj.weight": "ff.net.0.proj.weight",
    "ff.ff.0.proj.bias": "ff.net.0.proj.bias",
    "ff.ff.2.weight": "ff.net.2.weight",
    "ff.ff.2.bias": "ff.net.2.bias",
}
_CUT = {
    "self_attn.to_qkv.weight": ("attn1.to_q.weight", "attn1.to_k.weight", "attn1.to_v.weight"),
    "cross_attn.to_kv.weight": ("attn2.to_k.weight", "attn2.to_v.weight"),
}
_OUTER = (
    ("to_timestep_embed.", "timestep_proj."),
    ("to_global_embed.", "global_proj."),
    ("to_cond_embed.", "cross_attention_proj."),
    ("transformer.project_in.", "proj_in."),
    ("transformer.project_out.", "proj_out."),
    ("preprocess_conv.", "preprocess_conv."),
    ("postprocess_conv.", "postprocess_conv."),
)


class StableAudioDiTModel(diffusers.StableAudioDiTModel):  # type: ignore[misc]
    """diffusers' class, also for files whose norms have no bias; it is zero in the published ones.

    `norm_bias` is false for those; all else is unchanged.
    """

    @functools.wraps(diffusers.StableAudioDiTModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, norm_bias: bool = True, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        for block in self.transformer_blocks if not norm_bias else ():
            for norm in (block.norm1, block.norm2, block.norm3):
                norm.bias = None


def stable_audio_config(found: Config, shapes: Shapes) -> Arguments:
    """Return the arguments of `StableAudioDiTModel`."""
    sizes: dict[str, Any] = dict(found)
    width = sizes["hidden_size"]
    head = min(width, HEAD_WIDTH)
    return {
        "sample_size": SAMPLE_SIZE,
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": sizes["depth"],
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "num_key_value_attention_heads": shapes["transformer_blocks.0.attn2.to_k.weight"][0] // head,
        "cross_attention_dim": shapes["cross_attention_proj.0.weight"][0],
        "cross_attention_input_dim": shapes["cross_attention_proj.0.weight"][1],
        "time_proj_dim": shapes["timestep_proj.0.weight"][1],
        "global_states_input_dim": shapes["global_proj.0.weight"][1],
        "norm_bias": "transformer_blocks.0.norm1.bias" in shapes,
    }


def convert_stable_audio(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert Stable Audio 1. The table of rotary positions is computed, not loaded."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        found = re.fullmatch(r"transformer\.layers\.(\d+)\.(.+)", key)
        if found is not None:
            block, name = f"transformer_blocks.{found[1]}.", found[2]
            names = _CUT.get(name, (_BLOCK[name],) if name in _BLOCK else ())
            parts = tensor.chunk(len(names)) if len(names) > 1 else (tensor,)
            converted |= {block + ours: part for ours, part in zip(names, parts, strict=True) if names}
        elif key == "timestep_features.weight":
            converted["time_proj.weight"] = tensor.squeeze(1)
        else:
            for theirs, ours in _OUTER:
                if key.startswith(theirs):
                    converted[ours + key.removeprefix(theirs)] = tensor
    return converted


def call_stable_audio(module: nn.Module, x_BCL: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Stable Audio 1; `level_B` is the angle whose tangent is sigma, in units of a right angle.

    "seconds" is embedded, [B,2,D], or else the module's `SECONDS` embeds it. States of text padding are zeros.
    """
    context, mask, seconds_B2D = kwargs["context"], kwargs.get("context_mask"), kwargs["seconds"]
    if seconds_B2D.dim() == 2:
        embedding = module.get_submodule(SECONDS)
        seconds_B2D = seconds_states(embedding, *seconds_B2D.unbind(dim=1)).to(context.dtype)
    if mask is not None:
        context = context * mask.unsqueeze(-1).to(context.dtype)
    turning = config_of(module).attention_head_dim // 2
    return sample_of(
        module(
            x_BCL,
            level_B,
            encoder_hidden_states=torch.cat((context, seconds_B2D), dim=1),
            global_hidden_states=seconds_B2D.flatten(1).unsqueeze(1),
            # # the additional position is the token for time and seconds
            rotary_embedding=get_1d_rotary_pos_embed(
                turning, x_BCL.shape[2] + 1, use_real=True, repeat_interleave_real=False
            ),
            return_dict=False,
        )
    )


AUDIO_ROWS: Mapping[str, DiffusionArchitecture] = {
    "stable_audio_1": DiffusionArchitecture(
        StableAudioDiTModel, stable_audio_config, convert_stable_audio, call_stable_audio
    ),
}
