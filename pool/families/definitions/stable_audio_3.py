"""Stable Audio 3: audio of variable length, conditioned on its seconds, with the texts of T5Gemma. Torch-free.

A small model embeds the seconds (`pool.models.components.diffusion.audio_seconds`). Published files have the state of
text padding next to the model, folders in it. The distilled model and the base model have equal tensors; the facts are
from the distilled one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.other_layouts import STABLE_AUDIO
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.inner_models import DURATION, PADDING_KEY
from modelpool.pool.families.parts.patches import text_mask
from modelpool.pool.files.formats.folder_header import DURATION_FOLDER

if TYPE_CHECKING:
    from torch import Tensor, nn

#: the module's name of the state of text padding
PADDING = "prompt_padding_embedding"
#: maps of a differential attention: queries and keys of both, and the values
_MAPS = 5

_OUTER = (
    ("transformer.project_in.", "proj_in."),
    ("transformer.project_out.", "proj_out."),
    ("transformer.layers.", "transformer_blocks."),
    ("transformer.", ""),
)


def _has_memory(found: fam.Config) -> bool:
    return found.get("memory_tokens") is not None


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key == PADDING_KEY:
            converted[PADDING] = tensor
            continue
        name = next((new + key.removeprefix(old) for old, new in _OUTER if key.startswith(old)), key)
        name = re.sub(r"\.ff\.ff\.0\.proj\.", ".ff.proj_in.", name)
        name = re.sub(r"\.ff\.ff\.2\.", ".ff.proj_out.", name)
        converted[name] = _differential_last(tensor) if name.endswith(".self_attn.to_qkv.weight") else tensor
    return converted


def _differential_last(rows: Tensor) -> Tensor:
    """Return the rows of queries, keys and values of an attention as diffusers has them: both queries, both keys,
    values. In files, the second query and key are last."""
    import torch

    if rows.shape[0] != _MAPS * rows.shape[1]:
        return rows
    query, key, value, other_query, other_key = rows.chunk(_MAPS)
    return torch.cat((query, other_query, key, other_key, value))


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """Return the arguments of `diffusers.StableAudio3DiTModel`."""
    sizes: dict[str, Any] = dict(found)
    width, block = sizes["hidden_size"], "transformer_blocks.0."
    channels = shapes["preprocess_conv.weight"][0]
    return {
        "io_channels": channels,
        "patch_size": sizes["in_channels"] // channels,
        "embed_dim": width,
        "depth": sizes["depth"],
        "num_heads": width // shapes[f"{block}self_attn.q_norm.gamma"][0],
        "cond_token_dim": shapes["to_cond_embed.0.weight"][1],
        "global_cond_dim": shapes["to_global_embed.0.weight"][1],
        "local_add_cond_dim": shapes[f"{block}to_local_embed.0.weight"][1],
        "timestep_features_dim": shapes["to_timestep_embed.0.weight"][1],
        "ff_mult": fam.ratio(shapes[f"{block}ff.proj_out.weight"][1], width),
        "num_memory_tokens": sizes["memory_tokens"] or 0,
        "use_differential_attention": shapes[f"{block}self_attn.to_qkv.weight"][0] == _MAPS * width,
    }


def forward(module: nn.Module, x_BCL: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. The seconds are a word, and a state for all positions."""
    import torch

    context, mask = kwargs["context"], text_mask(kwargs, "context")
    state_BD = module.get_submodule(DURATION)(kwargs["seconds"][:, 1]).to(context.dtype)
    return fam.sample_of(
        module(
            x_BCL,
            level_B,
            encoder_hidden_states=torch.cat((context, state_BD.unsqueeze(1)), dim=1),
            global_hidden_states=state_BD,
            encoder_attention_mask=torch.nn.functional.pad(mask, (0, 1), value=True),
            return_dict=False,
        )
    )


FAMILIES = (
    fam.Family(
        name="stable_audio_3",
        title="Stable Audio 3",
        detect=fam.Detection(
            STABLE_AUDIO,
            _has_memory,
            "StableAudio3",
            extra_prefixes=("conditioner.conditioners.seconds_total.", PADDING_KEY),
        ),
        build=fam.ModelBuild(
            "StableAudio3DiTModel",
            config,
            convert,
            forward,
            seconds_model=DURATION,
            dtypes=fam.HALF_FIRST,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs((fam.fixed_length("t5gemma_b", 256, 768, is_masked=True, mask=fam.MaskMode.REAL),)),
        latent="stable_audio_3",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW),
            reads=frozenset({"context", "seconds", "context_mask"}),
            side_multiple=1,
            audio=fam.AudioFacts(seconds=384.0, samples_per_second=44100, cells=0),
            defaults=fam.SamplingDefaults(
                steps=8, cfg=1.0, sampler="lcm", schedule="log_snr", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            not_divided="the tokens of sound are few",
        ),
        size=(0, 0),
        sources="diffusers' StableAudio3Pipeline, for the distilled models; the base model needs 100 steps of "
        "Euler and a classifier-free scale",
        folder=fam.DiffusersFolder(
            "StableAudio3Pipeline",
            libraries={DURATION_FOLDER: "stable_audio_3"},
            scheduler_entries={"num_train_timesteps": 1, "stochastic_sampling": True},
        ),
        lora=fam.GENERIC,
    ),
)
