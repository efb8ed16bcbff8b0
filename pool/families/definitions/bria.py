"""Bria 3.2: Flux without a pooled text and without distilled guidance, on the latents of SDXL. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelpool.pool.families.definitions.longcat_image import is_longcat
from modelpool.pool.families.detection.layouts.flux_layouts import FLUX
from modelpool.pool.families.parts import flux_architecture as flux
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam

if TYPE_CHECKING:
    from torch import Tensor, nn

#: tokens of a prompt; T5 reads only the real ones
_TOKENS = 128


def is_bria(found: fam.Config) -> bool:
    """Return whether a model with these sizes is Bria: no pooled text, and not one of the others without one."""
    return found.get("vec_in_dim") is None and not found.get("yak_mlp") and not is_longcat(found)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.BriaTransformer2DModel`. The positions of its heads have no first coordinate, as in
    the published configuration."""
    arguments, head = flux.block_arguments(found, shapes)
    return arguments | {
        "pooled_projection_dim": None,
        "guidance_embeds": found["guidance_embed"],
        "axes_dims_rope": [0, head // 2, head // 2],
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Words have no position."""
    return flux.call_with_text_positions(
        module, x_BCHW, level_B * fam.TIMESTEPS, kwargs, lambda context: context.new_zeros(context.shape[1], 3)
    )


FAMILIES = (
    fam.Family(
        name="bria",
        title="Bria 3",
        detect=fam.Detection(FLUX, is_bria, ""),
        build=fam.ModelBuild(
            "BriaTransformer2DModel",
            config,
            flux.names_of_diffusers("time_embed.timestep_embedder"),
            forward,
            dtypes=fam.BFLOAT16_FIRST,
        ),
        text=fam.TextInputs(
            (
                # the pipeline reads zeros for an empty negative prompt, and so does this for every empty prompt
                fam.Reading(
                    "t5xxl",
                    4096,
                    is_optional=True,
                    least_tokens=_TOKENS,
                    most_tokens=_TOKENS,
                    is_masked=True,
                    padding=fam.Padding.ZEROED,
                ),
            )
        ),
        latent="sdxl",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=1.0),
            reads=frozenset({"context"}),
            side_multiple=16,
            defaults=fam.SamplingDefaults(
                steps=30, cfg=5.0, sampler="euler", schedule="normal", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.LIKE_FLUX,
        ),
        sources="diffusers' BriaPipeline; briaai/BRIA-3.2, whose folder has the shift of its scheduler",
        folder=fam.DiffusersFolder("BriaPipeline", shifts_by_size=False),
        lora=fam.TRANSFORMER,
        options=fam.OptionFacts(skips_blocks=True, moves_positions=True),
    ),
)
