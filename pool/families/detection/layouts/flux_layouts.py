"""Layouts of Flux and of models derived from its code, and how to measure their sizes. Torch-free.

They share block names and differ in the layers before the blocks. Sources as in `image_layouts`.
"""

from __future__ import annotations

import math

from modelpool.pool.families.detection.layouts.shape_sizes import (
    Measure,
    ShapeReader,
    always,
    count,
    dim,
    either,
    exactly,
    has,
    heads,
    maybe,
    sizes,
)
from modelpool.pool.families.detection.layouts.signature import Layout, diffusers, published
from modelpool.pool.values.core.errors import UnknownArchitecture

#: latent cells in one patch of 2x2
_PATCH = 4

_HEAD = "double_blocks.0.img_attn.norm.query_norm.scale"
#: the same norm as renamed by some programs
_HEAD_RENAMED = "double_blocks.0.img_attn.norm.query_norm.weight"
_DIFFUSERS_HEAD = "transformer_blocks.0.attn.norm_q.weight"
_MLP = "double_blocks.0.img_mlp.0.weight"
_HUNYUAN_TEXT = "txt_in.individual_token_refiner.blocks.0.norm1.weight"
_FLUX_2 = "double_stream_modulation_img.lin.weight"
_CHROMA = "distilled_guidance_layer.in_proj.weight"


def _heads(width: tuple[str, int]) -> Measure:
    """Number of heads of a model with its width in the tensor and axis `width`."""
    return either((_HEAD, heads(width, _HEAD)), (_HEAD_RENAMED, heads(width, _HEAD_RENAMED)))


def _mlp_ratio(parts: int = 1) -> Measure:
    """Ratio of the hidden layer's width to the model's; `parts` of its rows form one gated unit."""
    return either((_MLP, lambda reader: reader.size(_MLP, 0) / (parts * max(1, reader.size(_MLP, 1)))))


def _heads_of_patches() -> Measure:
    """Number of heads of a model that reads patches of pixels."""
    pairs = [(norm, heads(("img_in_patch.weight", 0, 4), norm)) for norm in (_HEAD, _HEAD_RENAMED)]
    return either(*pairs)


def _nerf_head(reader: ShapeReader) -> str:
    return "conv" if reader.has("nerf_final_layer_conv.conv.weight") else "linear"


def _hunyuan_out(reader: ShapeReader, patches: str, last: str) -> int:
    """Return the output channels: the last layer returns complete patches."""
    return exactly(reader.size(last, 0), math.prod(_patched(reader, patches)[2:]), last)


def _patched(reader: ShapeReader, key: str) -> tuple[int, ...]:
    """Return the shape of the patch embedding convolution, for images or video."""
    shape = reader.shape(key)
    if len(shape) not in (4, 5):
        raise UnknownArchitecture(f"tensor {key!r}: found shape {shape}, expected 4 or 5 dimensions")
    return shape


#: common fields of Flux's own code and its descendants, in both namings
_WIDTHS = {"hidden_size": dim("img_in.weight", 0), "context_in_dim": dim("txt_in.weight", 1)}
_BLOCKS = {
    "depth": count("double_blocks."),
    "depth_single_blocks": count("single_blocks."),
    "num_heads": _heads(("img_in.weight", 0)),
}
_DIFFUSERS_WIDTHS = {
    "hidden_size": dim("x_embedder.weight", 0),
    "context_in_dim": dim("context_embedder.weight", 1),
}
_DIFFUSERS_BLOCKS = {
    "depth": count("transformer_blocks."),
    "depth_single_blocks": count("single_transformer_blocks."),
    "num_heads": heads(("x_embedder.weight", 0), _DIFFUSERS_HEAD),
}

