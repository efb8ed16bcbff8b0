"""Layouts of video transformers, and how to measure their sizes. Torch-free.

Sources as in `image_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable

from modelpool.pool.families.detection.layouts.shape_sizes import (
    Config,
    ShapeReader,
    always,
    count,
    dim,
    exactly,
    has,
    heads,
    maybe,
    sizes,
)
from modelpool.pool.families.detection.layouts.signature import Layout, diffusers, published
from modelpool.pool.values.core.errors import UnknownArchitecture

#: latent cells in one patch of 1x2x2
PATCH = 4
#: width of a head of Wan in every published size; its norms are as wide as the model
WAN_HEAD = 128
#: heads of LTX-Video's transformer in every published size. Source: the config.json of Lightricks/LTX-Video, 2B and 13B
LTX_HEADS = 32

_LTX_BLOCK = "transformer_blocks.0.attn2.to_k.weight"
#: LTX-2.3 has gates in its attention
_LTX_GATE = "transformer_blocks.0.attn1.to_gate_logits.weight"

LTX = Layout(
    "LTX-Video",
    (
        published(
            "adaln_single.emb.timestep_embedder.linear_1.bias",
            "patchify_proj.weight",
            measure=sizes(
                in_channels=dim("patchify_proj.weight", 1),
                hidden_size=dim("patchify_proj.weight", 0),
                num_layers=count("transformer_blocks."),
                attention_head_dim=dim(_LTX_BLOCK, 0, divide=LTX_HEADS),
                cross_attention_dim=dim(_LTX_BLOCK, 1),
                audio=has("audio_adaln_single.linear.weight"),
                gated=has(_LTX_GATE),
            ),
        ),
        diffusers(
            "proj_in.weight",
            "scale_shift_table",
            "time_embed.emb.timestep_embedder.linear_1.bias",
            "transformer_blocks.0.attn2.to_k.weight",
            without=("patch_embed.proj.weight", "latents_proj_in.weight"),
            measure=sizes(
                in_channels=dim("proj_in.weight", 1),
                hidden_size=dim("proj_in.weight", 0),
                num_layers=count("transformer_blocks."),
                attention_head_dim=dim(_LTX_BLOCK, 0, divide=LTX_HEADS),
                cross_attention_dim=dim(_LTX_BLOCK, 1),
                audio=has("audio_proj_in.weight"),
                gated=has(_LTX_GATE),
            ),
        ),
    ),
)

#: keys of diffusers' class for the first Cosmos and Predict 2, and of the learned positions that only the first has
COSMOS_DIFFUSERS_KEYS = (
    "patch_embed.proj.weight",
    "time_embed.t_embedder.linear_1.weight",
    "transformer_blocks.0.attn2.to_k.weight",
)
COSMOS_LEARNED_POSITIONS = "learnable_pos_embed.pos_emb_h"
COSMOS_DIFFUSERS_SIZES = sizes(
    in_channels=lambda reader: without_mask(reader, "patch_embed.proj.weight"),
    out_channels=dim("proj_out.weight", 0, divide=PATCH),
    model_channels=dim("patch_embed.proj.weight", 0),
    num_blocks=count("transformer_blocks."),
    num_heads=heads(("patch_embed.proj.weight", 0), "transformer_blocks.0.attn1.norm_q.weight"),
    crossattn_emb_channels=dim("transformer_blocks.0.attn2.to_k.weight", 1),
    extra_per_block_abs_pos_emb=has(COSMOS_LEARNED_POSITIONS),
)

COSMOS_PREDICT_2 = Layout(
    "Cosmos Predict 2",
    (
        published(
            "blocks.0.mlp.layer1.weight",
            "x_embedder.proj.1.weight",
            measure=sizes(
                in_channels=lambda reader: without_mask(reader, "x_embedder.proj.1.weight"),
                out_channels=dim("final_layer.linear.weight", 0, divide=PATCH),
                model_channels=dim("x_embedder.proj.1.weight", 0),
                num_blocks=count("blocks."),
                num_heads=heads(("x_embedder.proj.1.weight", 0), "blocks.0.self_attn.q_norm.weight"),
                crossattn_emb_channels=dim("blocks.0.cross_attn.k_proj.weight", 1),
                extra_per_block_abs_pos_emb=has("extra_pos_embedder.pos_emb_h"),
                language_adapter=has("llm_adapter.blocks.0.cross_attn.q_proj.weight"),
            ),
        ),
        diffusers(*COSMOS_DIFFUSERS_KEYS, measure=COSMOS_DIFFUSERS_SIZES, without=(COSMOS_LEARNED_POSITIONS,)),
    ),
)


def without_mask(reader: ShapeReader, key: str) -> int:
    """Return the channels of the latent that `key` embeds in patches; one additional channel marks padding."""
    return exactly(reader.size(key, 1), PATCH, key) - 1


def _wan_kind(reader: ShapeReader) -> str:
    """Return the kind of conditioning that the model reads in addition to text, by the module that reads it."""
    if reader.has("vace_patch_embedding.weight"):
        return "vace"
    if reader.has("control_adapter.conv.weight"):
        return "camera" if reader.has("img_emb.proj.0.bias") else "camera_2.2"
    parts = (
        ("casual_audio_encoder.encoder.final_linear.weight", "s2v"),
        ("audio_proj.audio_proj_glob_1.layer.bias", "humo"),
        ("face_adapter.fuser_blocks.0.k_norm.weight", "animate"),
        ("img_emb.proj.0.bias", "i2v"),
    )
    return next((kind for key, kind in parts if reader.has(key)), "t2v")


def _wan_kind_in_diffusers(reader: ShapeReader) -> str:
    parts = (
        ("vace_patch_embedding.weight", "vace"),
        ("face_encoder.out_proj.weight", "animate"),
        ("condition_embedder.image_embedder.norm1.weight", "i2v"),
    )
    return next((kind for key, kind in parts if reader.has(key)), "t2v")


def _wan_patches(reader: ShapeReader) -> tuple[int, ...]:
    shape = reader.shape("patch_embedding.weight")
    if len(shape) != 5:
        raise UnknownArchitecture(f"tensor 'patch_embedding.weight': found shape {shape}, expected 5 dimensions")
    return shape[2:]


WAN = Layout(
    "Wan",
    (
        published(
            "head.modulation",
            "blocks.0.self_attn.q.weight",
            "patch_embedding.weight",
            measure=sizes(
                model_type=_wan_kind,
                dim=dim("patch_embedding.weight", 0, 5),
                in_dim=dim("patch_embedding.weight", 1, 5),
                out_dim=dim("head.head.weight", 0, divide=PATCH),
                patch_size=_wan_patches,
                ffn_dim=dim("blocks.0.ffn.0.weight", 0),
                freq_dim=dim("time_embedding.0.weight", 1),
                text_dim=dim("text_embedding.0.weight", 1),
                num_layers=count("blocks."),
                num_heads=dim("patch_embedding.weight", 0, 5, divide=WAN_HEAD),
                qk_norm=has("blocks.0.self_attn.norm_q.weight"),
                cross_attn_norm=has("blocks.0.norm3.weight"),
                flf_pos_embed_token_number=maybe("img_emb.emb_pos", 1, 3),
                in_dim_ref_conv=maybe("ref_conv.weight", 1, 4),
                vace_layers=count("vace_blocks."),
                vace_in_dim=maybe("vace_patch_embedding.weight", 1, 5),
            ),
        ),
        diffusers(
            "patch_embedding.weight",
            "condition_embedder.time_embedder.linear_1.weight",
            "blocks.0.attn2.to_k.weight",
            # AnyFlow and Helios are derived from it
            without=("condition_embedder.delta_embedder.linear_1.weight", "patch_short.weight"),
            measure=sizes(
                model_type=_wan_kind_in_diffusers,
                dim=dim("patch_embedding.weight", 0, 5),
                in_dim=dim("patch_embedding.weight", 1, 5),
                out_dim=dim("proj_out.weight", 0, divide=PATCH),
                patch_size=_wan_patches,
                ffn_dim=dim("blocks.0.ffn.net.0.proj.weight", 0),
                freq_dim=dim("condition_embedder.time_embedder.linear_1.weight", 1),
                text_dim=dim("condition_embedder.text_embedder.linear_1.weight", 1),
                num_layers=count("blocks."),
                num_heads=dim("patch_embedding.weight", 0, 5, divide=WAN_HEAD),
                qk_norm=has("blocks.0.attn1.norm_q.weight"),
                cross_attn_norm=has("blocks.0.norm2.weight"),
                flf_pos_embed_token_number=maybe("condition_embedder.image_embedder.pos_embed", 1, 3),
                in_dim_ref_conv=always(None),
                vace_layers=count("vace_blocks."),
                vace_in_dim=maybe("vace_patch_embedding.weight", 1, 5),
            ),
        ),
    ),
)

#: both namings are the same
KANDINSKY_5 = Layout(
    "Kandinsky 5",
    (
        published(
            "visual_transformer_blocks.0.cross_attention.key_norm.weight",
            "visual_embeddings.in_layer.weight",
            measure=sizes(
                model_dim=dim("visual_embeddings.in_layer.weight", 0),
                visual_embed_dim=dim("visual_embeddings.in_layer.weight", 1),
                time_dim=dim("time_embeddings.in_layer.weight", 0),
                ff_dim=dim("visual_transformer_blocks.0.feed_forward.in_layer.weight", 0),
                context_dim=maybe("text_embeddings.in_layer.weight", 1),
                num_text_blocks=count("text_transformer_blocks."),
                num_visual_blocks=count("visual_transformer_blocks."),
            ),
        ),
    ),
)


def _cog_channels(patches: str) -> Callable[[ShapeReader], int | None]:
    """Return how to measure the input channels: by the patch convolution, or by a linear layer that reads patches
    of two frames, as in version 1.5."""

    def channels(reader: ShapeReader) -> int | None:
        match reader.rank(patches):
            case 4:
                return reader.size(patches, 1, 4)
            case 2:
                return exactly(reader.size(patches, 1), 2 * PATCH, patches)
            case _:
                return None

    return channels


def _cog_sizes(
    blocks: str, norm: str, offset: str, embed: str = "patch_embed", table: str = "patch_embed.pos_embedding"
) -> Callable[[ShapeReader], Config]:
    """Sizes of CogVideoX; `norm` is the query norm of the first block."""
    return sizes(
        in_channels=_cog_channels(f"{embed}.proj.weight"),
        patch_frames=lambda reader: 2 if reader.rank(f"{embed}.proj.weight") == 2 else 1,
        hidden_size=dim(f"{embed}.text_proj.weight", 0),
        depth=count(blocks),
        num_heads=heads((f"{embed}.text_proj.weight", 0), f"{norm}.weight"),
        learned_positions=has(table),
        reads_offset=has(offset),
    )


COGVIDEOX = Layout(
    "CogVideoX",
    (
        published(
            "blocks.0.norm1.linear.weight",
            "patch_embed.text_proj.weight",
            without=("time_extra_emb.pooler.positional_embedding", "caption_projection.0.linear.weight"),
            measure=_cog_sizes("blocks.", "blocks.0.norm_q", "ofs_embedding_linear_1.weight"),
        ),
        published(
            "mixins.patch_embed.text_proj.weight",
            "mixins.adaln_layer.adaLN_modulations.0.1.weight",
            "transformer.layers.0.attention.query_key_value.weight",
            measure=_cog_sizes(
                "transformer.layers.",
                "mixins.adaln_layer.query_layernorm_list.0",
                "ofs_embed.0.weight",
                "mixins.patch_embed",
                "mixins.pos_embed.pos_embedding",
            ),
        ),
        diffusers(
            "patch_embed.text_proj.weight",
            "transformer_blocks.0.norm1.linear.weight",
            "time_embedding.linear_1.weight",
            measure=_cog_sizes(
                "transformer_blocks.", "transformer_blocks.0.attn1.norm_q", "ofs_embedding.linear_1.weight"
            ),
        ),
    ),
)
