"""Ovis-Image: Flux with gated feed-forwards, guided by a negative prompt, without a pooled text. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelpool.pool.families.detection.layouts.flux_layouts import FLUX
from modelpool.pool.families.parts import flux_architecture as flux
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam

if TYPE_CHECKING:
    from torch import Tensor, nn

#: the instruction that the pipeline adds to a prompt, inside of the chat template of its tokenizer
_TEMPLATE = fam.QWEN3_WITHOUT_THINKING.replace(
    "{}",
    "Describe the image by detailing the color, quantity, text, shape, size, texture, spatial relationships of the "
    "objects and background: {}",
)
#: tokens of the template before the prompt
_BEFORE = 28
_TOKENS = 256


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.OvisImageTransformer2DModel`."""
    arguments, head = flux.block_arguments(found, shapes)
    return arguments | {
        "out_channels": shapes["proj_out.weight"][0],
        "axes_dims_rope": fam.rope_axes(head),
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Words have the positions of a diagonal."""
    return flux.call_with_text_positions(module, x_BCHW, level_B, kwargs, flux.diagonal_ids)


FAMILIES = (
    fam.Family(
        name="ovis_image",
        title="Ovis-Image",
        detect=fam.Detection(FLUX, fam.having(yak_mlp=True), "Flux"),
        build=fam.ModelBuild(
            "OvisImageTransformer2DModel",
            config,
            flux.names_of_diffusers("timestep_embedder"),
            forward,
            dtypes=fam.BFLOAT16_FIRST,
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "qwen3_2b",
                    2048,
                    _TEMPLATE,
                    dropped_tokens=_BEFORE,
                    least_tokens=_TOKENS + _BEFORE,
                    most_tokens=_TOKENS + _BEFORE,
                    is_masked=True,
                    padding=fam.Padding.ZEROED,
                    chat_template=fam.QWEN3_WITHOUT_THINKING,
                ),
            ),
            set_name="ovis",
        ),
        latent="flux",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift_by_size=fam.ShiftBySize((256, 4096), (0.5, 1.15))),
            reads=frozenset({"context"}),
            side_multiple=16,
            defaults=fam.SamplingDefaults(
                steps=50, cfg=5.0, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.LIKE_FLUX,
        ),
        sources="diffusers' OvisImagePipeline; AIDC-AI/Ovis-Image-7B",
        folder=fam.DiffusersFolder("OvisImagePipeline"),
        lora=fam.TRANSFORMER,
        options=fam.OptionFacts(moves_positions=True),
    ),
)
