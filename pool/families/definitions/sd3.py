"""Stable Diffusion 3 and 3.5. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam

if TYPE_CHECKING:
    from torch import Tensor, nn


def _rms(key: str) -> fam.Measure:
    """Measure the kind of norm of queries and keys; None without one."""
    return lambda reader: "rms" if reader.has(key) else None


_LAYOUT = fam.Layout(
    "Stable Diffusion 3",
    (
        fam.published(
            "joint_blocks.0.context_block.attn.qkv.weight",
            "x_embedder.proj.weight",
            measure=fam.sizes(
                in_channels=fam.dim("x_embedder.proj.weight", 1, 4),
                patch_size=fam.dim("x_embedder.proj.weight", 2, 4),
                out_channels=fam.dim("final_layer.linear.weight", 0, divide=fam.PATCH),
                hidden_size=fam.dim("x_embedder.proj.weight", 0, 4),
                depth=fam.count("joint_blocks."),
                adm_in_channels=fam.dim("y_embedder.mlp.0.weight", 1),
                context_dim=fam.dim("context_embedder.weight", 1),
                num_patches=fam.maybe("pos_embed", 1, 3),
                pos_embed_max_size=fam.either(("pos_embed", fam.square_side("pos_embed", 1, 3))),
                qk_norm=_rms("joint_blocks.0.context_block.attn.ln_q.weight"),
                x_block_self_attn_layers=fam.numbered("joint_blocks.", "x_block.attn2.qkv.weight"),
            ),
        ),
        fam.diffusers(
            "pos_embed.proj.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "transformer_blocks.0.attn.add_k_proj.weight",
            without=("single_transformer_blocks.0.attn.to_q.weight", "controlnet_blocks.0.weight"),
            measure=fam.sizes(
                in_channels=fam.dim("pos_embed.proj.weight", 1, 4),
                patch_size=fam.dim("pos_embed.proj.weight", 2, 4),
                out_channels=fam.dim("proj_out.weight", 0, divide=fam.PATCH),
                hidden_size=fam.dim("pos_embed.proj.weight", 0, 4),
                depth=fam.count("transformer_blocks."),
                adm_in_channels=fam.dim("time_text_embed.text_embedder.linear_1.weight", 1),
                context_dim=fam.dim("context_embedder.weight", 1),
                num_patches=fam.maybe("pos_embed.pos_embed", 1, 3),
                pos_embed_max_size=fam.either(("pos_embed.pos_embed", fam.square_side("pos_embed.pos_embed", 1, 3))),
                qk_norm=_rms("transformer_blocks.0.attn.norm_q.weight"),
                x_block_self_attn_layers=fam.numbered("transformer_blocks.", "attn2.to_q.weight"),
            ),
        ),
    ),
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.SD3Transformer2DModel`."""
    measured: dict[str, Any] = dict(found)
    hidden, patch = measured["hidden_size"], measured["patch_size"]
    norm = shapes.get("transformer_blocks.0.attn.norm_q.weight")
    head = norm[0] if norm else min(hidden, fam.SD3_HEAD)
    return {
        "patch_size": patch,
        "in_channels": measured["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "num_layers": measured["depth"],
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "joint_attention_dim": measured["context_dim"],
        "caption_projection_dim": hidden,
        "pooled_projection_dim": measured["adm_in_channels"],
        "pos_embed_max_size": measured["pos_embed_max_size"],
        "dual_attention_layers": measured["x_block_self_attn_layers"],
        "qk_norm": "rms_norm" if measured["qk_norm"] else None,
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean."""
    return fam.sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=level_B * fam.TIMESTEPS,
            encoder_hidden_states=kwargs["context"],
            pooled_projections=kwargs["pooled"],
            return_dict=False,
        )
    )


def _join(read: Sequence[fam.ReadText]) -> fam.Joined:
    """CLIP-L and CLIP-G concatenated along the width, padded to the width of T5, which follows them."""
    import torch

    small, large, t5 = read
    clip_LD = torch.cat((small.context_LD, large.context_LD), -1)
    clip_LD = torch.nn.functional.pad(clip_LD, (0, t5.context_LD.shape[-1] - clip_LD.shape[-1]))
    return {"context": torch.cat((clip_LD, t5.context_LD)), "pooled": fam.joined_pooled(small, large)}


_SD3 = fam.Family(
    name="sd3",
    title="Stable Diffusion 3",
    detect=fam.Detection(_LAYOUT, fam.having(qk_norm=None), "SD3"),
    build=fam.ModelBuild(
        "SD3Transformer2DModel",
        config,
        "sd3",
        forward,
        dtypes=fam.HALF_FIRST,
    ),
    text=fam.TextInputs(
        # ComfyUI does not pad T5 to 256
        (
            fam.Reading("clip_l", 768, layers_left_out=1, final_norm=False, pooled=fam.Pooled.PROJECTED),
            fam.SDXL_CLIP_G,
            fam.fixed_length("t5xxl", 256),
        ),
        set_name="sd3",
        join=fam.TextJoin(_join, is_appended=True),
        optional=frozenset({"clip_l", "clip_g", "t5xxl"}),
    ),
    latent="sd3",
    sampling=fam.SamplingFacts(
        fam.Prediction.FLOW,
        noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=3.0),
        reads=frozenset({"context", "pooled"}),
        side_multiple=16,
        defaults=fam.SamplingDefaults(
            steps=28, cfg=7.0, sampler="euler", schedule="normal", guidance=fam.Guidance.CLASSIFIER_FREE
        ),
        sequence=sequence_plans.SD3,
    ),
    sources="diffusers' StableDiffusion3Pipeline; stabilityai/stable-diffusion-3-medium",
    folder=fam.DiffusersFolder(
        "StableDiffusion3Pipeline", entries={"image_encoder": fam.NOTHING, "feature_extractor": fam.NOTHING}
    ),
    lora=fam.TRANSFORMER,
    options=fam.OptionFacts(controlnets="sd3", skips_blocks=True),
)

FAMILIES = (
    _SD3,
    replace(
        _SD3,
        name="sd35_large",
        title="Stable Diffusion 3.5 large",
        detect=replace(_SD3.detect, when=fam.having(x_block_self_attn_layers=())),
        sampling=replace(_SD3.sampling, defaults=fam.defaults_like(_SD3.sampling, cfg=3.5)),
        sources="stabilityai/stable-diffusion-3.5-large, card and scheduler",
    ),
    replace(
        _SD3,
        name="sd35_medium",
        title="Stable Diffusion 3.5 medium",
        detect=replace(_SD3.detect, when=fam.anything),
        sampling=replace(
            _SD3.sampling,
            defaults=fam.defaults_like(_SD3.sampling, steps=40, cfg=4.5),
            sequence=sequence_plans.SD35_MEDIUM,
        ),
        sources="stabilityai/stable-diffusion-3.5-medium, card and scheduler",
    ),
)
