"""Arguments of diffusers' image transformers, from recognised sizes and shapes. Torch-free.

`found` are the sizes that recognition measured, `shapes` those of the module's parameters. Facts that neither tells are
constants, with their source.
"""

from __future__ import annotations

from typing import Any

from modelpool.pool.detection.layouts.shape_sizes import Config
from modelpool.pool.families.parts.arguments import ratio
from modelpool.pool.families.parts.forward import Arguments, Shapes

#: the same in every published size of PixArt
PIXART_HEADS = 16
#: cells along a side of 1024-pixel images, which PixArt models without a position table were trained for
PIXART_CELLS = 128
#: tokens that HunyuanDiT reads of its first text encoder; the rest of its padding embeddings is for the second
HUNYUAN_DIT_TOKENS = 77


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
