"""ACE-Step 1.5: music with lyrics, a flow over latents of 25 cells a second. Torch-free.

The text encoder reads a caption, with facts about the music, and embeds the tokens of the lyrics. The model's condition
encoder, a folder of its own in diffusers, makes one context of both and of the latent of a reference audio, once for
each run; without such an audio, of silence. The model reads silence next to the noisy latent, too, and is guided
against a state that it has learned. Distilled ("turbo") models have equal tensors, and are not guided.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.other_layouts import ACE_STEP_15
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.inner_models import COMPANION, SILENCE

if TYPE_CHECKING:
    from torch import Tensor, nn

#: tensors of the condition encoder outside of its part of published files
_OUTSIDE = ("null_condition_emb", SILENCE)
_MODEL_PART, _ENCODER_PART = "decoder.", "encoder."
#: the same in both parts
_NAMES = (
    (".q_proj.", ".to_q."),
    (".k_proj.", ".to_k."),
    (".v_proj.", ".to_v."),
    (".o_proj.", ".to_out.0."),
    (".q_norm.", ".norm_q."),
    (".k_norm.", ".norm_k."),
)
_CONVOLUTIONS = (("proj_in.1.", "proj_in_conv."), ("proj_out.1.", "proj_out_conv."))
#: amplitude of clips: 1 dB below the largest
_PEAK = 10.0 ** (-1.0 / 20.0)
_RATE, _CELL_SAMPLES = 48000, 1920


def _attention(reader: fam.ShapeReader, layer: str, prefix: str = "") -> fam.Arguments:
    """The arguments that follow from the first layer of a stack."""
    head = reader.size(f"{layer}self_attn.norm_q.weight", 0, 1)
    return {
        f"{prefix}head_dim": head,
        f"{prefix}num_attention_heads": reader.size(f"{layer}self_attn.to_q.weight", 0) // head,
        f"{prefix}num_key_value_heads": reader.size(f"{layer}self_attn.to_k.weight", 0) // head,
        f"{prefix}intermediate_size": reader.size(f"{layer}mlp.gate_proj.weight", 0),
        f"{prefix}attention_bias": reader.has(f"{layer}self_attn.to_q.bias"),
    }


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.AceStepTransformer1DModel`, and of its condition encoder."""
    reader, own = fam.ShapeReader(shapes), f"{COMPANION}_"
    lyrics, timbre = f"{COMPANION}.lyric_encoder.", f"{COMPANION}.timbre_encoder."
    projector = f"{COMPANION}.text_projector.weight"
    silence = f"{COMPANION}.{SILENCE}"
    return {
        "hidden_size": found["hidden_size"],
        "in_channels": found["in_channels"],
        "patch_size": found["patch_size"],
        "num_hidden_layers": found["depth"],
        "audio_acoustic_hidden_dim": reader.size("proj_out_conv.weight", 1, 3),
        "encoder_hidden_size": reader.size("condition_embedder.weight", 1),
        **_attention(reader, "layers.0."),
        f"{own}hidden_size": reader.size(projector, 0),
        f"{own}text_hidden_dim": reader.size(projector, 1),
        f"{own}timbre_hidden_dim": reader.size(f"{timbre}embed_tokens.weight", 1),
        f"{own}num_lyric_encoder_hidden_layers": len(reader.numbers(f"{lyrics}layers.")),
        f"{own}num_timbre_encoder_hidden_layers": len(reader.numbers(f"{timbre}layers.")),
        f"{own}silence_cells": reader.size(silence, 1, 3) if reader.has(silence) else 0,
        **_attention(reader, f"{lyrics}layers.0.", own),
    }


