"""Arguments of diffusers' ControlNets of transformers, from the shapes of their parameters. Torch-free; builds nothing.

Arguments that shapes do not determine are as in the transformers that they are copied from
(`pool.families.definitions`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from modelpool.pool.families.detection.layouts.shape_sizes import ShapeReader
from modelpool.pool.families.parts.arguments import PATCH, SD3_HEAD, ratio, rope_axes
from modelpool.pool.families.parts.hunyuan_dit_inputs import TOKENS as HUNYUAN_DIT_TOKENS
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture

Config: TypeAlias = dict[str, Any]
Shapes: TypeAlias = Mapping[str, Shape]

#: latent channels of models with 2x2 patches and the model's patch embedding. Source: the configuration of
#: stabilityai/stable-diffusion-3.5-large
SD3_CHANNELS = 16
#: latent channels of Qwen-Image
QWEN_CHANNELS = 16
#: Z-Image: layers, and refiner layers before them that read only the latent. Source: Tongyi-MAI/Z-Image-Turbo
Z_IMAGE_LAYERS, Z_IMAGE_REFINERS = 30, 2
#: patch size after the last convolution over pixels. Source: XLabs-AI/flux-controlnet-canny
HINT_PATCH = 2


def flux_control_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.FluxControlNetModel` with parameters of `shapes`. Raises UnknownArchitecture
    naming a missing parameter, and for channels that the class does not support (inpainting ControlNets)."""
    latent, image = (_shape(shapes, f"{name}x_embedder.weight", 2)[1] for name in ("", "controlnet_"))
    if image != latent:
        found = f"controlnet_x_embedder.weight: found {image} channels, expected {latent}"
        raise UnknownArchitecture(f"ControlNet: {found}: diffusers does not support inpainting ControlNets for Flux")
    head, hidden = _shape(shapes, "transformer_blocks.0.attn.norm_q.weight", 1)[0], _hidden(shapes, "x_embedder")
    modes = shapes.get("controlnet_mode_embedder.weight")
    hint = shapes.get("input_hint_block.conv_out.weight")
    return {
        "patch_size": 1 if hint is None else HINT_PATCH,
        "in_channels": latent,
        **_blocks(shapes, head, hidden),
        "num_single_layers": len(ShapeReader(shapes).numbers("single_transformer_blocks.")),
        "joint_attention_dim": _shape(shapes, "context_embedder.weight", 2)[1],
        "pooled_projection_dim": _pooled(shapes),
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "axes_dims_rope": list(rope_axes(head)),
        "num_mode": None if modes is None else modes[0],
        "conditioning_embedding_channels": None if hint is None else hint[0],
    }


