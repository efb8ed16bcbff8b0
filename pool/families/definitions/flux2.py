"""Flux 2: each cell of its latents is a patch, words have positions, and references any number. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.flux_layouts import FLUX_2
from modelpool.pool.families.parts import flux_architecture as flux
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import patch_ids, references

if TYPE_CHECKING:
    from torch import Tensor, nn

#: distance of the first position coordinates of reference images; the output has 0
_REFERENCE = 10
_TOKENS = 512
_TEMPLATE = (
    "[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing on "
    "object relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
)
#: lines over the size of unpatched latents up to 4096, for 10 and for 200 steps
_SHIFT = fam.ShiftBySizeAndSteps(
    fam.ShiftBySize((0, 4096), (1.89833333, 1.89833333 + 4096 * 8.73809524e-05)),
    fam.ShiftBySize((0, 4096), (0.45666666, 0.45666666 + 4096 * 0.00016927)),
    (10, 200),
    4300,
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.Flux2Transformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    arguments, head = flux.block_arguments(found, shapes)
    # the first layer of a gated unit returns gates and values
    inner, hidden = shapes["transformer_blocks.0.ff.linear_in.weight"][0] // 2, sizes["hidden_size"]
    return arguments | {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "timestep_guidance_channels": shapes["time_guidance_embed.timestep_embedder.linear_1.weight"][1],
        "mlp_ratio": fam.ratio(inner, hidden),
        "axes_dims_rope": (head // 4,) * 4,
        "guidance_embeds": sizes["guidance_embed"],
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Words have a coordinate of their own. The module reads the number of tokens of reference
    images only where they are read apart (option `kv_cache`)."""
    import torch
    from torch import nn

    context, cells = kwargs["context"], x_BCHW.shape[-2] * x_BCHW.shape[-1]
    rows, ids = x_BCHW.flatten(2).transpose(1, 2), patch_ids(x_BCHW, 1)
    for number, reference in enumerate(references(kwargs), start=1):
        rows = torch.cat((rows, reference.flatten(2).transpose(1, 2)), dim=1)
        ids = torch.cat((ids, patch_ids(reference, 1, first=number * _REFERENCE)))
    words = torch.arange(context.shape[1], device=context.device, dtype=ids.dtype)
    out_BND = fam.sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            guidance=flux.guidance(module, kwargs),
            encoder_hidden_states=context,
            txt_ids=nn.functional.pad(words[:, None], (3, 0)),
            img_ids=nn.functional.pad(ids, (0, 1)),
            return_dict=False,
            num_ref_tokens=rows.shape[1] - cells,
        )
    )
    return out_BND[:, :cells].transpose(1, 2).reshape(x_BCHW.shape)


_FLUX_2 = fam.Family(
    name="flux2",
    title="Flux 2",
    detect=fam.Detection(FLUX_2, fam.anything, "Flux2"),
    build=fam.ModelBuild(
        "Flux2Transformer2DModel",
        config,
        fam.LayoutNames("flux2", older=fam.scale_of_norm),
        forward,
        dtypes=fam.BFLOAT16_FIRST,
        optional_inputs=frozenset({"reference"}),
    ),
    text=fam.TextInputs(
        (
            fam.Reading(
                "mistral3_24b",
                5120,
                _TEMPLATE,
                least_tokens=_TOKENS,
                most_tokens=_TOKENS,
                pads_left=True,
                is_masked=True,
                layers=(10, 20, 30),
            ),
        ),
        set_name="flux2",
    ),
    latent="flux2",
    sampling=fam.SamplingFacts(
        fam.Prediction.FLOW,
        sequence=sequence_plans.FLUX_2,
        noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift_by_size=_SHIFT),
        reads=frozenset({"context", "guidance", "reference"}),
        side_multiple=16,
        several_references=True,
        defaults=fam.SamplingDefaults(
            steps=50, cfg=4.0, sampler="euler", schedule="simple", guidance=fam.Guidance.DISTILLED
        ),
    ),
    sources="diffusers' Flux2Pipeline, compute_empirical_mu. ComfyUI has the exponent 2.02 at every size",
    folder=fam.DiffusersFolder("Flux2Pipeline"),
    lora=fam.TRANSFORMER,
    options=fam.OptionFacts(skips_blocks=True, moves_positions=True, caches_references=True),
)

FAMILIES = (
    replace(
        _FLUX_2, name="flux2_dev", title="Flux 2 dev", detect=replace(_FLUX_2.detect, when=fam.having(hidden_size=6144))
    ),
    replace(
        _FLUX_2,
        name="flux2_klein",
        title="Flux 2 klein",
        detect=replace(_FLUX_2.detect, when=fam.having(guidance_embed=False)),
        text=replace(
            _FLUX_2.text,
            # Qwen3 4B or 8B instead of Mistral
            readings=(
                fam.fixed_length(
                    "qwen3_4b", _TOKENS, 2560, template=fam.QWEN3_WITHOUT_THINKING, is_masked=True, layers=(9, 18, 27)
                ),
            ),
            set_name="flux2_klein",
        ),
        sampling=replace(
            _FLUX_2.sampling,
            reads=frozenset({"context", "reference"}),
            defaults=fam.defaults_like(_FLUX_2.sampling, steps=4, cfg=1.0, guidance=fam.Guidance.NONE),
        ),
        sources="diffusers' Flux2KleinPipeline; black-forest-labs/FLUX.2-klein-4B, the distilled one. Its base "
        "model needs 50 steps and a classifier-free scale of 4",
        folder=replace(_FLUX_2.folder, pipeline="Flux2KleinPipeline", entries={"is_distilled": True}),
    ),
    _FLUX_2,
)
