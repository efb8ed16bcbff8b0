"""Layouts of transformers for audio and 3D shapes, and how to measure their sizes. Torch-free.

Sources as in `image_layouts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from modelpool.pool.families.detection.layouts.shape_sizes import (
    Config,
    ShapeReader,
    count,
    dim,
    exactly,
    has,
    heads,
    maybe,
    sizes,
)
from modelpool.pool.families.detection.layouts.signature import Layout, diffusers, published

STABLE_AUDIO = Layout(
    "Stable Audio",
    (
        published(
            "transformer.rotary_pos_emb.inv_freq",
            "transformer.project_in.weight",
            measure=sizes(
                in_channels=dim("transformer.project_in.weight", 1),
                hidden_size=dim("transformer.project_in.weight", 0),
                context_dim=maybe("to_cond_embed.0.weight", 1),
                depth=count("transformer.layers."),
                memory_tokens=maybe("transformer.memory_tokens", 0),
            ),
        ),
        diffusers(
            "cross_attention_proj.0.weight",
            "preprocess_conv.weight",
            "proj_in.weight",
            measure=sizes(
                in_channels=dim("proj_in.weight", 1),
                hidden_size=dim("proj_in.weight", 0),
                context_dim=dim("cross_attention_proj.0.weight", 1),
                depth=count("transformer_blocks."),
                memory_tokens=maybe("memory_tokens", 0),
            ),
        ),
        diffusers(
            "to_cond_embed.0.weight",
            "memory_tokens",
            "proj_in.weight",
            measure=sizes(
                in_channels=dim("proj_in.weight", 1),
                hidden_size=dim("proj_in.weight", 0),
                context_dim=dim("to_cond_embed.0.weight", 1),
                depth=count("transformer_blocks."),
                memory_tokens=maybe("memory_tokens", 0),
            ),
        ),
    ),
)

_ACE_FIRST = "proj_in.early_conv_layers.0.weight"


def _ace_out(reader: ShapeReader) -> int:
    """Return the output channels: the last layer returns complete patches."""
    return exactly(
        reader.size("final_layer.linear.weight", 0),
        math.prod((reader.size(_ACE_FIRST, 2, 4), reader.size(_ACE_FIRST, 3, 4))),
        "final_layer.linear.weight",
    )


ACE_STEP = Layout(
    "ACE-Step",
    (
        published(
            "genre_embedder.weight",
            _ACE_FIRST,
            measure=sizes(
                in_channels=dim(_ACE_FIRST, 1, 4),
                patch_size=lambda reader: (reader.size(_ACE_FIRST, 2, 4), reader.size(_ACE_FIRST, 3, 4)),
                out_channels=_ace_out,
                inner_dim=dim("genre_embedder.weight", 0),
                text_embedding_dim=dim("genre_embedder.weight", 1),
                speaker_embedding_dim=dim("speaker_embedder.weight", 1),
                num_layers=count("transformer_blocks."),
                lyric_encoder_vocab_size=maybe("lyric_embs.weight", 0),
                lyric_hidden_size=maybe("lyric_embs.weight", 1),
                ssl_latent_dims=lambda reader: tuple(
                    reader.size(f"projectors.{i}.4.weight", 0) for i in reader.numbers("projectors.")
                ),
            ),
        ),
    ),
)


def _ace_15_sizes(first: str, layers: str) -> Callable[[ShapeReader], Config]:
    """Measure a model with the first convolution `first` and the blocks `layers`."""
    return sizes(
        in_channels=dim(first, 1, 3), hidden_size=dim(first, 0, 3), patch_size=dim(first, 2, 3), depth=count(layers)
    )


ACE_STEP_15 = Layout(
    "ACE-Step 1.5",
    (
        published(
            "encoder.lyric_encoder.layers.0.input_layernorm.weight",
            "decoder.proj_in.1.weight",
            measure=_ace_15_sizes("decoder.proj_in.1.weight", "decoder.layers."),
        ),
        diffusers(
            "proj_in_conv.weight",
            "time_embed_r.linear_1.weight",
            measure=_ace_15_sizes("proj_in_conv.weight", "layers."),
        ),
    ),
)

_H3D_HEAD = "double_blocks.0.img_attn.norm.query_norm.scale"

HUNYUAN_3D = Layout(
    "Hunyuan3D 2",
    (
        published(
            "latent_in.weight",
            "double_blocks.0.img_attn.qkv.weight",
            measure=sizes(
                in_channels=dim("latent_in.weight", 1),
                hidden_size=dim("latent_in.weight", 0),
                context_in_dim=dim("cond_in.weight", 1),
                depth=count("double_blocks."),
                depth_single_blocks=count("single_blocks."),
                num_heads=heads(("latent_in.weight", 0), _H3D_HEAD),
                mlp_ratio=lambda reader: (
                    reader.size("double_blocks.0.img_mlp.0.weight", 0) / max(1, reader.size("latent_in.weight", 0))
                ),
                qkv_bias=has("double_blocks.0.img_attn.qkv.bias"),
                guidance_embed=has("guidance_in.in_layer.weight"),
            ),
        ),
    ),
)

HUNYUAN_3D_21 = Layout(
    "Hunyuan3D 2.1",
    (
        published(
            "t_embedder.mlp.2.weight",
            "blocks.0.attn1.k_norm.weight",
            "blocks.0.attn2.to_k.weight",
            measure=sizes(
                in_channels=dim("x_embedder.weight", 1),
                hidden_size=dim("x_embedder.weight", 0),
                context_dim=dim("blocks.0.attn2.to_k.weight", 1),
                depth=count("blocks."),
                num_heads=heads(("x_embedder.weight", 0), "blocks.0.attn1.k_norm.weight"),
                mlp_ratio=lambda reader: (
                    reader.size("blocks.0.mlp.fc1.weight", 0) / max(1, reader.size("blocks.0.mlp.fc1.weight", 1))
                ),
                qkv_bias=has("blocks.0.attn1.to_q.bias"),
            ),
        ),
    ),
)
