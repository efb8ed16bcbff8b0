"""Stable Diffusion 3 and 3.5. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts.vocabulary import (
    HALF_FIRST,
    NOTHING,
    PATCH,
    SD3_HEAD,
    SDXL_CLIP_G,
    TIMESTEPS,
    TRANSFORMER,
    Arguments,
    Config,
    Detection,
    DiffusersFolder,
    Family,
    Guidance,
    Joined,
    Layout,
    Measure,
    ModelBuild,
    ModelKwargs,
    NoiseFacts,
    NoiseKind,
    OptionFacts,
    Pooled,
    Prediction,
    Reading,
    ReadText,
    SamplingDefaults,
    SamplingFacts,
    Shapes,
    TextInputs,
    TextJoin,
    anything,
    count,
    defaults_like,
    diffusers,
    dim,
    either,
    fixed_length,
    having,
    joined_pooled,
    maybe,
    numbered,
    published,
    sample_of,
    sizes,
    square_side,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


def _rms(key: str) -> Measure:
    """Measure the kind of norm of queries and keys; None without one."""
    return lambda reader: "rms" if reader.has(key) else None


_LAYOUT = Layout(
    "Stable Diffusion 3",
    (
        published(
            "joint_blocks.0.context_block.attn.qkv.weight",
            "x_embedder.proj.weight",
            measure=sizes(
                in_channels=dim("x_embedder.proj.weight", 1, 4),
                patch_size=dim("x_embedder.proj.weight", 2, 4),
                out_channels=dim("final_layer.linear.weight", 0, divide=PATCH),
                hidden_size=dim("x_embedder.proj.weight", 0, 4),
                depth=count("joint_blocks."),
                adm_in_channels=dim("y_embedder.mlp.0.weight", 1),
                context_dim=dim("context_embedder.weight", 1),
                num_patches=maybe("pos_embed", 1, 3),
                pos_embed_max_size=either(("pos_embed", square_side("pos_embed", 1, 3))),
                qk_norm=_rms("joint_blocks.0.context_block.attn.ln_q.weight"),
                x_block_self_attn_layers=numbered("joint_blocks.", "x_block.attn2.qkv.weight"),
            ),
        ),
        diffusers(
            "pos_embed.proj.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "transformer_blocks.0.attn.add_k_proj.weight",
            without=("single_transformer_blocks.0.attn.to_q.weight", "controlnet_blocks.0.weight"),
            measure=sizes(
                in_channels=dim("pos_embed.proj.weight", 1, 4),
                patch_size=dim("pos_embed.proj.weight", 2, 4),
                out_channels=dim("proj_out.weight", 0, divide=PATCH),
                hidden_size=dim("pos_embed.proj.weight", 0, 4),
                depth=count("transformer_blocks."),
                adm_in_channels=dim("time_text_embed.text_embedder.linear_1.weight", 1),
                context_dim=dim("context_embedder.weight", 1),
                num_patches=maybe("pos_embed.pos_embed", 1, 3),
                pos_embed_max_size=either(("pos_embed.pos_embed", square_side("pos_embed.pos_embed", 1, 3))),
                qk_norm=_rms("transformer_blocks.0.attn.norm_q.weight"),
                x_block_self_attn_layers=numbered("transformer_blocks.", "attn2.to_q.weight"),
            ),
        ),
    ),
)


def config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.SD3Transformer2DModel`."""
    measured: dict[str, Any] = dict(found)
    hidden, patch = measured["hidden_size"], measured["patch_size"]
    norm = shapes.get("transformer_blocks.0.attn.norm_q.weight")
    head = norm[0] if norm else min(hidden, SD3_HEAD)
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


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Predict noise - clean."""
    return sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=kwargs["context"],
            pooled_projections=kwargs["pooled"],
            return_dict=False,
        )
    )


def _join(read: Sequence[ReadText]) -> Joined:
    """CLIP-L and CLIP-G concatenated along the width, padded to the width of T5, which follows them."""
    import torch

    small, large, t5 = read
    clip_LD = torch.cat((small.context_LD, large.context_LD), -1)
    clip_LD = torch.nn.functional.pad(clip_LD, (0, t5.context_LD.shape[-1] - clip_LD.shape[-1]))
    return {"context": torch.cat((clip_LD, t5.context_LD)), "pooled": joined_pooled(small, large)}


_SD3 = Family(
    name="sd3",
    title="Stable Diffusion 3",
    detect=Detection(_LAYOUT, having(qk_norm=None), "SD3"),
    build=ModelBuild(
        "SD3Transformer2DModel",
        config,
        "sd3",
        forward,
        dtypes=HALF_FIRST,
    ),
    text=TextInputs(
        # ComfyUI does not pad T5 to 256
        (
            Reading("clip_l", 768, layers_left_out=1, final_norm=False, pooled=Pooled.PROJECTED),
            SDXL_CLIP_G,
            fixed_length("t5xxl", 256),
        ),
        set_name="sd3",
        join=TextJoin(_join, is_appended=True),
        optional=frozenset({"clip_l", "clip_g", "t5xxl"}),
    ),
    latent="sd3",
    sampling=SamplingFacts(
        Prediction.FLOW,
        noise=NoiseFacts(NoiseKind.FLOW, shift=3.0),
        reads=frozenset({"context", "pooled"}),
        side_multiple=16,
        defaults=SamplingDefaults(
            steps=28, cfg=7.0, sampler="euler", schedule="normal", guidance=Guidance.CLASSIFIER_FREE
        ),
    ),
    sources="diffusers' StableDiffusion3Pipeline; stabilityai/stable-diffusion-3-medium",
    folder=DiffusersFolder(
        "StableDiffusion3Pipeline", entries={"image_encoder": NOTHING, "feature_extractor": NOTHING}
    ),
    lora=TRANSFORMER,
    options=OptionFacts(controlnets="sd3", skips_blocks=True),
)

FAMILIES = (
    _SD3,
    replace(
        _SD3,
        name="sd35_large",
        title="Stable Diffusion 3.5 large",
        detect=replace(_SD3.detect, when=having(x_block_self_attn_layers=())),
        sampling=replace(_SD3.sampling, defaults=defaults_like(_SD3.sampling, cfg=3.5)),
        sources="stabilityai/stable-diffusion-3.5-large, card and scheduler",
    ),
    replace(
        _SD3,
        name="sd35_medium",
        title="Stable Diffusion 3.5 medium",
        detect=replace(_SD3.detect, when=anything),
        sampling=replace(_SD3.sampling, defaults=defaults_like(_SD3.sampling, steps=40, cfg=4.5)),
        sources="stabilityai/stable-diffusion-3.5-medium, card and scheduler",
    ),
)
