"""Chroma: Flux without a pooled text, guided by a negative prompt; a small network computes its
modulations. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.flux_layouts import CHROMA
from modelpool.pool.families.detection.layouts.shape_sizes import Config
from modelpool.pool.families.detection.layouts.signature import anything
from modelpool.pool.families.parts import flux_architecture as flux
from modelpool.pool.families.parts.arguments import rope_axes
from modelpool.pool.families.parts.family import (
    BFLOAT16_FIRST,
    DiffusersFolder,
    Family,
    ModelBuild,
    TextInputs,
)
from modelpool.pool.families.parts.forward import Arguments, ModelKwargs, Shapes, sample_of
from modelpool.pool.families.parts.layout_names import LayoutNames, scale_of_norm, single_block_cuts
from modelpool.pool.families.parts.model_facts import image_flow
from modelpool.pool.families.parts.patches import packed, patch_ids, unpacked
from modelpool.pool.families.parts.pipeline_form import NOTHING
from modelpool.pool.families.parts.text_reading import MaskMode, fixed_length
from modelpool.pool.values.core.sampling_facts import Guidance, NoiseFacts, NoiseKind

if TYPE_CHECKING:
    from torch import Tensor, nn


def config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.ChromaTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    arguments, head = flux.block_arguments(found, shapes)
    return arguments | {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "axes_dims_rope": rope_axes(head),
        "approximator_num_channels": sizes["in_dim"],
        "approximator_hidden_dim": sizes["hidden_dim"],
        "approximator_layers": sizes["n_layers"],
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Predict noise - clean. The mask hides words, as in training; diffusers' pipeline converts it to floats that
    attention adds, so that it hides none."""
    import torch

    context, rows = kwargs["context"], packed(x_BCHW)
    mask = kwargs.get("context_mask")
    if mask is not None:
        mask = torch.cat((mask, mask.new_ones(rows.shape[:2])), dim=1)
    out_BND = sample_of(
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
    Family(
        name="chroma",
        title="Chroma",
        layout=CHROMA,
        when=anything,
        comfyui="Chroma",
        build=ModelBuild(
            "ChromaTransformer2DModel",
            config,
            LayoutNames("chroma", cuts=single_block_cuts("txt_in.weight"), older=scale_of_norm),
            forward,
        ),
        latent="flux",
        text=TextInputs(
            # ComfyUI drops all padding but one token; here the mask hides it
            (fixed_length("t5xxl", 512, is_masked=True, mask=MaskMode.ONE_MORE),)
        ),
        facts=image_flow(
            NoiseFacts(NoiseKind.FLOW),
            Guidance.CLASSIFIER_FREE,
            cfg=5.0,
            steps=35,
            reads=("context",),
            may_read=("context_mask",),
            sources="diffusers' ChromaPipeline; shift as in ComfyUI. Reads the words and one padding token only",
        ),
        schedule="simple",
        dtypes=BFLOAT16_FIRST,
        lora=flux.LORA,
        folder=DiffusersFolder("ChromaPipeline", entries={"image_encoder": NOTHING, "feature_extractor": NOTHING}),
    ),
)
