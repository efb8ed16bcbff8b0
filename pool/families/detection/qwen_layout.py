"""Check the tensors of the vision part of Qwen 2.5 VL and of Qwen 3 VL, and infer its configuration from their shapes.
Torch-free.

Knows names and shapes; `pool.models.components.vision.qwen` builds and runs it.

Facts that shapes do not tell, from config.json of Qwen/Qwen2.5-VL-7B-Instruct: 16 heads, windows of 112 pixels, and
full attention in every eighth block; of Qwen/Qwen3-VL-8B-Instruct: 16 heads, and the blocks with states that the first
layers of the language part read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture

Config: TypeAlias = dict[str, Any]

HEADS, WINDOW, WHOLE_EVERY = 16, 112, 8
#: pixels along a side of a patch, and patches along a side of a merged state
PATCH, MERGED = 14, 2
#: frames per patch; an image is repeated for all of them
FRAMES, CHANNELS = 2, 3
#: a weight that all of them have
SURE_KEY = "patch_embed.proj.weight"
#: measured tensors: biases, which are never stored in parts
_GATE, _LAST = "blocks.0.mlp.gate_proj.bias", "merger.mlp.2.bias"

#: Qwen 3 VL: pixels along a side of a patch, a weight that no other has, and the blocks that are read, by their number
PATCH_3 = 16
DEEP_KEY = "deepstack_merger_list.0.norm.weight"
_READ_BLOCKS: Mapping[int, tuple[int, ...]] = {24: (5, 11, 17), 27: (8, 16, 24)}
_POSITIONS, _INNER_3, _LAST_3 = "pos_embed.weight", "blocks.0.mlp.linear_fc1.bias", "merger.linear_fc2.bias"


def qwen_vision_config(named: Mapping[str, Shape]) -> Config:
    """Return the arguments of its configuration, from the shapes of all its tensors under the names of its module.

    Raises UnknownArchitecture unless a possible Qwen 2.5 VL vision part has exactly these tensors.
    """
    width, depth = _width_and_depth(named, (_GATE, _LAST), "Qwen 2.5 VL", PATCH)
    inner, out = named[_GATE][0], named[_LAST][0]
    if why := difference(named, dict(_tensors(depth, width, inner, out))):
        raise UnknownArchitecture(f"{why} in one with {depth} blocks of width {width}")
    return {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": HEADS,
        "in_channels": CHANNELS,
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "spatial_merge_size": MERGED,
        "window_size": WINDOW,
        "out_hidden_size": out,
        "fullatt_block_indexes": [block for block in range(depth) if block % WHOLE_EVERY == WHOLE_EVERY - 1],
    }


def _width_and_depth(named: Mapping[str, Shape], keys: Sequence[str], model: str, patch: int) -> tuple[int, int]:
    """Return the states of a patch and the number of blocks of a vision part that has all `keys`. Raises
    UnknownArchitecture, which names the `model`."""
    missing = [key for key in (SURE_KEY, *keys) if not named.get(key)]
    if missing:
        raise UnknownArchitecture(f"found no {missing[0]}, which every {model} has")
    patches = named[SURE_KEY]
    expected = (*patches[:1], CHANNELS, FRAMES, patch, patch)
    if patches != expected or not patches[0] or patches[0] % (4 * HEADS):
        raise UnknownArchitecture(
            f"found {SURE_KEY} of shape {patches}, expected a multiple of {4 * HEADS} states of {CHANNELS} channels, "
            f"{FRAMES} frames and {patch}x{patch} pixels"
        )
    return patches[0], len({key.split(".")[1] for key in named if key.startswith("blocks.")})


def qwen3_vision_config(named: Mapping[str, Shape]) -> Config:
    """Return the arguments of the configuration of a Qwen 3 VL vision part. As `qwen_vision_config`."""
    keys = (_POSITIONS, _INNER_3, _LAST_3, DEEP_KEY)
    width, depth = _width_and_depth(named, keys, "Qwen 3 VL", PATCH_3)
    if depth not in _READ_BLOCKS:
        raise UnknownArchitecture(f"found {depth} blocks, expected {' or '.join(map(str, _READ_BLOCKS))}")
    inner, out, positions = named[_INNER_3][0], named[_LAST_3][0], named[_POSITIONS][0]
    if math.isqrt(positions) ** 2 != positions:
        raise UnknownArchitecture(f"found {positions} positions, expected a square number")
    tensors = dict(_tensors_3(depth, width, inner, out, positions))
    if why := difference(named, tensors):
        raise UnknownArchitecture(f"{why} in one with {depth} blocks of width {width}")
    return {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": HEADS,
        "in_channels": CHANNELS,
        "patch_size": PATCH_3,
        "temporal_patch_size": FRAMES,
        "spatial_merge_size": MERGED,
        "out_hidden_size": out,
        "num_position_embeddings": positions,
        "deepstack_visual_indexes": list(_READ_BLOCKS[depth]),
    }


def difference(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> str:
    """Return the first difference between `found` and `expected` names and shapes, in words; empty if equal."""
    for key in sorted({*found, *expected}):
        if key not in found:
            return f"found no {key}, expected one of shape {expected[key]}"
        if key not in expected:
            return f"found {key}, expected no such weight"
        if found[key] != expected[key]:
            return f"found {key} of shape {found[key]}, expected {expected[key]}"
    return ""


def _tensors(depth: int, width: int, inner: int, out: int) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of all tensors."""
    yield SURE_KEY, (width, CHANNELS, FRAMES, PATCH, PATCH)
    layers = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    for block in range(depth):
        for norm in ("norm1", "norm2"):
            yield f"blocks.{block}.{norm}.weight", (width,)
        yield from linear_layers({f"blocks.{block}.{name}": shape for name, shape in layers.items()})
    merged = width * MERGED**2
    yield "merger.ln_q.weight", (width,)
    yield from linear_layers({"merger.mlp.0": (merged, merged), "merger.mlp.2": (out, merged)})


def _tensors_3(depth: int, width: int, inner: int, out: int, positions: int) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of all tensors of Qwen 3 VL."""
    yield SURE_KEY, (width, CHANNELS, FRAMES, PATCH_3, PATCH_3)
    yield "patch_embed.proj.bias", (width,)
    yield _POSITIONS, (positions, width)
    layers = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.linear_fc1": (inner, width),
        "mlp.linear_fc2": (width, inner),
    }
    for block in range(depth):
        yield from norm_layers(width, *(f"blocks.{block}.{norm}" for norm in ("norm1", "norm2")))
        yield from linear_layers({f"blocks.{block}.{name}": shape for name, shape in layers.items()})
    merged = width * MERGED**2
    deep = [f"deepstack_merger_list.{number}" for number in range(len(_READ_BLOCKS[depth]))]
    for merger in ("merger", *deep):
        yield from norm_layers(width if merger == "merger" else merged, f"{merger}.norm")
        yield from linear_layers({f"{merger}.linear_fc1": (merged, merged), f"{merger}.linear_fc2": (out, merged)})


def norm_layers(width: int, *names: str) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of the tensors of norms of this width."""
    for name in names:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)


def linear_layers(layers: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of weights and biases of `layers`: weight shapes by layer."""
    for name, shape in layers.items():
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]
