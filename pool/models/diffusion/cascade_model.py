"""Stable Cascade's stages: class arguments, key names in their files, and calls.

Stage C (prior) generates small latents from a text, stage B (decoder) larger ones from those. Facts that shapes do not
tell are constants, with their source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.detection.layouts.shape_sizes import Config
from modelpool.pool.families.parts.forward import Arguments, ModelKwargs, Shapes, config_of, sample_of
from modelpool.pool.models.diffusion.architecture import DiffusionArchitecture

#: cells of a patch of stage B; stage C reads cells. Source: the config.json of stabilityai/stable-cascade
STAGE_B_PATCH = 2
#: kinds of blocks, by a tensor that only that kind has
_BLOCKS = (
    ("depthwise.weight", "SDCascadeResBlock"),
    ("mapper.weight", "SDCascadeTimestepBlock"),
    ("kv_mapper.1.weight", "SDCascadeAttnBlock"),
)
#: optional further time conditions of a block, and their tensors
_TIME_CONDITIONS = ("sca", "crp")
#: parts of the published tensor, and the parameters that they become
_THIRDS = ("to_q", "to_k", "to_v")
_RENAMED = (
    (".attention.attn.out_proj.", ".attention.to_out.0."),
    (".attention.attn.to_", ".attention.to_"),
)


class StableCascadeUNet(diffusers.StableCascadeUNet):  # type: ignore[misc]
    """diffusers' class with the time embedding in full precision, which 16 bits cannot represent."""

    def _down_encode(self, x_BCHW: Tensor, time_embedding: Tensor, clip: Tensor) -> Any:
        return super()._down_encode(x_BCHW, time_embedding.to(x_BCHW.dtype), clip)

    def _up_decode(self, levels: list[Tensor], time_embedding: Tensor, clip: Tensor) -> Any:
        return super()._up_decode(levels, time_embedding.to(levels[0].dtype), clip)


def cascade_config(found: Config, shapes: Shapes) -> Arguments:
    """Return the arguments of `diffusers.StableCascadeUNet`, of either stage."""
    sizes: dict[str, Any] = dict(found)
    widths: tuple[int, ...] = sizes["c_hidden"]
    is_c = sizes["stable_cascade_stage"] == "c"
    patch = 1 if is_c else STAGE_B_PATCH
    pooled_rows, pooled_width = shapes["clip_txt_pooled_mapper.weight"]
    kv = shapes[_first(shapes, ".kv_mapper.1.weight")]
    time = _first(shapes, ".mapper.weight").removesuffix("mapper.weight")
    down, up = sizes["blocks"]
    return {
        "in_channels": shapes["embedding.1.weight"][1] // patch**2,
        "out_channels": shapes["clf.1.weight"][0] // patch**2,
        "patch_size": patch,
        "timestep_ratio_embedding_dim": shapes[f"{time}mapper.weight"][1],
        "timestep_conditioning_type": tuple(c for c in _TIME_CONDITIONS if f"{time}mapper_{c}.weight" in shapes),
        "conditioning_dim": kv[1],
        "clip_seq": pooled_rows // kv[1],
        "block_out_channels": widths,
        # # -1 for a level without attention
        "num_attention_heads": tuple(heads if heads < 0 else max(1, heads) for heads in sizes["nhead"]),
        "down_num_layers_per_block": down,
        "up_num_layers_per_block": up,
        "down_blocks_repeat_mappers": sizes["block_repeat"][0],
        "up_blocks_repeat_mappers": sizes["block_repeat"][1],
        "block_types_per_layer": tuple(_layer(shapes, level, down[level]) for level in range(len(widths))),
        "clip_text_in_channels": shapes["clip_txt_mapper.weight"][1] if is_c else None,
        "clip_text_pooled_in_channels": pooled_width,
        "clip_image_in_channels": shapes["clip_img_mapper.weight"][1] if is_c else None,
        "effnet_in_channels": _width(shapes, "effnet_mapper.0.weight"),
        "pixel_mapper_in_channels": _width(shapes, "pixels_mapper.0.weight"),
        "kernel_size": shapes["down_blocks.0.0.depthwise.weight"][-1],
        "dropout": 0.1,
        # # one convolution per level change, or convolutions with, in no published model, an additional fold
        "switch_level": (False,) * (len(widths) - 1) if "down_downscalers.1.1.blocks.0.weight" in shapes else None,
    }


