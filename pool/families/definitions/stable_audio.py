"""Stable Audio 1: audio of a fixed length, with start and length in seconds as a part of the text. Torch-free.

A separate model embeds the seconds (`pool.models.components.diffusion.audio_seconds`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.other_layouts import STABLE_AUDIO
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.inner_models import SECONDS
from modelpool.pool.files.formats.folder_header import PROJECTION

if TYPE_CHECKING:
    from torch import Tensor, nn

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


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """Return the arguments of `diffusers.StableAudioDiTModel`, and whether its norms have a bias."""
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


def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters. The table of rotary positions is computed, not loaded."""
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


def forward(module: nn.Module, x_BCL: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the velocity; `level_B` is the arc tangent of sigma, in units of a right angle.

    "seconds" is embedded, [B,2,D], or else the module's `SECONDS` embeds it. States of text padding are zeros.
    """
    import torch
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    context, mask, seconds_B2D = kwargs["context"], kwargs.get("context_mask"), kwargs["seconds"]
    if seconds_B2D.dim() == 2:
        seconds_B2D = seconds_states(module.get_submodule(SECONDS), *seconds_B2D.unbind(dim=1)).to(context.dtype)
    if mask is not None:
        context = context * mask.unsqueeze(-1).to(context.dtype)
    turning = fam.config_of(module).attention_head_dim // 2
    return fam.sample_of(
        module(
            x_BCL,
            level_B,
            encoder_hidden_states=torch.cat((context, seconds_B2D), dim=1),
            global_hidden_states=seconds_B2D.flatten(1).unsqueeze(1),
            # the additional position is the token for time and seconds
            rotary_embedding=get_1d_rotary_pos_embed(
                turning,
                # a number would make a table on the host, which each layer would copy to the device
                torch.arange(x_BCL.shape[2] + 1, device=x_BCL.device),
                use_real=True,
                repeat_interleave_real=False,
            ),
            return_dict=False,
        )
    )


def seconds_states(module: nn.Module, start_B: Tensor, total_B: Tensor) -> Tensor:
    """Return embedded starts and lengths of audio clips for the diffusion model: [B,2,D]."""
    import torch

    found = module(start_seconds=start_B, end_seconds=total_B)
    return torch.cat((found.seconds_start_hidden_states, found.seconds_end_hidden_states), dim=1)


FAMILIES = (
    fam.Family(
        name="stable_audio_1",
        title="Stable Audio 1",
        detect=fam.Detection(
            STABLE_AUDIO,
            fam.having(memory_tokens=None),
            "StableAudio",
            extra_prefixes=(
                "conditioner.conditioners.seconds_start.",
                "conditioner.conditioners.seconds_total.",
            ),
        ),
        build=fam.ModelBuild(
            "StableAudioDiTModel",
            config,
            convert,
            forward,
            seconds_model=SECONDS,
            lengths=frozenset({"sample_size"}),
            dtypes=fam.HALF_FIRST,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (fam.fixed_length("t5_base", 128, 768, is_masked=True, mask=fam.MaskMode.REAL),), set_name="stable_audio"
        ),
        latent="stable_audio",
        sampling=fam.SamplingFacts(
            fam.Prediction.VELOCITY,
            noise=fam.NoiseFacts(fam.NoiseKind.ANGLE, sigma_min=0.3, sigma_max=500.0),
            reads=frozenset({"context", "seconds", "context_mask"}),
            side_multiple=1,
            audio=fam.AudioFacts(seconds=47.55, samples_per_second=44100, cells=1024),
            defaults=fam.SamplingDefaults(
                steps=100,
                cfg=7.0,
                # the noise ends far above zero: the authors' sampler is stochastic, this is the same without noise
                sampler="dpmpp_2m",
                schedule="exponential",
                guidance=fam.Guidance.CLASSIFIER_FREE,
            ),
            not_divided="the tokens of sound are few",
        ),
        size=(0, 0),
        sources="diffusers' StableAudioPipeline and scripts/convert_stable_audio.py; ComfyUI's minimum sigma is "
        "0.03. Without a negative prompt the unconditional side reads zeros for text and seconds, in the context "
        "alone",
        folder=fam.DiffusersFolder("StableAudioPipeline", libraries={PROJECTION: "stable_audio"}),
        lora=fam.GENERIC,
    ),
)
