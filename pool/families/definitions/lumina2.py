"""Lumina 2: a flow guided by a negative prompt, in patches of the model itself. Torch-free."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.image_layouts import LUMINA_2
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import text_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

_TEMPLATE = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts. <Prompt Start> {}"
)
_TOKENS = 256
#: queries, keys and values, which are one tensor
_QUERIES = re.compile(r"\.attention\.qkv\.weight$")


def _cuts(shapes: fam.Shapes, key: str) -> tuple[int, ...]:
    """Queries have the width of the model; keys and values share the other rows."""
    rows, hidden = shapes[key][0], fam.width_of(shapes, "x_embedder.weight")
    return hidden, (hidden + rows) // 2, rows


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.Lumina2Transformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden = sizes["dim"]
    return {
        "in_channels": sizes["in_channels"],
        "hidden_size": hidden,
        "num_layers": sizes["n_layers"],
        "num_refiner_layers": len(fam.ShapeReader(shapes).numbers("noise_refiner.")),
        "num_attention_heads": sizes["n_heads"],
        "num_kv_heads": sizes["n_kv_heads"],
        "multiple_of": 1,
        "ffn_dim_multiplier": fam.ratio(shapes["layers.0.feed_forward.linear_1.weight"][0], 4 * hidden),
        "axes_dim_rope": (hidden // sizes["n_heads"] // 3,) * 3,
        "cap_feat_dim": sizes["cap_feat_dim"],
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Time and output of the module run from noise to image."""
    return -fam.sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=1 - level_B,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=text_mask(kwargs, "context"),
            return_dict=False,
        )
    )


FAMILIES = (
    fam.Family(
        name="lumina2",
        title="Lumina 2",
        detect=fam.Detection(LUMINA_2, fam.anything, "Lumina2"),
        build=fam.ModelBuild(
            "Lumina2Transformer2DModel",
            config,
            fam.LayoutNames("lumina2", cuts=fam.FixedCuts(_QUERIES, (2304, 3072, 3840), _cuts)),
            forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (
                # only the positive prompt gets the system prompt. ComfyUI leaves it to the user
                fam.Reading(
                    "gemma2_2b",
                    2304,
                    _TEMPLATE,
                    "{}",
                    least_tokens=_TOKENS,
                    most_tokens=_TOKENS,
                    is_masked=True,
                    mask=fam.MaskMode.REAL,
                    layers_left_out=1,
                    final_norm=False,
                ),
            )
        ),
        latent="flux",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=6.0),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=16,
            cfg_rescale=fam.CfgRescale.ROWS,
            defaults=fam.SamplingDefaults(
                steps=30, cfg=4.0, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.LUMINA_2,
        ),
        sources="diffusers' Lumina2Pipeline, which rescales each row of cells to its norm before guidance; "
        "Alpha-VLLM/Lumina-Image-2.0",
        folder=fam.DiffusersFolder("Lumina2Pipeline"),
        lora=fam.TRANSFORMER,
        options=fam.OptionFacts(
            teacache=(
                # the first of the two published versions
                fam.TeaCacheFacts((393.76566581, -603.50993606, 209.10239044, -23.00726601, 0.86377344), 0.2),
            ),
            skips_blocks=True,
        ),
    ),
)
