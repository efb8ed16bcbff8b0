"""LongCat-Image: Flux without a pooled text, with Qwen 2.5 VL as text encoder. Torch-free.

Prompts are not rewritten by the text encoder, as the pipeline of diffusers does unless `enable_prompt_rewrite` is off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelpool.pool.families.detection.layouts.flux_layouts import FLUX
from modelpool.pool.families.parts import flux_architecture as flux
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam

if TYPE_CHECKING:
    from torch import Tensor, nn

#: channels of its latents; Bria, which otherwise looks the same, has 4, and reads T5
_CHANNELS, _T5_WIDTH = 16, 4096
#: the template without its end, which no state of the prompt depends on
_TEMPLATE = (
    "<|im_start|>system\nAs an image captioning expert, generate a descriptive text prompt based on an image content, "
    "suitable for input to a text-to-image model.<|im_end|>\n<|im_start|>user\n{}"
)
#: tokens of the template before the prompt
_BEFORE = 36
#: tokens of a prompt, padding included; the positions of patches begin there
_TOKENS = 512


def is_longcat(found: fam.Config) -> bool:
    """Return whether a model with these sizes, which has Flux's layout, is LongCat-Image."""
    is_alike = fam.having(vec_in_dim=None, yak_mlp=False, in_channels=_CHANNELS)
    return is_alike(found) and found["context_in_dim"] != _T5_WIDTH


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.LongCatImageTransformer2DModel`."""
    arguments, head = flux.block_arguments(found, shapes)
    return arguments | {"axes_dims_rope": fam.rope_axes(head)}


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Words have the positions of a diagonal, which the rows and columns of patches continue."""
    start = (1, _TOKENS, _TOKENS)
    return flux.call_with_text_positions(module, x_BCHW, level_B, kwargs, flux.diagonal_ids, start)


FAMILIES = (
    fam.Family(
        name="longcat_image",
        title="LongCat-Image",
        detect=fam.Detection(FLUX, is_longcat, "LongCatImage"),
        build=fam.ModelBuild(
            "LongCatImageTransformer2DModel",
            config,
            flux.names_of_diffusers("time_embed.timestep_embedder"),
            forward,
            dtypes=fam.BFLOAT16_FIRST,
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "qwen25_7b",
                    3584,
                    _TEMPLATE,
                    dropped_tokens=_BEFORE,
                    least_tokens=_TOKENS + _BEFORE,
                    most_tokens=_TOKENS + _BEFORE,
                    is_masked=True,
                    spells_quotes=True,
                ),
            )
        ),
        latent="flux",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift_by_size=fam.ShiftBySize((256, 4096), (0.5, 1.15))),
            reads=frozenset({"context"}),
            side_multiple=16,
            cfg_rescale=fam.CfgRescale.PATCHES_DOWN,
            defaults=fam.SamplingDefaults(
                steps=50, cfg=4.5, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.LIKE_FLUX,
        ),
        sources="diffusers' LongCatImagePipeline; meituan-longcat/LongCat-Image",
        folder=fam.DiffusersFolder(
            "LongCatImagePipeline",
            missing={
                "text_processor": "it rewrites prompts, expected that of meituan-longcat/LongCat-Image, or no rewriting"
            },
        ),
        lora=fam.TRANSFORMER,
    ),
)