def sd3_control_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.SD3ControlNetModel`; as `flux_control_config`.

    No shape determines whether it was trained with a pooled text and with shifted latents. ControlNets that embed
    patches and texts themselves were not; ControlNets of SD3.5 large, which embed neither, were. Source:
    InstantX/SD3-Controlnet-Canny and stabilityai/stable-diffusion-3.5-large-controlnet-canny.
    """
    image = _shape(shapes, "pos_embed_input.proj.weight", 4)
    hidden, patch, text = image[0], image[2], shapes.get("context_embedder.weight")
    norm, table = shapes.get("transformer_blocks.0.attn.norm_q.weight"), shapes.get("pos_embed.pos_embed")
    embedding = shapes.get("pos_embed.proj.weight")
    channels = SD3_CHANNELS if embedding is None else embedding[1]
    layers = ShapeReader(shapes).numbers("transformer_blocks.")
    return {
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": channels,
        **_blocks(shapes, norm[0] if norm else min(hidden, SD3_HEAD), hidden),
        "joint_attention_dim": None if text is None else text[1],
        "caption_projection_dim": hidden,
        "pooled_projection_dim": _pooled(shapes),
        "pos_embed_max_size": None if table is None else math.isqrt(table[1]),
        "pos_embed_type": None if embedding is None else "sincos",
        "extra_conditioning_channels": image[1] - channels,
        "dual_attention_layers": tuple(n for n in layers if f"transformer_blocks.{n}.attn2.to_q.weight" in shapes),
        "qk_norm": "rms_norm" if norm else None,
        "use_pos_embed": embedding is not None,
        "force_zeros_for_pooled_projection": text is not None,
    }


def qwen_image_control_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.QwenImageControlNetModel`; as `flux_control_config`."""
    head, hidden = _shape(shapes, "transformer_blocks.0.attn.norm_q.weight", 1)[0], _hidden(shapes, "img_in")
    channels = _shape(shapes, "img_in.weight", 2)[1]
    return {
        "in_channels": channels,
        "out_channels": channels // PATCH,
        **_blocks(shapes, head, hidden),
        "joint_attention_dim": _shape(shapes, "txt_in.weight", 2)[1],
        "axes_dims_rope": rope_axes(head),
        "extra_condition_channels": _shape(shapes, "controlnet_x_embedder.weight", 2)[1] - channels,
    }


def blockwise_control_config(shapes: Shapes) -> Config:
    """Return the arguments of `pool.inference.controlnets.blockwise.BlockwiseControlNet`; as `flux_control_config`."""
    dim, channels = _shape(shapes, "img_in.weight", 2)
    return {
        "in_channels": QWEN_CHANNELS * PATCH,
        "num_layers": len(ShapeReader(shapes).numbers("controlnet_blocks.")),
        "dim": dim,
        "extra_condition_channels": channels - QWEN_CHANNELS * PATCH,
    }


def z_image_control_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.ZImageControlNetModel`; as `flux_control_config`. In version 2.0, the control
    layers also refine; the unused refiner layers of such files are removed from `shapes` before
    (`pool.inference.controlnets.open_controlnet`)."""
    embedding, reader = _shape(shapes, "control_all_x_embedder.2-1.weight", 2), ShapeReader(shapes)
    head = _shape(shapes, "control_layers.0.attention.norm_q.weight", 1)[0]
    layers, refiners = len(reader.numbers("control_layers.")), len(reader.numbers("control_noise_refiner."))
    apart = Z_IMAGE_LAYERS // layers if 0 < layers <= Z_IMAGE_LAYERS else 1
    if not head or embedding[0] % head:
        raise UnknownArchitecture(f"ControlNet: found head width {head}, expected a divisor of {embedding[0]}")
    refines = "control_noise_refiner" if "control_noise_refiner.0.after_proj.weight" in shapes else None
    return {
        "control_layers_places": [place * apart for place in range(layers)],
        "control_refiner_layers_places": list(range(refiners or Z_IMAGE_REFINERS)),
        "control_in_dim": embedding[1] // PATCH,
        "add_control_noise_refiner": refines if refiners else "control_layers",
        "dim": embedding[0],
        "n_refiner_layers": refiners or Z_IMAGE_REFINERS,
        "n_heads": embedding[0] // head,
        "n_kv_heads": embedding[0] // head,
    }


def hunyuan_dit_control_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.HunyuanDiT2DControlNetModel`; as `flux_control_config`. It has the first half
    of the model's blocks minus one."""
    patches, norm = _shape(shapes, "pos_embed.proj.weight", 4), _shape(shapes, "blocks.0.attn1.norm_q.weight", 1)
    hidden, head, text = patches[0], norm[0], _shape(shapes, "text_embedding_padding", 2)
    return {
        "num_attention_heads": hidden // head,
        "attention_head_dim": head,
        "in_channels": patches[1],
        "patch_size": patches[2],
        "hidden_size": hidden,
        "transformer_num_layers": 2 * (len(ShapeReader(shapes).numbers("blocks.")) + 1),
        "mlp_ratio": ratio(_shape(shapes, "blocks.0.ff.net.2.weight", 2)[1], hidden),
        "cross_attention_dim": text[1],
        "cross_attention_dim_t5": _shape(shapes, "text_embedder.linear_1.weight", 2)[1],
        "pooled_projection_dim": _shape(shapes, "time_extra_emb.pooler.c_proj.weight", 2)[0],
        "text_len": HUNYUAN_DIT_TOKENS,
        "text_len_t5": text[0] - HUNYUAN_DIT_TOKENS,
        "use_style_cond_and_image_meta_size": "time_extra_emb.style_embedder.weight" in shapes,
    }


def _blocks(shapes: Shapes, head: int, hidden: int) -> Config:
    if not head or hidden % head:
        raise UnknownArchitecture(f"ControlNet: found head width {head}, expected a divisor of {hidden}")
    return {
        "num_layers": len(ShapeReader(shapes).numbers("transformer_blocks.")),
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
    }


def _hidden(shapes: Shapes, embedding: str) -> int:
    return _shape(shapes, f"{embedding}.weight", 2)[0]


def _pooled(shapes: Shapes) -> int:
    return _shape(shapes, "time_text_embed.text_embedder.linear_1.weight", 2)[1]


def _shape(shapes: Shapes, key: str, dimensions: int) -> Shape:
    if len(shapes.get(key, ())) != dimensions:
        found = f"shape {shapes[key]}" if key in shapes else "no such tensor"
        expected = f"expected a tensor with {dimensions} dimensions"
        raise UnknownArchitecture(f"ControlNet: {key}: found {found}, {expected}")
    return shapes[key]
