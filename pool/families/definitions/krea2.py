"""Krea 2: one stream of words and patches of Qwen-Image's latents, with states of twelve layers of Qwen 3 VL for each
word, which the model joins. Torch-free.

The pipeline counts guidance from 0: its scale is one less. Krea 2 Turbo has the same tensors. Folders tell it, files do
not: it is run with 8 steps, without guidance, and with its shift.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import packed, patch_ids, unpacked

if TYPE_CHECKING:
    from torch import Tensor, nn

#: layers of the text encoder that the model reads
_LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
#: tokens of a prompt with the end of the template, which longer prompts keep
_TOKENS, _AFTER = 512, 5
#: logarithm of the shift of Krea 2 Turbo
_TURBO_SHIFT = 1.15


def _sizes(first: str, blocks: str) -> Any:
    return fam.sizes(
        in_channels=fam.dim(f"{first}.weight", 1), hidden_size=fam.dim(f"{first}.weight", 0), depth=fam.count(blocks)
    )


LAYOUT = fam.Layout(
    "Krea 2",
    (
        fam.published("txtfusion.projector.weight", "first.weight", measure=_sizes("first", "blocks.")),
        fam.diffusers("text_fusion.projector.weight", "img_in.weight", measure=_sizes("img_in", "transformer_blocks.")),
    ),
)

#: beginnings of names, and modules of blocks, in the original and in diffusers
_OUTER = (
    ("first.", "img_in."),
    ("tmlp.0.", "time_embed.linear_1."),
    ("tmlp.2.", "time_embed.linear_2."),
    ("tproj.1.", "time_mod_proj."),
    ("txtmlp.0.scale", "txt_in.norm.weight"),
    ("txtmlp.1.", "txt_in.linear_1."),
    ("txtmlp.3.", "txt_in.linear_2."),
    ("txtfusion.", "text_fusion."),
    ("blocks.", "transformer_blocks."),
    ("last.linear.", "final_layer.linear."),
    ("last.norm.scale", "final_layer.norm.weight"),
    ("last.modulation.lin", "final_layer.scale_shift_table"),
)
_INNER = (
    (".attn.wq.", ".attn.to_q."),
    (".attn.wk.", ".attn.to_k."),
    (".attn.wv.", ".attn.to_v."),
    (".attn.wo.", ".attn.to_out.0."),
    (".attn.gate.", ".attn.to_gate."),
    (".attn.qknorm.qnorm.scale", ".attn.norm_q.weight"),
    (".attn.qknorm.knorm.scale", ".attn.norm_k.weight"),
    (".mlp.", ".ff."),
    (".prenorm.scale", ".norm1.weight"),
    (".postnorm.scale", ".norm2.weight"),
    (".mod.lin", ".scale_shift_table"),
)
_MODULATION = re.compile(r"transformer_blocks\.\d+\.scale_shift_table")
#: shifts, scales and gates of a block
_MODULATIONS = 6


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters; the modulations of a block are one row in files."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = next((new + key.removeprefix(old) for old, new in _OUTER if key.startswith(old)), key)
        for old, new in _INNER:
            name = name.replace(old, new)
        converted[name] = tensor.reshape(_MODULATIONS, -1) if _MODULATION.fullmatch(name) else tensor
    return converted


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.Krea2Transformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    block, words = "transformer_blocks.0.", "text_fusion.layerwise_blocks.0."
    head, word_head = (shapes[f"{place}attn.norm_q.weight"][0] for place in (block, words))
    reader = fam.ShapeReader(shapes)

    def heads(key: str, width: int) -> int:
        return shapes[key][0] // width

    def layers(name: str) -> int:
        return len(reader.numbers(f"text_fusion.{name}."))

    return {
        "in_channels": sizes["in_channels"],
        "num_layers": sizes["depth"],
        "attention_head_dim": head,
        "num_attention_heads": sizes["hidden_size"] // head,
        "num_key_value_heads": heads(f"{block}attn.to_k.weight", head),
        "intermediate_size": shapes[f"{block}ff.gate.weight"][0],
        "timestep_embed_dim": shapes["time_embed.linear_1.weight"][1],
        "text_hidden_dim": shapes["txt_in.linear_1.weight"][1],
        "num_text_layers": shapes["text_fusion.projector.weight"][1],
        "text_num_attention_heads": heads(f"{words}attn.to_q.weight", word_head),
        "text_num_key_value_heads": heads(f"{words}attn.to_k.weight", word_head),
        "text_intermediate_size": shapes[f"{words}ff.gate.weight"][0],
        "num_layerwise_text_blocks": layers("layerwise_blocks"),
        "num_refiner_text_blocks": layers("refiner_blocks"),
        "axes_dims_rope": fam.rope_quarters(head),
    }


def forward(module: nn.Module, x: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. A latent of one frame is accepted as an image. Words have no positions."""
    import torch
    from torch import nn

    image = x.squeeze(2) if x.dim() == 5 else x
    context = kwargs["context"].unflatten(-1, (fam.config_of(module).num_text_layers, -1))
    ids = nn.functional.pad(patch_ids(image, 2), (0, 0, context.shape[1], 0))
    mask = kwargs.get("context_mask")
    out_BND = fam.sample_of(
        module(
            hidden_states=packed(image),
            encoder_hidden_states=context,
            timestep=level_B,
            position_ids=ids,
            encoder_attention_mask=None if mask is None else mask.to(torch.bool),
            return_dict=False,
        )
    )
    return unpacked(out_BND, *image.shape[-2:]).reshape(x.shape)


_SAMPLING = fam.SamplingFacts(
    fam.Prediction.FLOW,
    noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift_by_size=fam.ShiftBySize((256, 6400), (0.5, 1.15))),
    reads=frozenset({"context", "context_mask"}),
    side_multiple=16,
    defaults=fam.SamplingDefaults(
        steps=28, cfg=5.5, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
    ),
    sequence=sequence_plans.KREA_2,
)
FAMILIES = (
    fam.Family(
        name="krea2",
        title="Krea 2",
        detect=fam.Detection(LAYOUT, fam.anything, "Krea2"),
        build=fam.ModelBuild(
            "Krea2Transformer2DModel",
            config,
            fam.LayoutNames("krea2", converter=convert),
            forward,
            dtypes=fam.BFLOAT16_FIRST,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "qwen3vl_4b",
                    2560,
                    fam.QWEN_IMAGE,
                    dropped_tokens=fam.QWEN_IMAGE_BEFORE,
                    most_tokens=_TOKENS + fam.QWEN_IMAGE_BEFORE,
                    kept_last=_AFTER,
                    is_masked=True,
                    layers=_LAYERS,
                    padding=fam.Padding.DROPPED,
                ),
            )
        ),
        latent="wan21",
        sampling=_SAMPLING,
        distilled=replace(
            _SAMPLING,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=math.exp(_TURBO_SHIFT)),
            defaults=fam.defaults_like(_SAMPLING, steps=8, cfg=1.0, guidance=fam.Guidance.NONE),
        ),
        sources="diffusers' Krea2Pipeline, whose scale of 4.5 is added to 1. ComfyUI has the shift of the turbo model",
        folder=fam.DiffusersFolder("Krea2Pipeline", vae_class="AutoencoderKLQwenImage"),
        lora=fam.TRANSFORMER,
    ),
)
