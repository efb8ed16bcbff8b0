"""Check the tensors of the part of GLM-Image's language model that reads images, and infer its configuration from their
shapes. Torch-free.

It turns an image into tokens: a vision model, and a table of codes of which the nearest to each of its states is taken.
Knows names and shapes; `pool.models.components.vision.glm` builds and runs it. The number of heads, which no shape
determines, is from config.json of zai-org/GLM-Image's vision_language_encoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from modelpool.pool.families.detection.qwen_layout import difference, linear_layers, norm_layers
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture

Config: TypeAlias = dict[str, Any]

HEADS, CHANNELS = 16, 3
#: the names of both parts below one prefix
VISION, CODES = "visual.", "vqmodel."
_PATCHES, _POSITIONS = VISION + "patch_embed.proj.weight", VISION + "embeddings.position_embedding.weight"
_INNER, _CODES = VISION + "blocks.0.mlp.fc1.bias", CODES + "quantize.embedding.weight"


def glm_vision_config(named: Mapping[str, Shape]) -> tuple[Config, Config]:
    """Return the arguments of the configurations of the vision model and of the codes, from the shapes of all their
    tensors under the names of the module.

    Raises UnknownArchitecture unless a possible GLM-Image has exactly these tensors.
    """
    sizes = {_PATCHES: 4, _POSITIONS: 2, _INNER: 1, _CODES: 2}
    for key, dimensions in sizes.items():
        if len(named.get(key, ())) != dimensions:
            raise UnknownArchitecture(f"found no {key} of {dimensions} dimensions, which every GLM-Image has")
    (width, channels, patch, _), (positions, _) = named[_PATCHES], named[_POSITIONS]
    (inner,), (codes, code_width) = named[_INNER], named[_CODES]
    if not width or width % HEADS or math.isqrt(positions) ** 2 != positions:
        expected = f"a multiple of {HEADS}, and a square number"
        raise UnknownArchitecture(
            f"found {width} states and {positions} positions of a vision model, expected {expected}"
        )
    blocks = f"{VISION}blocks."
    depth = len({key.removeprefix(blocks).partition(".")[0] for key in named if key.startswith(blocks)})
    expected_tensors = dict(_tensors(depth, width, inner, patch, positions, codes, code_width))
    if why := difference(named, expected_tensors):
        raise UnknownArchitecture(f"{why} in one with {depth} blocks of width {width}")
    vision = {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": HEADS,
        "in_channels": channels,
        "image_size": math.isqrt(positions) * patch,
        "patch_size": patch,
        "spatial_merge_size": 1,
    }
    return vision, {"embed_dim": code_width, "num_embeddings": codes, "latent_channels": width}


def _tensors(
    depth: int, width: int, inner: int, patch: int, positions: int, codes: int, code_width: int
) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of all tensors."""
    yield _PATCHES, (width, CHANNELS, patch, patch)
    yield f"{VISION}patch_embed.proj.bias", (width,)
    yield _POSITIONS, (positions, width)
    layers = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.fc1": (inner, width),
        "mlp.fc2": (width, inner),
    }
    for block in range(depth):
        yield from norm_layers(width, *(f"{VISION}blocks.{block}.{norm}" for norm in ("norm1", "norm2")))
        yield from linear_layers({f"{VISION}blocks.{block}.{name}": shape for name, shape in layers.items()})
    yield _CODES, (codes, code_width)
    for name, out, taken in (("quant_conv", code_width, width), ("post_quant_conv", width, code_width)):
        yield from linear_layers({f"{CODES}{name}": (out, taken, 1, 1)})
