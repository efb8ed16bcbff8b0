"""Chroma: Flux without a pooled text, guided by a negative prompt; a small network computes its
modulations. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.flux_layouts import CHROMA
from modelpool.pool.families.parts import flux_architecture as flux
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import packed, patch_ids, unpacked

if TYPE_CHECKING:
    from torch import Tensor, nn


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.ChromaTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    arguments, head = flux.block_arguments(found, shapes)
    return arguments | {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "axes_dims_rope": fam.rope_axes(head),
        "approximator_num_channels": sizes["in_dim"],
        "approximator_hidden_dim": sizes["hidden_dim"],
        "approximator_layers": sizes["n_layers"],
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. The mask hides words, as in training; diffusers' pipeline converts it to floats that
    attention adds, so that it hides none."""
    import torch

    context, rows = kwargs["context"], packed(x_BCHW)
    mask = kwargs.get("context_mask")
    if mask is not None:
        mask = torch.cat((mask, mask.new_ones(rows.shape[:2])), dim=1)
    out_BND = fam.sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            encoder_hidden_states=context,
            txt_ids=context.new_zeros(context.shape[1], 3),
            img_ids=patch_ids(x_BCHW, 2),
            attention_mask=mask,
            return_dict=False,
        )
    )
    return unpacked(out_BND, *x_BCHW.shape[-2:])


FAMILIES = (
    fam.Family(
        name="chroma",
        title="Chroma",
        detect=fam.Detection(CHROMA, fam.anything, "Chroma"),
        build=fam.ModelBuild(
            "ChromaTransformer2DModel",
            config,
            fam.LayoutNames("chroma", cuts=fam.single_block_cuts("txt_in.weight"), older=fam.scale_of_norm),
            forward,
            dtypes=fam.BFLOAT16_FIRST,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            # ComfyUI drops all padding but one token; here the mask hides it
            (fam.fixed_length("t5xxl", 512, is_masked=True, mask=fam.MaskMode.ONE_MORE),)
        ),
        latent="flux",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=16,
            defaults=fam.SamplingDefaults(
                steps=35, cfg=5.0, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.CHROMA,
        ),
        sources="diffusers' ChromaPipeline; shift as in ComfyUI. Reads the words and one padding token only",
        folder=fam.DiffusersFolder(
            "ChromaPipeline", entries={"image_encoder": fam.NOTHING, "feature_extractor": fam.NOTHING}
        ),
        lora=flux.LORA,
        options=fam.OptionFacts(skips_blocks=True, moves_positions=True),
    ),
)