def _first(shapes: Shapes, end: str) -> str:
    """Return the first key with this ending. Raises UnknownArchitecture if there is none."""
    found = next((key for key in shapes if key.endswith(end)), None)
    if found is None:
        raise UnknownArchitecture(f"recognised as a stage of Stable Cascade, but without any tensor *{end}")
    return found


def _width(shapes: Shapes, key: str) -> int | None:
    return shapes[key][1] if key in shapes else None


def _layer(shapes: Shapes, level: int, layers: int) -> tuple[str, ...]:
    """Return the kinds of blocks in each layer of `level`."""
    kinds = {
        int(key.split(".")[2]): kind
        for key in shapes
        for end, kind in _BLOCKS
        if key.startswith(f"down_blocks.{level}.") and key.split(".", 3)[3] == end
    }
    return tuple(kinds[block] for block in sorted(kinds)[: len(kinds) // layers])


def convert_cascade(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert both stages, with queries, keys and values in one tensor as published, or separate as other programs
    write them."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        stem, found, end = key.partition("attn.in_proj_")
        if found:
            thirds = zip(_THIRDS, tensor.chunk(len(_THIRDS)), strict=True)
            converted |= {f"{stem}{name}.{end}": third for name, third in thirds}
            continue
        name = "clip_txt_pooled_mapper." + key.removeprefix("clip_mapper.") if key.startswith("clip_mapper.") else key
        for theirs, ours in _RENAMED:
            name = name.replace(theirs, ours)
        converted[name] = tensor
    return converted


def call_cascade_c(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Stage C; `level_B` is the position on its cosine schedule."""
    pooled = kwargs["pooled"]
    image = kwargs.get("image_context")
    if image is None:
        image = pooled.new_zeros(pooled.shape[0], 1, config_of(module).clip_image_in_channels)
    return sample_of(
        module(
            sample=x_BCHW,
            timestep_ratio=level_B,
            clip_text_pooled=pooled.unsqueeze(1),
            clip_text=kwargs["context"],
            clip_img=image,
            return_dict=False,
        )
    )


def call_cascade_b(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Stage B, which reads the output of stage C ("prior"); zeros on the unconditional side."""
    return sample_of(
        module(
            sample=x_BCHW,
            timestep_ratio=level_B,
            clip_text_pooled=kwargs["pooled"].unsqueeze(1),
            effnet=kwargs["prior"],
            return_dict=False,
        )
    )


def prior_channels(module: nn.Module) -> int:
    """Return the channels of stage C's latents that stage B reads."""
    return int(config_of(module).effnet_in_channels)


def empty_text(module: nn.Module, tokens: int) -> dict[str, Tensor]:
    """Return the text inputs of stage B, whose states it does not read, on the meta device, with a batch of one."""
    width = int(config_of(module).clip_text_pooled_in_channels)
    meta = torch.device("meta")
    return {"context": torch.empty((1, tokens, width), device=meta), "pooled": torch.empty((1, width), device=meta)}


_C = DiffusionArchitecture(StableCascadeUNet, cascade_config, convert_cascade, call_cascade_c)
_B = DiffusionArchitecture(StableCascadeUNet, cascade_config, convert_cascade, call_cascade_b)

CASCADE_ROWS: Mapping[str, DiffusionArchitecture] = {
    "cascade_c": _C,
    "cascade_c_lite": _C,
    "cascade_b": _B,
    "cascade_b_lite": _B,
}
