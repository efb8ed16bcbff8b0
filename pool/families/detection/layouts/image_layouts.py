"""Layouts of image transformers, and how to measure their sizes. Torch-free.

Fields have the names of the models' own configurations. Sources: the published models' code, diffusers 0.42.1 for its
naming, and golden outputs of another implementation (tests/golden/detection.json), which the tests compare with.
Patches are 2x2 latent cells unless a layout states otherwise.
"""

from __future__ import annotations

import math

from modelpool.pool.families.detection.layouts.shape_sizes import (
    Measure,
    ShapeReader,
    Value,
    always,
    count,
    dim,
    either,
    exactly,
    has,
    heads,
    maybe,
    sizes,
    square_side,
)
from modelpool.pool.families.detection.layouts.signature import Layout, diffusers, published

#: latent cells in one patch of 2x2
_PATCH = 4


def _pixart_interpolation(reader: ShapeReader) -> Value:
    """Return the side of the position grid relative to the 32 patches of 512-pixel images."""
    return max(1, math.isqrt(reader.size("pos_embed", 1, 3)) // 32) if reader.has("pos_embed") else None


def _patches(key: str) -> dict[str, Measure]:
    """Measure channels, patches and width of a model by `key`, the convolution that embeds patches."""
    return {"in_channels": dim(key, 1, 4), "patch_size": dim(key, 2, 4), "hidden_size": dim(key, 0, 4)}


PIXART = Layout(
    "PixArt",
    (
        published(
            "t_block.1.weight",
            "y_embedder.y_proj.fc1.weight",
            without=("attention_y_norm.weight",),
            measure=sizes(
                **_patches("x_embedder.proj.weight"),
                depth=count("blocks."),
                context_dim=dim("y_embedder.y_proj.fc1.weight", 1),
                model_max_length=maybe("y_embedder.y_embedding", 0),
                input_size=either(("pos_embed", square_side("pos_embed", 1, 3, 2))),
                pe_interpolation=_pixart_interpolation,
                micro_condition=has("ar_embedder.mlp.0.weight"),
            ),
        ),
        diffusers(
            "adaln_single.linear.weight",
            "pos_embed.proj.weight",
            "transformer_blocks.0.scale_shift_table",
            measure=sizes(
                **_patches("pos_embed.proj.weight"),
                depth=count("transformer_blocks."),
                context_dim=maybe("caption_projection.linear_1.weight", 1),
                # no tensor in this naming has the maximum prompt length
                model_max_length=always(None),
                micro_condition=has("adaln_single.emb.aspect_ratio_embedder.linear_1.weight"),
                out_channels=maybe("proj_out.weight", 0, 2, _PATCH),
                reads_frames=has("pos_embed_masked_video.1.weight"),
            ),
        ),
    ),
)

SANA = Layout(
    "Sana",
    (
        published(
            "attention_y_norm.weight",
            "blocks.0.cross_attn.q_linear.weight",
            measure=sizes(
                **_patches("x_embedder.proj.weight"),
                depth=count("blocks."),
                context_dim=dim("y_embedder.y_proj.fc1.weight", 1),
                # files have the table of positions even where the model does not add it
                input_size=either(("pos_embed", square_side("pos_embed", 1, 3))),
                guidance_embed=has("cfg_embedder.mlp.0.weight"),
            ),
        ),
        diffusers(
            "patch_embed.proj.weight",
            "caption_norm.weight",
            "time_embed.linear.weight",
            measure=sizes(
                **_patches("patch_embed.proj.weight"),
                depth=count("transformer_blocks."),
                context_dim=dim("caption_projection.linear_1.weight", 1),
                # the configuration of a folder has it
                input_size=always(None),
                guidance_embed=has("time_embed.guidance_embedder.linear_1.weight"),
            ),
        ),
    ),
)

COGVIEW = Layout(
    "CogView 3+ or 4",
    (
        diffusers(
            "patch_embed.text_proj.weight",
            "time_condition_embed.condition_embedder.linear_1.weight",
            measure=sizes(
                in_channels=dim("patch_embed.proj.weight", 1, divide=_PATCH),
                hidden_size=dim("patch_embed.text_proj.weight", 0),
                depth=count("transformer_blocks."),
                context_dim=dim("patch_embed.text_proj.weight", 1),
            ),
        ),
    ),
)

_LUMINA_2 = sizes(
    patch_size=always(2),
    in_channels=dim("x_embedder.weight", 1, divide=_PATCH),
    dim=dim("x_embedder.weight", 0),
    cap_feat_dim=dim("cap_embedder.0.weight", 0, 1),
    n_layers=count("layers."),
    qk_norm=has("layers.0.attention.k_norm.weight"),
    n_heads=heads(("x_embedder.weight", 0), "layers.0.attention.q_norm.weight"),
    n_kv_heads=lambda reader: _key_heads(reader),
    z_image_modulation=has("cap_pad_token"),
    pooled_text=has("clip_text_pooled_proj.0.weight"),
    pixel_space=has("dec_net.cond_embed.weight"),
)


def _key_heads(reader: ShapeReader) -> int:
    """Return the heads of keys: queries, keys and values are rows of one weight."""
    head = reader.size("layers.0.attention.q_norm.weight", 0, 1)
    rows = reader.size("layers.0.attention.qkv.weight", 0)
    rest = rows - reader.size("layers.0.attention.qkv.weight", 1)
    return exactly(rest, 2 * head, "layers.0.attention.qkv.weight")


LUMINA_2 = Layout(
    "Lumina 2",
    (
        published("cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight", measure=_LUMINA_2),
        diffusers(
            "time_caption_embed.caption_embedder.0.weight",
            "noise_refiner.0.attn.to_q.weight",
            without=("ref_image_patch_embedder.weight",),
            measure=sizes(
                patch_size=always(2),
                in_channels=dim("x_embedder.weight", 1, divide=_PATCH),
                dim=dim("x_embedder.weight", 0),
                cap_feat_dim=dim("time_caption_embed.caption_embedder.0.weight", 0, 1),
                n_layers=count("layers."),
                qk_norm=has("layers.0.attn.norm_k.weight"),
                n_heads=heads(("x_embedder.weight", 0), "layers.0.attn.norm_q.weight"),
                n_kv_heads=heads(("layers.0.attn.to_k.weight", 0), "layers.0.attn.norm_q.weight"),
                z_image_modulation=always(False),
                pooled_text=always(False),
                pixel_space=always(False),
            ),
        ),
        diffusers(
            "all_x_embedder.2-1.weight",
            "cap_pad_token",
            measure=sizes(
                patch_size=always(2),
                in_channels=dim("all_x_embedder.2-1.weight", 1, divide=_PATCH),
                dim=dim("all_x_embedder.2-1.weight", 0),
                cap_feat_dim=dim("cap_embedder.0.weight", 0, 1),
                n_layers=count("layers."),
                qk_norm=has("layers.0.attention.norm_k.weight"),
                n_heads=heads(("all_x_embedder.2-1.weight", 0), "layers.0.attention.norm_q.weight"),
                n_kv_heads=heads(("layers.0.attention.to_k.weight", 0), "layers.0.attention.norm_q.weight"),
                z_image_modulation=always(True),
                pooled_text=always(False),
                pixel_space=always(False),
            ),
        ),
    ),
)

#: both namings are equal
OMNIGEN_2 = Layout(
    "OmniGen 2",
    (
        published(
            "time_caption_embed.timestep_embedder.linear_1.bias",
            "ref_image_patch_embedder.weight",
            measure=sizes(
                patch_size=always(2),
                in_channels=dim("x_embedder.weight", 1, divide=_PATCH),
                hidden_size=dim("x_embedder.weight", 0),
                num_layers=count("layers."),
                out_channels=dim("norm_out.linear_2.weight", 0, divide=_PATCH),
                num_refiner_layers=count("noise_refiner."),
                text_feat_dim=dim("time_caption_embed.caption_embedder.0.weight", 0, 1),
                num_attention_heads=heads(("x_embedder.weight", 0), "layers.0.attn.norm_q.weight"),
                num_kv_heads=heads(("layers.0.attn.to_k.weight", 0), "layers.0.attn.norm_q.weight"),
            ),
        ),
    ),
)

#: the first OmniGen: a language model that generates images
OMNIGEN = Layout(
    "OmniGen",
    (
        published(
            "llm.embed_tokens.weight",
            "input_x_embedder.proj.weight",
            "time_token.mlp.0.weight",
            measure=sizes(
                **_patches("x_embedder.proj.weight"),
                vocabulary=dim("llm.embed_tokens.weight", 0),
                depth=count("llm.layers."),
            ),
        ),
        diffusers(
            "patch_embedding.output_image_proj.weight",
            "time_token.linear_1.weight",
            measure=sizes(
                **_patches("patch_embedding.output_image_proj.weight"),
                vocabulary=dim("embed_tokens.weight", 0),
                depth=count("layers."),
            ),
        ),
    ),
)

#: both namings are equal
QWEN_IMAGE = Layout(
    "Qwen-Image",
    (
        published(
            "txt_norm.weight",
            "transformer_blocks.0.txt_mod.1.weight",
            "transformer_blocks.0.attn.add_k_proj.weight",
            measure=sizes(
                in_channels=dim("img_in.weight", 1),
                hidden_size=dim("img_in.weight", 0),
                out_channels=dim("proj_out.weight", 0),
                context_dim=dim("txt_norm.weight", 0, 1),
                num_layers=count("transformer_blocks."),
                num_attention_heads=heads(("img_in.weight", 0), "transformer_blocks.0.attn.norm_q.weight"),
                layered=has("time_text_embed.addition_t_embedding.weight"),
                # a marker that some programs put into files of the edit model of November 2025
                clean_reference=has("__index_timestep_zero__"),
            ),
        ),
    ),
)