FLUX = Layout(
    "Flux",
    (
        published(
            "img_in.weight",
            "double_blocks.0.img_attn.qkv.weight",
            without=(_FLUX_2, _CHROMA, _HUNYUAN_TEXT, "controlnet_blocks.0.weight", "pos_embed_input.weight"),
            measure=sizes(
                patch_size=always(2),
                in_channels=dim("img_in.weight", 1, divide=_PATCH),
                out_channels=dim("final_layer.linear.weight", 0, divide=_PATCH),
                **_WIDTHS,
                vec_in_dim=maybe("vector_in.in_layer.weight", 1),
                **_BLOCKS,
                mlp_ratio=_mlp_ratio(),
                qkv_bias=has("double_blocks.0.img_attn.qkv.bias"),
                guidance_embed=has("guidance_in.in_layer.weight"),
                yak_mlp=has("double_blocks.0.img_mlp.gate_proj.weight"),
            ),
        ),
        diffusers(
            "x_embedder.weight",
            "context_embedder.weight",
            "single_transformer_blocks.0.attn.to_q.weight",
            "transformer_blocks.0.attn.add_k_proj.weight",
            without=(_CHROMA, "controlnet_blocks.0.weight", "caption_projection.0.linear.weight"),
            measure=sizes(
                patch_size=always(2),
                in_channels=dim("x_embedder.weight", 1, divide=_PATCH),
                out_channels=dim("proj_out.weight", 0, divide=_PATCH),
                **_DIFFUSERS_WIDTHS,
                vec_in_dim=maybe("time_text_embed.text_embedder.linear_1.weight", 1),
                **_DIFFUSERS_BLOCKS,
                guidance_embed=has("time_text_embed.guidance_embedder.linear_1.weight"),
                yak_mlp=has("context_embedder_norm.weight"),
            ),
        ),
    ),
)

FLUX_2 = Layout(
    "Flux 2",
    (
        published(
            _FLUX_2,
            "img_in.weight",
            measure=sizes(
                patch_size=always(1),
                in_channels=dim("img_in.weight", 1),
                out_channels=dim("final_layer.linear.weight", 0),
                **_WIDTHS,
                vec_in_dim=always(None),
                **_BLOCKS,
                mlp_ratio=_mlp_ratio(2),
                global_modulation=has(_FLUX_2),
                yak_mlp=has("double_blocks.0.img_mlp.gate_proj.weight"),
                qkv_bias=has("double_blocks.0.img_attn.qkv.bias"),
                guidance_embed=has("guidance_in.in_layer.weight"),
            ),
        ),
        diffusers(
            "double_stream_modulation_img.linear.weight",
            "x_embedder.weight",
            measure=sizes(
                patch_size=always(1),
                in_channels=dim("x_embedder.weight", 1),
                out_channels=dim("proj_out.weight", 0),
                **_DIFFUSERS_WIDTHS,
                vec_in_dim=always(None),
                **_DIFFUSERS_BLOCKS,
                guidance_embed=has("time_guidance_embed.guidance_embedder.linear_1.weight"),
            ),
        ),
    ),
)

_GUIDANCE_SIZES = {
    "in_dim": dim(_CHROMA, 1),
    "hidden_dim": dim(_CHROMA, 0),
    "out_dim": dim("distilled_guidance_layer.out_proj.weight", 0),
    "n_layers": count("distilled_guidance_layer.layers."),
}

CHROMA = Layout(
    "Chroma",
    (
        published(
            _CHROMA,
            "img_in.weight",
            "double_blocks.0.img_attn.qkv.weight",
            measure=sizes(
                patch_size=always(2),
                in_channels=dim("img_in.weight", 1),
                out_channels=dim("final_layer.linear.weight", 0),
                **_WIDTHS,
                vec_in_dim=always(None),
                **_BLOCKS,
                mlp_ratio=_mlp_ratio(),
                qkv_bias=has("double_blocks.0.img_attn.qkv.bias"),
                **_GUIDANCE_SIZES,
            ),
        ),
        diffusers(
            _CHROMA,
            "x_embedder.weight",
            "transformer_blocks.0.attn.add_k_proj.weight",
            measure=sizes(
                patch_size=always(2),
                in_channels=dim("x_embedder.weight", 1),
                out_channels=dim("proj_out.weight", 0),
                **_DIFFUSERS_WIDTHS,
                vec_in_dim=always(None),
                **_DIFFUSERS_BLOCKS,
                **_GUIDANCE_SIZES,
            ),
        ),
    ),
)