def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters. What makes codes of an audio, and an audio of codes, is left out."""
    converted = {}
    for key, tensor in tensors.items():
        if key.startswith(_MODEL_PART):
            name = key.removeprefix(_MODEL_PART)
            for theirs, ours in _CONVOLUTIONS:
                name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        elif key.startswith(_ENCODER_PART):
            name = f"{COMPANION}.{key.removeprefix(_ENCODER_PART)}"
        elif key in _OUTSIDE:
            name = f"{COMPANION}.{key}"
        else:
            continue
        for theirs, ours in _NAMES:
            name = name.replace(theirs, ours)
        converted[name] = tensor
    return converted


def prepare(module: nn.Module, shape_CL: tuple[int, ...], kwargs: fam.ModelKwargs) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of the steps: the context of lyrics, silence and caption, and the latent of silence; and the
    context of the learned state, which is as long.

    "silence" is the latent of silence of a model without one in its file.
    """
    encoder: Any = module.get_submodule(COMPANION)
    context_BLD, null_1LD, source_1LC = encoder(
        kwargs["context"], kwargs["lyrics"], shape_CL[-1], silence_1LC=kwargs.get("silence")
    )
    source_BCL = source_1LC.transpose(1, 2).expand(len(context_BLD), -1, -1)
    others = {name: value for name, value in kwargs.items() if name not in ("context", "lyrics", "silence")}
    return {**others, "context": context_BLD, "source": source_BCL}, null_1LD.expand_as(context_BLD)


def forward(module: nn.Module, x_BCL: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise minus clean latent. Unprepared inputs, as in dry runs, are prepared first."""
    import torch

    if "lyrics" in kwargs:
        kwargs, _ = prepare(module, tuple(x_BCL.shape[1:]), kwargs)
    source_BCL = kwargs["source"]
    # all of the audio is generated
    told_BCL = torch.cat((source_BCL, torch.ones_like(source_BCL)), dim=1)
    level_B = level_B.to(x_BCL.dtype)
    return fam.sample_of(
        module(
            hidden_states=x_BCL.transpose(1, 2),
            timestep=level_B,
            timestep_r=level_B,
            encoder_hidden_states=kwargs["context"],
            context_latents=told_BCL.transpose(1, 2),
            return_dict=False,
        )
    ).transpose(1, 2)


def _without_part(base: str) -> str:
    return base.removeprefix(_MODEL_PART)


_SAMPLING = fam.SamplingFacts(
    fam.Prediction.FLOW,
    noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=3.0),
    reads=frozenset({"context", "lyrics"}),
    side_multiple=1,
    learned_negative=True,
    audio=fam.AudioFacts(
        seconds=60.0,
        samples_per_second=_RATE,
        cells=0,
        most_seconds=600.0,
        cell_samples=_CELL_SAMPLES,
        peak=_PEAK,
    ),
    defaults=fam.SamplingDefaults(
        steps=50, cfg=7.0, sampler="euler", schedule="simple", guidance=fam.Guidance.PROJECTED
    ),
    not_divided="the tokens of music are few",
)
FAMILIES = (
    fam.Family(
        name="ace_step_15",
        title="ACE-Step 1.5",
        detect=fam.Detection(ACE_STEP_15, fam.anything, "ACEStep15"),
        build=fam.ModelBuild(
            "AceStepTransformer1DModel",
            config,
            convert,
            forward,
            prepare=prepare,
            dtypes=fam.NO_FLOAT16,
            companion=COMPANION,
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "qwen3_06b",
                    1024,
                    "# Instruction\nFill the audio semantic mask based on the given conditions:\n\n# Caption\n{}"
                    "<|endoftext|>\n",
                    most_tokens=256,
                    padding=fam.Padding.DROPPED,
                ),
            ),
            lyrics=fam.Reading(
                "qwen3_06b",
                1024,
                "{}<|endoftext|>",
                most_tokens=2048,
                padding=fam.Padding.DROPPED,
                layers=(0,),
                has_weights=False,
            ),
        ),
        latent="ace_step_15",
        sampling=_SAMPLING,
        distilled=replace(
            _SAMPLING, defaults=fam.defaults_like(_SAMPLING, steps=8, cfg=1.0, guidance=fam.Guidance.NONE)
        ),
        size=(0, 0),
        sources="diffusers' AceStepPipeline; steps as its authors recommend for base and SFT models, 8 for turbo ones",
        folder=fam.DiffusersFolder(
            "AceStepPipeline",
            distilled_entries={"is_turbo": True, "model_version": "turbo"},
            scheduler_entries={"num_train_timesteps": 1, "shift": 1.0},
            own_levels=True,
        ),
        lora=fam.LoraNaming(
            (
                *fam.TRANSFORMER.rules,
                # trainers of its authors adapt the diffusion model alone: its name is a part of the file's
                fam.NameRule("base_model.model.", fam.NameSource.CHECKPOINT, transform=_without_part),
                fam.NameRule("", fam.NameSource.CHECKPOINT, transform=_without_part),
            )
        ),
    ),
)
