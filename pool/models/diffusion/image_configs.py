"""Arguments of diffusers' image transformers that have no module in `pool.families.modules`. Torch-free.

`found` are the sizes that recognition measured, `shapes` those of the module's parameters.
"""

from __future__ import annotations

from typing import Any

from modelpool.pool.detection.layouts.shape_sizes import Config, ShapeReader
from modelpool.pool.families.parts.arguments import ratio, rope_axes, rope_quarters
from modelpool.pool.families.parts.forward import Arguments, Shapes

#: width of a head of Sana's self-attention; and heads of its cross-attention by the model's width, which no tensor
#: tells. Source: the published configurations of 0.6, 1.6 and 4.8 billion parameters
SANA_HEAD, SANA_TEXT_HEADS, SANA_OTHER_TEXT_HEADS = 32, {1152: 16, 2240: 20}, 16


def sana_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.SanaTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden, patch = sizes["hidden_size"], shapes["patch_embed.proj.weight"][2]
    head = min(hidden, SANA_HEAD)
    text_heads = SANA_TEXT_HEADS.get(hidden, SANA_OTHER_TEXT_HEADS)
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "num_attention_heads": hidden // head,
        "attention_head_dim": head,
        "num_layers": sizes["depth"],
        "num_cross_attention_heads": text_heads,
        "cross_attention_head_dim": hidden // text_heads,
        "cross_attention_dim": hidden,
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
        "mlp_ratio": ratio(shapes["transformer_blocks.0.ff.conv_point.weight"][1], hidden),
        "patch_size": patch,
        "guidance_embeds": "time_embed.guidance_embedder.linear_1.weight" in shapes,
        "qk_norm": "rms_norm_across_heads" if "transformer_blocks.0.attn1.norm_q.weight" in shapes else None,
    }


def ernie_image_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.ErnieImageTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden, head = sizes["hidden_size"], shapes["layers.0.self_attention.norm_q.weight"][0]
    patches = shapes["x_embedder.proj.weight"]
    return {
        "hidden_size": hidden,
        "num_attention_heads": hidden // head,
        "num_layers": sizes["num_layers"],
        "ffn_hidden_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        "in_channels": patches[1],
        "out_channels": shapes["final_linear.weight"][0] // patches[2] ** 2,
        "patch_size": patches[2],
        "text_in_dim": shapes["text_proj.weight"][1] if "text_proj.weight" in shapes else hidden,
        "rope_axes_dim": rope_quarters(head),
    }


def krea2_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.Krea2Transformer2DModel`."""
    image, words = "transformer_blocks.0.", "text_fusion.layerwise_blocks.0."
    head, text_head = (shapes[f"{part}attn.norm_q.weight"][0] for part in (image, words))
    reader = ShapeReader(shapes)
    return {
        "in_channels": shapes["img_in.weight"][1],
        "num_layers": len(reader.numbers("transformer_blocks.")),
        "attention_head_dim": head,
        "num_attention_heads": shapes["img_in.weight"][0] // head,
        "num_key_value_heads": shapes[f"{image}attn.to_k.weight"][0] // head,
        "intermediate_size": shapes[f"{image}ff.gate.weight"][0],
        "timestep_embed_dim": shapes["time_embed.linear_1.weight"][1],
        "text_hidden_dim": shapes["txt_in.norm.weight"][0],
        "num_text_layers": shapes["text_fusion.projector.weight"][1],
        "text_num_attention_heads": shapes["txt_in.norm.weight"][0] // text_head,
        "text_num_key_value_heads": shapes[f"{words}attn.to_k.weight"][0] // text_head,
        "text_intermediate_size": shapes[f"{words}ff.gate.weight"][0],
        "num_layerwise_text_blocks": len(reader.numbers("text_fusion.layerwise_blocks.")),
        "num_refiner_text_blocks": len(reader.numbers("text_fusion.refiner_blocks.")),
        "axes_dims_rope": rope_quarters(head),
    }


def qwen_image_21_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.QwenImage21Transformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden, head = sizes["hidden_size"], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": sizes["num_layers"],
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "context_in_dim": sizes["context_dim"],
        "mlp_ratio": shapes["transformer_blocks.0.img_mlp.proj.weight"][0] // hidden,
        "axes_dims_rope": rope_axes(head),
    }