#: works on pixels: a small network renders each patch after the transformer
CHROMA_RADIANCE = Layout(
    "Chroma Radiance",
    (
        published(
            _CHROMA,
            "img_in_patch.weight",
            "double_blocks.0.img_attn.qkv.weight",
            measure=sizes(
                patch_size=dim("img_in_patch.weight", 2, 4),
                in_channels=dim("img_in_patch.weight", 1, 4),
                out_channels=either(
                    ("nerf_final_layer_conv.conv.weight", dim("nerf_final_layer_conv.conv.weight", 0, 4)),
                    ("nerf_final_layer.linear.weight", dim("nerf_final_layer.linear.weight", 0)),
                ),
                hidden_size=dim("img_in_patch.weight", 0, 4),
                context_in_dim=dim("txt_in.weight", 1),
                vec_in_dim=always(None),
                depth=count("double_blocks."),
                depth_single_blocks=count("single_blocks."),
                num_heads=_heads_of_patches(),
                mlp_ratio=_mlp_ratio(),
                qkv_bias=has("double_blocks.0.img_attn.qkv.bias"),
                nerf_hidden_size=dim("nerf_image_embedder.embedder.0.weight", 0),
                nerf_depth=count("nerf_blocks."),
                nerf_final_head_type=_nerf_head,
                **_GUIDANCE_SIZES,
            ),
        ),
    ),
)

#: code shared by Hunyuan's video and image models: a text refiner before Flux's blocks
HUNYUAN_VIDEO = Layout(
    "Hunyuan Video or Hunyuan Image",
    (
        published(
            _HUNYUAN_TEXT,
            "img_in.proj.weight",
            measure=sizes(
                in_channels=lambda reader: _patched(reader, "img_in.proj.weight")[1],
                patch_size=lambda reader: _patched(reader, "img_in.proj.weight")[2:],
                out_channels=lambda reader: _hunyuan_out(reader, "img_in.proj.weight", "final_layer.linear.weight"),
                hidden_size=lambda reader: _patched(reader, "img_in.proj.weight")[0],
                context_in_dim=dim("txt_in.input_embedder.weight", 1),
                vec_in_dim=maybe("vector_in.in_layer.weight", 1),
                depth=count("double_blocks."),
                depth_single_blocks=count("single_blocks."),
                num_heads=_heads(("txt_in.input_embedder.weight", 0)),
                mlp_ratio=_mlp_ratio(),
                qkv_bias=has("double_blocks.0.img_attn.qkv.bias"),
                guidance_embed=has("guidance_in.in_layer.weight"),
                meanflow=has("time_r_in.in_layer.weight"),
                byt5=has("byt5_in.fc1.weight"),
                use_cond_type_embedding=has("cond_type_embedding.weight"),
                vision_in_dim=maybe("vision_in.proj.0.weight", 0, 1),
            ),
        ),
        diffusers(
            "context_embedder.token_refiner.refiner_blocks.0.norm1.weight",
            "x_embedder.proj.weight",
            measure=sizes(
                in_channels=lambda reader: _patched(reader, "x_embedder.proj.weight")[1],
                patch_size=lambda reader: _patched(reader, "x_embedder.proj.weight")[2:],
                out_channels=lambda reader: _hunyuan_out(reader, "x_embedder.proj.weight", "proj_out.weight"),
                hidden_size=lambda reader: _patched(reader, "x_embedder.proj.weight")[0],
                context_in_dim=dim("context_embedder.proj_in.weight", 1),
                vec_in_dim=maybe("time_text_embed.text_embedder.linear_1.weight", 1),
                depth=count("transformer_blocks."),
                depth_single_blocks=count("single_transformer_blocks."),
                num_heads=heads(("context_embedder.proj_in.weight", 0), _DIFFUSERS_HEAD),
                guidance_embed=lambda reader: any(
                    reader.has(f"{part}.guidance_embedder.linear_1.weight")
                    for part in ("time_text_embed", "time_guidance_embed")
                ),
                meanflow=has("time_guidance_embed.timestep_embedder_r.linear_1.weight"),
                byt5=has("context_embedder_2.linear_1.weight"),
                use_cond_type_embedding=has("cond_type_embed.weight"),
                vision_in_dim=maybe("image_embedder.norm_in.weight", 0, 1),
            ),
        ),
    ),
)
