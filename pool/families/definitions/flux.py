"""Flux dev and schnell, and the models of Flux that fill masks or follow edges or depth. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.flux_layouts import FLUX
from modelpool.pool.families.parts import flux_architecture as flux
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import packed, patch_ids, unpacked

if TYPE_CHECKING:
    from torch import Tensor, nn

#: first position coordinate of a reference image; the output has 0
_REFERENCE = 1
#: input channels of the models that read an image: latent and mask, or the latent of edges or depth
_FILL_CHANNELS, _CONTROL_CHANNELS = 96, 32


def is_guided(found: fam.Config) -> bool:
    """Return whether a model with these sizes reads a guidance scale, and is none of the relatives without a pooled
    text."""
    return bool(found.get("guidance_embed")) and found.get("vec_in_dim") is not None and not found.get("yak_mlp")


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.FluxTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    arguments, head = flux.block_arguments(found, shapes)
    return arguments | {
        "out_channels": sizes["out_channels"] * fam.PATCH,
        "pooled_projection_dim": sizes["vec_in_dim"],
        "guidance_embeds": sizes["guidance_embed"],
        "axes_dims_rope": fam.rope_axes(head),
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. "image" adds channels to the latent, "reference" rows after its patches."""
    import torch

    joined = torch.cat((x_BCHW, kwargs["image"]), dim=1) if "image" in kwargs else x_BCHW
    rows, ids = packed(joined), patch_ids(joined, 2)
    if "reference" in kwargs:
        rows = torch.cat((rows, packed(kwargs["reference"])), dim=1)
        ids = torch.cat((ids, patch_ids(kwargs["reference"], 2, first=_REFERENCE)))
    context = kwargs["context"]
    out_BND = fam.sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            guidance=flux.guidance(module, kwargs),
            pooled_projections=kwargs["pooled"],
            encoder_hidden_states=context,
            txt_ids=context.new_zeros(context.shape[1], 3),
            img_ids=ids,
            return_dict=False,
        )
    )
    return unpacked(out_BND, *x_BCHW.shape[-2:])


_DEV = fam.Family(
    name="flux_dev",
    title="Flux dev",
    detect=fam.Detection(FLUX, is_guided, "Flux"),
    build=fam.ModelBuild(
        "FluxTransformer2DModel",
        config,
        fam.LayoutNames("flux", cuts=fam.single_block_cuts("txt_in.weight"), older=fam.scale_of_norm),
        forward,
        dtypes=fam.BFLOAT16_FIRST,
        optional_inputs=frozenset({"reference"}),
    ),
    text=fam.TextInputs(
        # ComfyUI pads T5 to 256 at least; Flux dev was trained with 512, schnell with 256
        (fam.Reading("clip_l", 768, pooled=fam.Pooled.PLAIN, reads_states=False), fam.fixed_length("t5xxl", 512)),
        set_name="flux",
    ),
    latent="flux",
    sampling=fam.SamplingFacts(
        fam.Prediction.FLOW,
        sequence=sequence_plans.FLUX,
        noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift_by_size=fam.ShiftBySize((256, 4096), (0.5, 1.15))),
        reads=frozenset({"context", "pooled", "guidance", "reference"}),
        side_multiple=16,
        defaults=fam.SamplingDefaults(
            steps=28, cfg=3.5, sampler="euler", schedule="simple", guidance=fam.Guidance.DISTILLED
        ),
    ),
    sources="diffusers' FluxPipeline; black-forest-labs/FLUX.1-dev. ComfyUI has the exponent 1.15 at every size",
    folder=fam.DiffusersFolder(
        "FluxPipeline", entries={"image_encoder": fam.NOTHING, "feature_extractor": fam.NOTHING}
    ),
    lora=flux.LORA,
    options=fam.OptionFacts(
        controlnets="flux",
        image_prompts="flux",
        teacache=(
            fam.TeaCacheFacts((4.98651651e02, -2.83781631e02, 5.58554382e01, -3.82021401e00, 2.64230861e-01), 0.25),
        ),
        skips_blocks=True,
        moves_positions=True,
    ),
)

FAMILIES = (
    replace(
        _DEV,
        name="flux_fill",
        title="Flux fill",
        detect=replace(
            _DEV.detect,
            when=lambda found: is_guided(found) and found["in_channels"] == _FILL_CHANNELS,
            comfyui="FluxInpaint",
        ),
        build=replace(_DEV.build, optional_inputs=frozenset()),
        sampling=replace(
            _DEV.sampling,
            reads=frozenset({"context", "pooled", "guidance", "image"}),
            image_concat=fam.ImageConcat.INPAINT_BY_PIXEL,
            defaults=fam.defaults_like(_DEV.sampling, steps=50, cfg=30.0),
        ),
        sources="diffusers' FluxFillPipeline: the image latent with the masked part removed, and 64 channels of "
        "the mask, one for each of the 8 times 8 pixels of a cell, row by row",
        folder=replace(_DEV.folder, pipeline="FluxFillPipeline", entries={}),
        options=replace(_DEV.options, controlnets=""),
    ),
    replace(
        _DEV,
        name="flux_control",
        title="Flux control (edges or depth)",
        detect=replace(_DEV.detect, when=lambda found: is_guided(found) and found["in_channels"] == _CONTROL_CHANNELS),
        build=replace(_DEV.build, optional_inputs=frozenset()),
        sampling=replace(
            _DEV.sampling,
            reads=frozenset({"context", "pooled", "guidance", "image"}),
            image_concat=fam.ImageConcat.LATENT,
        ),
        sources="diffusers' FluxControlPipeline; its authors use the scales 10 for depth and 30 for edges",
        folder=replace(_DEV.folder, pipeline="FluxControlPipeline", entries={}),
        options=replace(_DEV.options, controlnets=""),
    ),
    _DEV,
    replace(
        _DEV,
        name="flux_schnell",
        title="Flux schnell",
        detect=replace(_DEV.detect, when=fam.anything, comfyui="FluxSchnell"),
        build=replace(_DEV.build, optional_inputs=frozenset()),
        sampling=replace(
            _DEV.sampling,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW),
            reads=frozenset({"context", "pooled"}),
            defaults=fam.defaults_like(_DEV.sampling, steps=4, cfg=1.0, guidance=fam.Guidance.NONE),
        ),
        sources="black-forest-labs/FLUX.1-schnell, card and scheduler; prompts of 256 tokens",
    ),
)
