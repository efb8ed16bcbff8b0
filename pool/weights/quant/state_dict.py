"""Converts state dictionaries of quantized models: stored tensors to packed weights, and back.

Knows torch; `pool.weights.quant.detect_layers` detects the quantized layers. Nothing is copied: the parts of a packed
weight are the input tensors. `save(load(x))` equals x, tensor for tensor, for the current published form; older files
and descriptions in a header's metadata are written with markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.values.core.errors import BadQuantization
from modelpool.pool.weights.ops.dtypes import TORCH_DTYPES
from modelpool.pool.weights.ops.packed import NOMINAL_DTYPE, PackedWeight, packed_weight
from modelpool.pool.weights.quant.bitsandbytes_codec import BitsAndBytesCodec, bitsandbytes_weight
from modelpool.pool.weights.quant.detect_layers import (
    MARKER,
    QuantizedLayer,
    find_layers,
    has_layers,
    is_old_marker,
    plain_factors,
)
from modelpool.pool.weights.quant.formats import BITSANDBYTES, BITSANDBYTES_STATE, WEIGHT, Shape, round_up
from modelpool.pool.weights.quant.marked_codec import QuantCodec
from modelpool.pool.weights.quant.unmarked_codec import is_scaled_codes, scaled_codes

_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in TORCH_DTYPES.items()})


@dataclass(frozen=True, slots=True)
class _StoredInfo:
    dtype: str
    shape: Shape
    is_ggml: bool = False
    path: str = ""


def detect_layer_quantization(keys: Iterable[str], prefix: str = "") -> dict[str, bool] | None:
    """Return {"mixed_ops": True} when a layer under `prefix` is marked as quantized, None when none is."""
    return {"mixed_ops": True} if has_layers(keys, prefix) else None


def layers_of(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    file: str = "state dict",
    check: bool = True,
) -> dict[str, QuantizedLayer]:
    """Return the quantized layers among `tensors`, by the key of their weight.

    Raises BadQuantization for a layer that does not match its description; without `check`, only for an unreadable
    description.
    """
    known = {key: _StoredInfo(_NAMES[t.dtype], tuple(t.shape)) for key, t in tensors.items() if t.dtype in _NAMES}
    return find_layers(known, lambda key: bytes_of(tensors[key]), metadata, file, check)


def load(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    file: str = "state dict",
    shapes: Mapping[str, Shape] | None = None,
    dtype: torch.dtype = NOMINAL_DTYPE,
) -> dict[str, Tensor]:
    """Return `tensors` with a `PackedWeight` for each quantized weight, and without the tensors that describe layers.

    metadata  of the safetensors header
    shapes    of weights that are stored padded, by key: files do not contain them. Without, the padding is part of the
              weight
    dtype     nominal dtype of packed weights

    Raises BadQuantization naming `file`, key, found and expected.
    """
    layers = layers_of(tensors, metadata, file)
    inner = {key for each in layers.values() for key in (*each.parts.values(), *each.other)}
    inner |= plain_factors(tensors, layers)
    loaded: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key in layers:
            loaded[key] = pack(layers[key], tensors, (shapes or {}).get(key), dtype, file)
        elif key not in inner and not (layers and is_old_marker(key)):
            loaded[key] = tensor
    return loaded


def pack(
    layer: QuantizedLayer,
    tensors: Mapping[str, Tensor],
    shape: Shape | None = None,
    dtype: torch.dtype = NOMINAL_DTYPE,
    file: str = "state dict",
) -> PackedWeight:
    """Return the weight of `layer` over its parts in `tensors`. `shape` is the unpadded one if it is stored padded.

    One-dimensional block scales are reshaped to rows of tiles, so that rows can be sliced. Raises BadQuantization when
    a weight of `shape` cannot be stored like that, and for scales that are not finite.
    """
    weight_shape = layer.shape if shape is None else tuple(shape)
    step = layer.format.pads_to
    if tuple(round_up(size, step) for size in weight_shape) != layer.shape:
        raise BadQuantization(
            f"{file}: {layer.key!r}: found a {layer.format.name} weight of shape {layer.shape}, expected {weight_shape}"
        )
    parts = {name: tensors[key] for name, key in layer.parts.items()}
    _expect_finite_scales(layer, parts, file)
    if layer.format.name in BITSANDBYTES:
        settings = MappingProxyType(dict(layer.settings))
        return bitsandbytes_weight(layer.format.name, settings, layer.marker, parts, weight_shape, dtype)
    if is_scaled_codes(layer.format.name, layer.settings):
        return scaled_codes(layer.format.name, layer.settings, parts, weight_shape, dtype)
    flat = layer.format.pads_to > 1 and parts["weight_scale"].dim() == 1
    if flat:
        tiles = layer.format.expected(layer.shape, layer.settings)["weight_scale"][0]
        parts["weight_scale"] = parts["weight_scale"].view(tiles)
    kind = QuantCodec(layer.format, MappingProxyType(dict(layer.settings)), layer.marker, flat)
    return packed_weight(kind, parts, weight_shape, dtype)


def _expect_finite_scales(layer: QuantizedLayer, parts: Mapping[str, Tensor], file: str) -> None:
    """Raise BadQuantization, naming it, for a part beside the codes with an infinite or undefined number: whole rows or
    blocks of the weight would be undefined. Zero and negative numbers are valid."""
    for name, part in parts.items():
        if name == WEIGHT or isinstance(part, PackedWeight) or part.is_meta or not part.is_floating_point():
            continue
        numbers = part.float() if part.itemsize == 1 else part  # 8-bit floats have no arithmetic
        wrong = ~torch.isfinite(numbers)
        if bool(wrong.any()):
            raise BadQuantization(
                f"{file}: {layer.parts[name]!r}: found {numbers[wrong][0].item()}, expected finite scales of "
                f"{layer.key!r}"
            )


def save(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with each packed weight replaced by its parts and marker, in the published form.

    Raises BadQuantization for a packed weight with a name that does not end in "weight", and for formats that
    safetensors files do not have.
    """
    saved: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not isinstance(tensor, PackedWeight):
            saved[key] = tensor
            continue
        prefix = key.removesuffix("weight")
        if isinstance(tensor.codec, BitsAndBytesCodec) and (key == "weight" or key.endswith(".weight")):
            saved.update({prefix + name: part for name, part in tensor.codec.stored(tensor.parts).items()})
            state = prefix + BITSANDBYTES_STATE + BITSANDBYTES[tensor.codec.name]
            saved[state] = marker_tensor(tensor.codec.marker)
            continue
        if not isinstance(tensor.codec, QuantCodec) or not (key == "weight" or key.endswith(".weight")):
            raise BadQuantization(
                f"{key!r}: found a weight packed as {tensor.codec.name}, expected a name ending in '.weight' and one "
                f"of the formats of safetensors files"
            )
        saved.update({prefix + name: part for name, part in tensor.parts.items()})
        if tensor.codec.flat_scales:
            saved[prefix + "weight_scale"] = tensor.parts["weight_scale"].reshape(-1)
        saved[prefix + MARKER] = marker_tensor(tensor.codec.marker)
    return saved


def convert_old_quants(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, file: str = "state dict"
) -> dict[str, Tensor]:
    """Return `tensors` of an older `scaled_fp8` file, or of one that is described in its header, with markers and new
    names.

    Other tensors are returned unchanged. Input factors of 1 and the marker of the file are dropped. Only names change,
    so only the descriptions are checked: raises BadQuantization where they cannot be read.
    """
    layers = layers_of(tensors, metadata, file, check=False)
    renamed = {old: each.prefix + new for each in layers.values() for new, old in each.parts.items()}
    dropped = {key for each in layers.values() for key in each.other}
    converted = {
        renamed.get(key, key): tensor
        for key, tensor in tensors.items()
        if key not in dropped and not is_old_marker(key)
    }
    for layer in layers.values():
        converted[layer.prefix + MARKER] = marker_tensor(layer.marker)
    return converted


def marker_tensor(text: str) -> Tensor:
    """Return a marker as stored: the UTF-8 bytes of its JSON text."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a small tensor, in storage order."""
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
