"""Ideogram 4: one stream of words and patches of Flux 2's autoencoder, guided by a second model that reads no text.
Torch-free.

The two models have equal names and sizes. The second is part of the module under the name `UNCONDITIONAL`: folders have
it in a folder of its own, and a model of separate files names it. A file of the first alone is guided by the negative
prompt like other models. Words are states of thirteen layers of Qwen 3 VL; the model reads the numbers of one place in
all layers next to each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.inner_models import UNCONDITIONAL
from modelpool.pool.families.parts.patches import patch_ids

if TYPE_CHECKING:
    from torch import Tensor, nn

#: layers of the text encoder that the model reads, the last one without the norm after it
_LAYERS = (1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 36)
_TOKENS = 2048
#: first position of patches in each coordinate, beyond the words
_FIRST_PATCH = 65536
#: patches of an image of 512 x 512 pixels, for which the levels are not shifted
_UNSHIFTED = 1024

_measure = fam.sizes(
    in_channels=fam.dim("input_proj.weight", 1),
    hidden_size=fam.dim("input_proj.weight", 0),
    depth=fam.count("layers."),
    has_unconditional=fam.has(f"{UNCONDITIONAL}.input_proj.weight"),
)
LAYOUT = fam.Layout(
    "Ideogram 4",
    (
        fam.published("embed_image_indicator.weight", "layers.0.attention.qkv.weight", measure=_measure),
        fam.diffusers("embed_image_indicator.weight", "layers.0.attention.to_q.weight", measure=_measure),
    ),
)

_QKV = re.compile(r"(?P<block>.*\.attention\.)qkv(?P<end>\..*)")
_OUT = re.compile(r"(?P<block>.*\.attention\.)o(?P<end>\..*)")


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters, of both models."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if joined := _QKV.fullmatch(key):
            for name, part in zip(("to_q", "to_k", "to_v"), tensor.chunk(3), strict=True):
                converted[f"{joined['block']}{name}{joined['end']}"] = part
        else:
            converted[_OUT.sub(r"\g<block>to_out.0\g<end>", key)] = tensor
    return converted


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.Ideogram4Transformer2DModel`, and whether there is a second model."""
    measured: dict[str, Any] = dict(found)
    head = shapes["layers.0.attention.norm_q.weight"][0]
    return {
        "in_channels": measured["in_channels"],
        "num_layers": measured["depth"],
        "attention_head_dim": head,
        "num_attention_heads": measured["hidden_size"] // head,
        "intermediate_size": shapes["layers.0.feed_forward.w1.weight"][0],
        "adaln_dim": shapes["adaln_proj.weight"][0],
        "llm_features_dim": shapes["llm_cond_proj.weight"][1],
        # 24, 20 and 20 of 256, as published
        "mrope_section": (head * 3 // 32, head * 5 // 64, head * 5 // 64),
        "has_unconditional": measured["has_unconditional"],
    }


def as_rows(x_BCHW: Tensor) -> Tensor:
    """Return the patches of a latent as rows, [B,N,C]. The latent has each channel of the VAE for the four cells of a
    patch; a row has the channels of the first cell, then of the next."""
    rows: Tensor = x_BCHW.unflatten(1, (-1, fam.PATCH)).transpose(1, 2).flatten(1, 2).flatten(2).transpose(1, 2)
    return rows


def as_latent(rows_BNC: Tensor, height: int, width: int) -> Tensor:
    """Return the latent of `height` times `width` patches: the inverse of `as_rows`."""
    cells = rows_BNC.transpose(1, 2).unflatten(1, (fam.PATCH, -1)).transpose(1, 2).flatten(1, 2)
    latent: Tensor = cells.unflatten(2, (height, width))
    return latent


def as_words(context_BLD: Tensor) -> Tensor:
    """Return states of all layers one after the other as the model reads them: layer after layer for each number."""
    words: Tensor = context_BLD.unflatten(-1, (len(_LAYERS), -1)).transpose(-1, -2).flatten(-2)
    return words


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Words come first and have one position in all coordinates."""
    import torch

    context = None if UNCONDITIONAL in kwargs else as_words(kwargs["context"])
    positions_BS3 = (patch_ids(x_BCHW, 1).long() + _FIRST_PATCH).expand(len(x_BCHW), -1, 3)
    segments_BS = None
    if context is not None:
        words_L = torch.arange(context.shape[1], device=x_BCHW.device)
        words_BL3 = words_L[None, :, None].expand(len(x_BCHW), -1, 3)
        positions_BS3 = torch.cat((words_BL3, positions_BS3), dim=1)
        if "context_mask" in kwargs:
            patches = positions_BS3.shape[1] - context.shape[1]
            segments_BS = torch.nn.functional.pad(kwargs["context_mask"].long(), (0, patches), value=1)
    rows_BNC = fam.sample_of(
        module(
            hidden_states=as_rows(x_BCHW),
            # rounded as the scheduler of the pipeline does: the embedding depends on the last bits of the time
            timestep=1.0 - level_B * fam.TIMESTEPS / fam.TIMESTEPS,
            encoder_hidden_states=context,
            position_ids=positions_BS3,
            segment_ids=segments_BS,
            return_dict=False,
        )
    )
    return -as_latent(rows_BNC, *x_BCHW.shape[-2:])


FAMILIES = (
    fam.Family(
        name="ideogram4",
        title="Ideogram 4",
        detect=fam.Detection(LAYOUT, fam.anything, "Ideogram4"),
        build=fam.ModelBuild(
            "Ideogram4Transformer2DModel",
            config,
            fam.LayoutNames("ideogram4", converter=convert),
            forward,
            unconditional=UNCONDITIONAL,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "qwen3vl_8b",
                    4096,
                    fam.QWEN3_CHAT,
                    most_tokens=_TOKENS,
                    is_masked=True,
                    layers=_LAYERS,
                    padding=fam.Padding.DROPPED,
                ),
            )
        ),
        latent="ideogram4",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift_by_size=fam.ShiftByRoot(_UNSHIFTED, 0.0, 1.0)),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=16,
            defaults=fam.SamplingDefaults(
                steps=48,
                cfg=7.0,
                sampler="euler",
                schedule="logit_normal",
                guidance=fam.Guidance.CLASSIFIER_FREE,
                last_cfg=3.0,
            ),
            not_divided="its mask tells which pairs of tokens see each other",
        ),
        size=(2048, 2048),
        sources="diffusers' Ideogram4Pipeline, of which the last 3 of 48 steps have a scale of 3; the presets of "
        "the original code for 20 and 12 steps have 2 and 1 of these",
        folder=fam.DiffusersFolder(
            "Ideogram4Pipeline",
            entries={"prompt_enhancer_head": fam.NOTHING},
            scheduler_entries={"shift": 1.0},
            shifts_by_size=False,
            own_levels=True,
        ),
        lora=fam.LoraNaming(
            (*fam.TRANSFORMER.rules, *fam.dotted(fam.NameSource.CHECKPOINT, "conditional_transformer."))
        ),
    ),
)
