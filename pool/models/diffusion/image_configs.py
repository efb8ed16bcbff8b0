"""Arguments of diffusers' image transformers, from recognised sizes and shapes. Torch-free.

`found` are the sizes that recognition measured, `shapes` those of the module's parameters. Facts that neither tells are
constants, with their source.
"""

from __future__ import annotations

from typing import Any

from modelpool.pool.detection.layouts.shape_sizes import Config
from modelpool.pool.families.parts.arguments import PATCH, ratio, rope_axes
from modelpool.pool.families.parts.forward import Arguments, Shapes

#: width of a head if no norm tells. Source: the published models' code
SD3_HEAD, HIDREAM_HEAD = 64, 128
#: the same in every published size of PixArt
PIXART_HEADS = 16
#: cells along a side of 1024-pixel images, which PixArt models without a position table were trained for
PIXART_CELLS = 128
#: tokens that HunyuanDiT reads of its first text encoder; the rest of its padding embeddings is for the second
HUNYUAN_DIT_TOKENS = 77
#: layers of HiDream's language model; blocks beyond them all read the last
HIDREAM_TEXT_LAYERS = 32


def sd3_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.SD3Transformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden, patch = sizes["hidden_size"], sizes["patch_size"]
    norm = shapes.get("transformer_blocks.0.attn.norm_q.weight")
    head = norm[0] if norm else min(hidden, SD3_HEAD)
    return {
        "patch_size": patch,
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "num_layers": sizes["depth"],
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "joint_attention_dim": sizes["context_dim"],
        "caption_projection_dim": hidden,
        "pooled_projection_dim": sizes["adm_in_channels"],
        "pos_embed_max_size": sizes["pos_embed_max_size"],
        "dual_attention_layers": sizes["x_block_self_attn_layers"],
        "qk_norm": "rms_norm" if sizes["qk_norm"] else None,
    }


def qwen_image_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.QwenImageTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"] // PATCH,
        "num_layers": sizes["num_layers"],
        "attention_head_dim": head,
        "num_attention_heads": sizes["num_attention_heads"],
        "joint_attention_dim": sizes["context_dim"],
        "axes_dims_rope": rope_axes(head),
        # # the reference image is marked as clean
        "zero_cond_t": bool(sizes["clean_reference"]),
        "use_additional_t_cond": bool(sizes["layered"]),
        "use_layer3d_rope": bool(sizes["layered"]),
    }


def pixart_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.PixArtTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden, patch = sizes["hidden_size"], sizes["patch_size"]
    return {
        "num_attention_heads": PIXART_HEADS,
        "attention_head_dim": hidden // PIXART_HEADS,
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "num_layers": sizes["depth"],
        "cross_attention_dim": hidden,
        "sample_size": sizes.get("input_size") or PIXART_CELLS,
        "patch_size": patch,
        "use_additional_conditions": sizes["micro_condition"],
        "caption_channels": sizes["context_dim"],
    }


def hunyuan_dit_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.HunyuanDiT2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden = sizes["hidden_size"]
    return {
        "num_attention_heads": sizes["num_heads"],
        "attention_head_dim": hidden // sizes["num_heads"],
        "in_channels": sizes["in_channels"],
        "patch_size": shapes["pos_embed.proj.weight"][2],
        "hidden_size": hidden,
        "num_layers": sizes["depth"],
        "mlp_ratio": ratio(shapes["blocks.0.ff.net.2.weight"][1], hidden),
        "learn_sigma": True,
        "cross_attention_dim": shapes["text_embedding_padding"][1],
        "cross_attention_dim_t5": shapes["text_embedder.linear_1.weight"][1],
        "pooled_projection_dim": shapes["time_extra_emb.pooler.c_proj.weight"][0],
        "text_len": HUNYUAN_DIT_TOKENS,
        "text_len_t5": shapes["text_embedding_padding"][0] - HUNYUAN_DIT_TOKENS,
        "use_style_cond_and_image_meta_size": "time_extra_emb.style_embedder.weight" in shapes,
    }


def hidream_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.HiDreamImageTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden = sizes["hidden_size"]
    head = min(hidden, HIDREAM_HEAD)
    blocks = sizes["num_layers"] + sizes["num_single_layers"]
    return {
        "patch_size": sizes["patch_size"],
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "num_layers": sizes["num_layers"],
        "num_single_layers": sizes["num_single_layers"],
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        # # of the encoder of which only the last layer is read, and of the one of which all layers are
        "caption_channels": [shapes[f"caption_projection.{n}.linear.weight"][1] for n in (blocks, 0)],
        "text_emb_dim": sizes["text_emb_dim"],
        "num_routed_experts": sizes["num_routed_experts"] or 0,
        "axes_dims_rope": (head // 2, head // 4, head // 4),
        "llama_layers": [min(block, HIDREAM_TEXT_LAYERS - 1) for block in range(blocks)],
    }
