"""Arguments of diffusers' video transformers, from recognised sizes and shapes. Torch-free.

Shapes are those of the parameters, in diffusers' names. Facts that shapes do not tell are constants, with their source.
"""

from __future__ import annotations

import math
from typing import Any

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.detection.layouts.shape_sizes import Config
from modelpool.pool.families.parts.forward import Arguments, Shapes

#: width of a head of Wan in every published size; its norms are as wide as the model. A narrower model has one head
WAN_HEAD_WIDTH = 128
#: Hunyuan's positions: an eighth of a head is rotated by time, the rest by height and width. Source: 16, 56, 56 of
#: 128
HUNYUAN_TIME_SHARE = 8
#: Scale of positions relative to the base size: time, height, width. By what tells the models apart: learned
#: positions (the first Cosmos), a channel for first frames, width of more than 4096. Source: diffusers'
#: scripts/convert_cosmos_to_diffusers.py
_COSMOS_SCALES: dict[tuple[bool, bool, bool], tuple[float, float, float]] = {
    (True, False, False): (2.0, 1.0, 1.0),
    (True, True, False): (2.0, 1.0, 1.0),
    (True, False, True): (2.0, 2.0, 2.0),
    (True, True, True): (2.0, 2.0, 2.0),
    (False, False, False): (1.0, 4.0, 4.0),
    (False, False, True): (1.0, 4.0, 4.0),
    (False, True, False): (1.0, 3.0, 3.0),
    (False, True, True): (20 / 24, 2.0, 2.0),
}
#: Predict 2.5, which reads wider texts through a projection, has the same scale at both its sizes. Source: as above
_COSMOS_25_SCALE = (1.0, 3.0, 3.0)
_COSMOS_WIDE = 4096
#: largest latent of Predict 2, which has no position table: frames, height, width. Source: as above
COSMOS_LARGEST = (128, 240, 240)


def wan_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.WanTransformer3DModel`."""
    sizes: dict[str, Any] = dict(found)
    width = sizes["dim"]
    heads = max(1, width // WAN_HEAD_WIDTH)
    patch = sizes["patch_size"]
    image = shapes.get("condition_embedder.image_embedder.norm1.weight")
    positions = shapes.get("condition_embedder.image_embedder.pos_embed")
    return {
        "patch_size": patch,
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "in_channels": sizes["in_dim"],
        "out_channels": shapes["proj_out.weight"][0] // math.prod(patch),
        "text_dim": sizes["text_dim"],
        "freq_dim": sizes["freq_dim"],
        "ffn_dim": sizes["ffn_dim"],
        "num_layers": sizes["num_layers"],
        "cross_attn_norm": sizes["cross_attn_norm"],
        "qk_norm": "rms_norm_across_heads" if sizes["qk_norm"] else None,
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": shapes["blocks.0.attn2.add_k_proj.weight"][1] if image else None,
        "pos_embed_seq_len": positions[1] if positions else None,
    }


def wan_vace_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.WanVACETransformer3DModel`."""
    layers, extra = found["num_layers"], found["vace_layers"]
    if not isinstance(layers, int) or not isinstance(extra, int) or not extra or layers % extra:
        raise UnknownArchitecture(f"Wan VACE: found {extra} control blocks, expected a part of {layers}")
    return wan_config(found, shapes) | {
        "vace_layers": list(range(0, layers, layers // extra)),
        "vace_in_channels": found["vace_in_dim"],
    }


def _hunyuan(found: Config, shapes: Shapes) -> Arguments:
    sizes: dict[str, Any] = dict(found)
    hidden = sizes["hidden_size"]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    in_time, *in_space = sizes["patch_size"]
    turned = head // HUNYUAN_TIME_SHARE
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "num_attention_heads": hidden // head,
        "attention_head_dim": head,
        "num_layers": sizes["depth"],
        "num_refiner_layers": len(
            {key.split(".")[3] for key in shapes if key.startswith("context_embedder.token_refiner.refiner_blocks.")}
        ),
        "mlp_ratio": shapes["transformer_blocks.0.ff.net.0.proj.weight"][0] / hidden,
        "patch_size": in_space[0],
        "patch_size_t": in_time,
        "text_embed_dim": sizes["context_in_dim"],
        "rope_axes_dim": (turned, (head - turned) // 2, (head - turned) // 2),
    }


def hunyuan_video_config(found: Config, shapes: Shapes) -> Arguments:
    """Return the arguments of `diffusers.HunyuanVideoTransformer3DModel`, for text-to-video and concatenated images."""
    sizes: dict[str, Any] = dict(found)
    joined = {"image_condition_type": "latent_concat"} if sizes["in_channels"] == 2 * sizes["out_channels"] + 1 else {}
    return {
        **_hunyuan(found, shapes),
        "num_single_layers": sizes["depth_single_blocks"],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "pooled_projection_dim": sizes["vec_in_dim"],
        **joined,
    }


def hunyuan_video_15_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.HunyuanVideo15Transformer3DModel`."""
    sizes: dict[str, Any] = dict(found)
    return {
        **_hunyuan(found, shapes),
        "text_embed_2_dim": shapes["context_embedder_2.norm.weight"][0],
        "image_embed_dim": sizes["vision_in_dim"],
        "use_meanflow": "time_embed.timestep_embedder_r.linear_1.weight" in shapes,
    }


def cosmos_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.CosmosTransformer3DModel`, of the first Cosmos and of Predict 2."""
    sizes: dict[str, Any] = dict(found)
    width = sizes["model_channels"]
    learned = bool(sizes["extra_per_block_abs_pos_emb"])
    projection = shapes.get("crossattn_proj.0.weight")
    texts: Arguments = {}
    if projection is not None:
        texts = {
            "use_crossattn_projection": True,
            "encoder_hidden_states_channels": projection[0],
            "crossattn_proj_in_channels": projection[1],
        }
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "num_attention_heads": sizes["num_heads"],
        "attention_head_dim": width // sizes["num_heads"],
        "num_layers": sizes["num_blocks"],
        "mlp_ratio": shapes["transformer_blocks.0.ff.net.0.proj.weight"][0] / width,
        "text_embed_dim": sizes["crossattn_emb_channels"],
        "adaln_lora_dim": shapes["transformer_blocks.0.norm1.linear_1.weight"][0],
        "max_size": _cosmos_largest(shapes) if learned else COSMOS_LARGEST,
        "rope_scale": _cosmos_scale(sizes, learned, projection is not None),
        "extra_pos_embed_type": "learnable" if learned else None,
        **texts,
    }


def _cosmos_largest(shapes: Shapes) -> tuple[int, int, int]:
    """Return the largest latent with positions; patches are 2 cells wide and high."""
    time, height, width = (shapes[f"learnable_pos_embed.pos_emb_{axis}"][0] for axis in "thw")
    return time, 2 * height, 2 * width


def _cosmos_scale(sizes: dict[str, Any], learned: bool, projected: bool) -> tuple[float, float, float]:
    if projected:
        return _COSMOS_25_SCALE
    goes_on = sizes["in_channels"] > sizes["out_channels"]
    return _COSMOS_SCALES[learned, goes_on, sizes["model_channels"] > _COSMOS_WIDE]
