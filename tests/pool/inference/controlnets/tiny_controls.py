"""Tiny ControlNets of transformers, in their published layouts, that fit the tiny models of
`tests.pool.families.tiny_transformers`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.inference.controlnets.blockwise import BlockwiseControlNet
from tests.pool.families.tiny_transformers import WIDTH, seeded
from tests.pool.models.components.diffusion import image_published
from tests.pool.zoo.case import quiet_libraries

File = dict[str, Tensor]


def flux(**more: Any) -> Any:
    """As InstantX and Shakker publish them; with `conditioning_embedding_channels` as XLabs does."""
    sizes = {
        "in_channels": 64, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2,
        "attention_head_dim": 32, "joint_attention_dim": WIDTH, "pooled_projection_dim": WIDTH,
        "axes_dims_rope": [4, 14, 14], "guidance_embeds": True, **more,
    }  # fmt: skip
    with quiet_libraries():
        return diffusers.FluxControlNetModel(**sizes)


def sd3(**more: Any) -> Any:
    """As InstantX publishes them."""
    sizes = {
        "sample_size": 16, "patch_size": 2, "in_channels": 16, "num_layers": 1, "attention_head_dim": 64,
        "num_attention_heads": 2, "joint_attention_dim": 2 * WIDTH, "caption_projection_dim": 128,
        "pooled_projection_dim": 2 * WIDTH, "out_channels": 16, "pos_embed_max_size": 64, **more,
    }  # fmt: skip
    with quiet_libraries():
        return diffusers.SD3ControlNetModel(**sizes)


def sd35_large() -> Any:
    """As Stability publishes them: without text, and without a layer for patches."""
    return sd3(
        joint_attention_dim=None, pos_embed_max_size=None, pos_embed_type=None, use_pos_embed=False,
        force_zeros_for_pooled_projection=False,
    )  # fmt: skip


def qwen_image(**more: Any) -> Any:
    """As InstantX publishes them."""
    sizes = {
        "in_channels": 64, "out_channels": 16, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32,
        "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 14, 14), **more,
    }  # fmt: skip
    with quiet_libraries():
        return diffusers.QwenImageControlNetModel(**sizes)


def qwen_blockwise(**more: Any) -> Any:
    """As DiffSynth-Studio publishes them: a block for each of the model's."""
    sizes = {"in_channels": 64, "num_layers": 2, "dim": 64, **more}
    with quiet_libraries():
        return BlockwiseControlNet(**sizes)


def hunyuan_dit(**more: Any) -> Any:
    """As its makers publish them, in the naming of diffusers."""
    sizes = {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "transformer_num_layers": 4, "num_attention_heads": 2,
        "attention_head_dim": 16, "hidden_size": 32, "mlp_ratio": 4.3637, "cross_attention_dim": WIDTH,
        "cross_attention_dim_t5": WIDTH, "pooled_projection_dim": 10, "text_len": 77, "text_len_t5": 256,
        "use_style_cond_and_image_meta_size": False, **more,
    }  # fmt: skip
    with quiet_libraries():
        return diffusers.HunyuanDiT2DControlNetModel(**sizes)


def z_image(version: str = "1", **more: Any) -> Any:
    """As its makers' partners publish them: of version 1, and of 2.0 and 2.1, which are told of a hole too."""
    refines = {"1": None, "2.0": "control_layers", "2.1": "control_noise_refiner"}[version]
    sizes = {
        "control_layers_places": [0], "control_refiner_layers_places": [0, 1], "dim": 64, "n_refiner_layers": 2,
        "n_heads": 2, "n_kv_heads": 2, "control_in_dim": 16 if version == "1" else 33,
        "add_control_noise_refiner": refines, **more,
    }  # fmt: skip
    with quiet_libraries():
        return diffusers.ZImageControlNetModel(**sizes)


def z_image_20_file(state: Mapping[str, Tensor]) -> File:
    """With the layers that it has besides and that were never trained."""
    more = {key: torch.zeros_like(tensor) for key, tensor in z_image("2.1").state_dict().items()}
    return {**{key: tensor for key, tensor in more.items() if key.startswith("control_noise_refiner.")}, **state}


def xlabs_file(state: Mapping[str, Tensor]) -> File:
    """The names of XLabs: those of Flux's authors, and some of their own."""
    own = ("controlnet_blocks.", "controlnet_x_embedder.", "input_hint_block.")
    file = image_published.flux({key: tensor for key, tensor in state.items() if not key.startswith(own)})
    for key, tensor in state.items():
        if key.startswith(own):
            name = key.replace("controlnet_x_embedder.", "pos_embed_input.").replace("_block.conv_in.", "_block.0.")
            name = name.replace("input_hint_block.conv_out.", "input_hint_block.14.")
            between = re.match(r"input_hint_block\.blocks\.(\d+)\.(.*)", name)
            file[name if between is None else f"input_hint_block.{2 * int(between[1]) + 2}.{between[2]}"] = tensor
    return file


def sd35_file(state: Mapping[str, Tensor], images: int = 2) -> File:
    """The names of Stability's files, which say the kind of their images: 1 is edges, 2 depths."""
    names = {
        ".attn.to_out.0.": ".attn.proj.",
        ".ff.net.0.proj.": ".mlp.fc1.",
        ".ff.net.2.": ".mlp.fc2.",
        ".norm1.linear.": ".adaLN_modulation.1.",
    }
    file: File = {}
    for key, tensor in state.items():
        if ".attn.to_q." in key:
            parts = [state[key.replace("to_q", f"to_{part}")] for part in "qkv"]
            file[key.replace("to_q", "qkv")] = torch.cat(parts)
        elif ".attn.to_k." not in key and ".attn.to_v." not in key:
            for name, published in names.items():
                key = key.replace(name, published)
            file[key] = tensor
    return {**file, "control_type": torch.tensor(float(images))}


def as_it_is(state: Mapping[str, Tensor]) -> File:
    return dict(state)


def write(
    path: Path,
    make: Callable[[], Any],
    seed: int = 0,
    publish: Callable[[Mapping[str, Tensor]], File] = as_it_is,
) -> Any:
    """A file of a ControlNet with random weights; and the module of diffusers with these."""
    module = seeded(make, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous().clone() for key, tensor in publish(module.state_dict()).items()}, path)
    return module
