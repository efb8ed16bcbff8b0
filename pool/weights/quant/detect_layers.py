"""Detects the quantized layers of a file and their formats from names, shapes and markers. Torch-free.

Knows the published conventions: a `comfy_quant` marker next to a layer's weight (JSON as bytes), the
`_quantization_metadata` entry of a safetensors header, the older `scaled_fp8` files, with other names of parts, and
the `quant_state` of the 4-bit layers of bitsandbytes. Checks that every layer is stored as its format requires. Reads
no weights.
Source: comfyui-behaviour facts, section 2 (`convert_old_quants`, `detect_layer_quantization`).
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from modelpool.pool.files.formats.safetensors_file import Header, stored_bytes
from modelpool.pool.values.core.errors import BadQuantization, counted, format_bytes, unknown_name
from modelpool.pool.weights.quant.formats import (
    BITSANDBYTES,
    BITSANDBYTES_ABSMAX,
    BITSANDBYTES_NESTED_ABSMAX,
    BITSANDBYTES_NESTED_MAP,
    BITSANDBYTES_STATE,
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    BLOCKS_OF,
    EITHER_SCALE,
    FORMATS,
    FULL_PRECISION,
    INPUT_SCALE,
    LLM_INT8,
    LLM_INT8_SCALE,
    SCALED_GGML,
    WEIGHT,
    WEIGHT_SCALE,
    Format,
    Shape,
    misfit,
    rotates,
)
from modelpool.pool.weights.quant.unmarked_scales import (
    ACTIVATION_SCALES,
    EIGHT_BIT_FLOATS,
    INTEGERS,
    SCALE_ENDS,
    SCALE_INPUT,
    SCALE_INVERSE,
    SCALE_WEIGHT,
    StoredTensor,
    block_sizes,
    scales_of_codes,
    weight_of_activation_scale,
    weight_of_scale,
)

_LOG = logging.getLogger(__name__)

#: larger than any dimension of a weight, and than any block of bitsandbytes
MAX_SIZE, MAX_BLOCK = 1 << 40, 1 << 16
#: what bitsandbytes notes besides the settings that are used here
_BITSANDBYTES_NOTES = frozenset({"quant_type", "dtype", "nested_dtype"})

MARKER = "comfy_quant"
METADATA_KEY = "_quantization_metadata"
#: larger tensors are no markers
MAX_MARKER_BYTES = 1 << 16

_OLD_MARKER = "scaled_fp8"
#: format of a weight with a scale, by its dtype (the dtype of the marker of an old file is unreliable)
_OLD_FORMATS = EIGHT_BIT_FLOATS
_INT8 = "int8_tensorwise"
#: type of scales that are powers of 2
_POWERS = "F8_E8M0"
#: tensor beside a weight of LLM.int8: the order of its codes in memory, which files keep by rows
_LLM_INT8_LAYOUT = "weight_format"
#: configuration of a transformers model: how it is quantized, and the size of blocks
_CONFIGURATION, _BLOCK_SIZE = "quantization_config", "weight_block_size"
_NUMBERS: Mapping[str, str] = MappingProxyType({"F16": "<e", "F32": "<f", "F64": "<d"})


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """One quantized weight of a file.

    key       name of the weight
    format    its storage format
    settings  of the format, including those that the marker leaves out
    marker    JSON text that describes the layer, from the file or equivalent to its description
    parts     name of each part and its key in the file
    shape     of the weight, padding included
    other     keys that describe the layer and hold none of its parts
    """

    key: str
    format: Format
    settings: Mapping[str, object]
    marker: str
    parts: Mapping[str, str]
    shape: Shape
    other: tuple[str, ...] = ()

    @property
    def scales_inputs(self) -> bool:
        """Whether kernels scale its inputs by the largest of them, from all images of a forward pass."""
        return self.format.scales_inputs and INPUT_SCALE not in self.parts

    @property
    def prefix(self) -> str:
        """Common prefix of its part names."""
        return self.key.removesuffix(WEIGHT)


def has_layers(keys: Iterable[str], prefix: str = "") -> bool:
    """Whether any layer under `prefix` is marked as quantized (as `detect_layer_quantization` decides)."""
    return any(key.startswith(prefix) and key.endswith("." + MARKER) for key in keys)


def find_layers(
    stored: Mapping[str, StoredTensor],
    read: Callable[[str], bytes],
    metadata: Mapping[str, str] | None = None,
    file: str = "state dict",
    check: bool = True,
    block: Shape | None = None,
) -> dict[str, QuantizedLayer]:
    """Return the quantized layers among `stored`, by the key of their weight.

    `read` returns the bytes of a small tensor (a marker, a single factor); `block` is the size of blocks with one
    factor that a configuration declares. Raises BadQuantization naming `file`, key,
    found and expected for a layer that does not match its description. Without `check`, parts may be missing or of
    other types and shapes.
    """
    layers = {layer.key: layer for layer in _layers(stored, read, metadata or {}, block, file)}
    _warn_of_unknown_settings(layers.values(), file)
    if not check:
        return layers
    for key in plain_factors(stored, layers):
        _expect_no_factor(key, stored, layers, read, file)
    return {key: _checked(layer, stored, file) for key, layer in layers.items()}


def _warn_of_unknown_settings(layers: Iterable[QuantizedLayer], file: str) -> None:
    """Log settings that are not known here: they may be notes of other programs, or may change the meaning."""
    settings = Counter(
        name
        for layer in layers
        for name in json.loads(layer.marker).keys() - {"format", *layer.settings, *_notes(layer)}
    )
    if settings:
        listed = ", ".join(f"{name!r} ({counted(count, 'layer')})" for name, count in sorted(settings.items()))
        _LOG.warning("%s: unknown settings of quantized layers, ignored: %s", file, listed)


def _notes(layer: QuantizedLayer) -> frozenset[str]:
    return _BITSANDBYTES_NOTES if layer.format.name in BITSANDBYTES else frozenset()


def layers_in_file(header: Header) -> dict[str, QuantizedLayer]:
    """Return the quantized layers of a safetensors file, by the key of their weight; reads markers and no weights.

    Raises BadQuantization naming the file as `find_layers` does.
    """

    def read(key: str) -> bytes:
        entry = header.tensors[key]
        if entry.storage_bytes > MAX_MARKER_BYTES:
            found = format_bytes(entry.storage_bytes)
            raise BadQuantization(f"{header.path}: {key!r}: found {found}, expected a marker or a single number")
        return stored_bytes(header, key)

    layers = find_layers(header.tensors, read, header.metadata, header.path, block=_declared_block(header))
    for layer in layers.values():
        _expect_plain_rows(layer, header)
    return layers


def _expect_plain_rows(layer: QuantizedLayer, header: Header) -> None:
    """Check that a weight with factors is stored as the factors are: not with rows in another order than theirs, nor
    with an added constant. Raises BadQuantization."""
    entry = header.tensors[layer.key]
    scale = layer.parts.get(WEIGHT_SCALE)
    if scale is None or not (entry.added or (entry.heads and header.tensors[scale].elements > 1)):
        return
    found = "an added constant" if entry.added else "rows in llama.cpp's order"
    raise BadQuantization(f"{header.path}: {layer.key!r}: found {found} beside {scale!r}, expected no scale")


def _declared_block(header: Header) -> Shape | None:
    """Return the size of blocks that the configurations of a folder declare; None if none does. Raises BadQuantization
    for several sizes, and for one that is no size."""
    declared = [
        config[_CONFIGURATION][_BLOCK_SIZE]
        for config in header.configs.values()
        if isinstance(config.get(_CONFIGURATION), dict) and config[_CONFIGURATION].get(_BLOCK_SIZE) is not None
    ]
    for size in declared:
        is_size = isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n < MAX_SIZE for n in size)
        if not is_size or size != declared[0]:
            raise BadQuantization(
                f"{header.path}: {_BLOCK_SIZE}: found {declared[0]!r} and {size!r}, expected one pair of sizes"
            )
    return tuple(declared[0]) if declared else None


def weight_shapes(header: Header) -> dict[str, Shape]:
    """Return the shapes of the weights in a file, quantization undone. Raises BadQuantization as `layers_in_file`."""
    return logical_shapes(header.shapes, layers_in_file(header))


def logical_shapes(shapes: Mapping[str, Shape], layers: Mapping[str, QuantizedLayer]) -> dict[str, Shape]:
    """Return `shapes` as for the unquantized model: weights have their logical shapes, other parts are left out."""
    inner = {key for each in layers.values() for key in (*each.parts.values(), *each.other)}
    inner |= plain_factors(shapes, layers)
    return {
        key: layers[key].shape if key in layers else shape
        for key, shape in shapes.items()
        if key in layers or (key not in inner and not is_old_marker(key))
    }


def plain_factors(keys: Collection[str], layers: Mapping[str, QuantizedLayer]) -> set[str]:
    """Return the `keys` of scales of weights that are none of `layers`: they have no effect.

    `find_layers` has checked that scales of weights are 1; scales of activations are for 8-bit products only.
    """
    known = dict.fromkeys(keys)
    inner = {part for layer in layers.values() for part in (*layer.parts.values(), *layer.other)}
    factors = {
        key: weight_of_scale(key, known) or weight_of_activation_scale(key, known)
        for key in keys
        if key not in inner and key.endswith(SCALE_ENDS)
    }
    return {
        key
        for key, weight in factors.items()
        if weight is not None and weight not in layers and weight.rpartition(".")[2].endswith(WEIGHT)
    }


def is_old_marker(key: str) -> bool:
    """Whether `key` marks a complete file as one with scaled 8-bit floats."""
    return key == _OLD_MARKER or key.endswith("." + _OLD_MARKER)


def _layers(
    stored: Mapping[str, StoredTensor],
    read: Callable[[str], bytes],
    metadata: Mapping[str, str],
    block: Shape | None,
    file: str,
) -> Iterator[QuantizedLayer]:
    marked = {}
    for key in stored:
        if key == MARKER or key.endswith("." + MARKER):
            marked[key.removesuffix(MARKER)] = _text(read(key), key, file)
    for name, settings in _from_metadata(metadata, file).items():
        marked.setdefault(name + ".", settings)
    for prefix, text in marked.items():
        yield _marked_layer(prefix, text, stored, file)
    four_bit = [key for key in stored if f".{BITSANDBYTES_STATE}" in key or key.startswith(BITSANDBYTES_STATE)]
    described = {prefix + WEIGHT for prefix in marked} | {
        key.partition(BITSANDBYTES_STATE)[0] + WEIGHT for key in four_bit
    }
    yield from _scaled_layers(stored, read, described, block, file)
    for key in four_bit:
        yield _bitsandbytes_layer(key, read(key), stored, file)


def _text(data: bytes, key: str, file: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadQuantization(f"{file}: {key!r}: {error}, expected JSON as UTF-8 bytes") from None


def _from_metadata(metadata: Mapping[str, str], file: str) -> dict[str, str]:
    if METADATA_KEY not in metadata:
        return {}
    description = _json_object(metadata[METADATA_KEY], f"metadata {METADATA_KEY!r}", file)
    layers = description.get("layers", {})
    if not isinstance(layers, dict):
        raise BadQuantization(f"{file}: metadata {METADATA_KEY!r}: found layers {layers!r}, expected an object")
    return {name: json.dumps(settings) for name, settings in layers.items()}


def _json_object(text: str, key: str, file: str) -> dict[str, Any]:
    try:
        description = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadQuantization(f"{file}: {key}: {error}, expected JSON with the format of a layer") from None
    if not isinstance(description, dict):
        raise BadQuantization(f"{file}: {key}: found a JSON {type(description).__name__}, expected an object")
    return description


def _marked_layer(prefix: str, text: str, stored: Mapping[str, StoredTensor], file: str) -> QuantizedLayer:
    key = prefix + MARKER
    description = _json_object(text, repr(key), file)
    format_of = _format(description, key, file)
    settings = _settings(description, format_of, key, file)
    if prefix + WEIGHT not in stored:
        raise BadQuantization(f"{file}: {key!r}: marks a layer without a weight, expected {prefix + WEIGHT!r}")
    parts = {part.name: prefix + part.name for part in format_of.parts if prefix + part.name in stored}
    return _layer(prefix, format_of, settings, text, parts, stored, (key,) if key in stored else ())


def _format(description: Mapping[str, Any], key: str, file: str) -> Format:
    name = description.get("format")
    if isinstance(name, str) and name in FORMATS:
        return FORMATS[name]
    if not isinstance(name, str):
        raise BadQuantization(f"{file}: {key!r}: found format {name!r}, expected one of {', '.join(FORMATS)}")
    raise BadQuantization(f"{file}: {key!r}: {unknown_name('format', name, FORMATS)}")


def _settings(description: Mapping[str, Any], format_of: Format, key: str, file: str) -> dict[str, object]:
    settings: dict[str, object] = {**format_of.defaults, FULL_PRECISION: False}
    for name, default in settings.items():
        if name not in description:
            continue
        if type(description[name]) is not type(default) or (type(default) is int and description[name] < 1):
            raise BadQuantization(
                f"{file}: {key!r}: found {name} {description[name]!r}, expected a value such as {json.dumps(default)}"
            )
        settings[name] = description[name]
    return settings


def _scaled_layers(
    stored: Mapping[str, StoredTensor],
    read: Callable[[str], bytes],
    described: Collection[str],
    block: Shape | None,
    file: str,
) -> Iterator[QuantizedLayer]:
    """Yield the layers that have scales and are not `described` by a marker."""
    full_precision = {
        key.removesuffix(_OLD_MARKER): entry.shape == (2,) for key, entry in stored.items() if is_old_marker(key)
    }
    for beginning in full_precision:
        _expect_scales(beginning, stored, described, file)
    for key in stored:
        if key.endswith("." + SCALE_WEIGHT) and weight_of_scale(key, stored) is None:
            expected = key.removesuffix(SCALE_WEIGHT) + WEIGHT
            raise BadQuantization(f"{file}: {key!r}: a scale without a weight, expected {expected!r}")
    scales = scales_of_codes(stored, described, file)
    blocks = {key: scale for key, scale in scales.items() if _is_by_block(stored[key], scale, stored[scale])}
    sizes = block_sizes(blocks, stored, block, file)
    for key, scale in scales.items():
        full = next((full for beginning, full in full_precision.items() if key.startswith(beginning)), False)
        settings: dict[str, object] = {FULL_PRECISION: full}
        format_of = _format_of_codes(key, scale, stored, file)
        if key in blocks:
            format_of = FORMATS[BLOCKS_OF[format_of.name]]
            settings |= {BLOCK_ROWS: sizes[key][0], BLOCK_COLUMNS: sizes[key][1]}
        elif stored[scale].dtype == _POWERS and format_of.name in BLOCKS_OF:
            format_of = FORMATS[BLOCKS_OF[format_of.name]]  # powers of 2 are for blocks, of which there may be one
            settings |= {BLOCK_ROWS: int(stored[scale].shape[:1] not in ((), (1,))), BLOCK_COLUMNS: 0}
        elif format_of.name == _INT8:
            settings |= format_of.defaults
        noted = {name: value for name, value in settings.items() if name != FULL_PRECISION or value}
        noted = {} if format_of.name == _INT8 else noted
        parts = {WEIGHT: key, LLM_INT8_SCALE if format_of.name == LLM_INT8 else WEIGHT_SCALE: scale}
        other = []
        for inner in _described_beside(key, stored):
            if inner.endswith(_LLM_INT8_LAYOUT) and set(read(inner)) != {0}:
                raise BadQuantization(f"{file}: {inner!r}: found {list(read(inner))[:8]}, expected 0, codes by rows")
            if format_of.name in _OLD_FORMATS.values() and inner.endswith((SCALE_INPUT, INPUT_SCALE)):
                # a factor of 1 has no effect
                if inner.endswith(SCALE_INPUT) and _number(stored[inner], read(inner)) == 1.0:
                    other.append(inner)
                else:
                    parts[INPUT_SCALE] = inner
            else:
                other.append(inner)
        marker = json.dumps({"format": format_of.name, **noted})
        yield QuantizedLayer(key, format_of, settings, marker, parts, tuple(stored[key].shape), tuple(other))


def _is_by_block(weight: StoredTensor, name: str, scale: StoredTensor) -> bool:
    """Whether the scale `name` has a factor for each block of a matrix."""
    shape = tuple(weight.shape)
    allowed = FORMATS[SCALED_GGML].expected(shape, {})[WEIGHT_SCALE]
    is_known = name.endswith("." + LLM_INT8_SCALE) or tuple(scale.shape) in allowed
    return len(shape) == len(scale.shape) == 2 and not is_known


def _format_of_codes(key: str, scale: str, stored: Mapping[str, StoredTensor], file: str) -> Format:
    """Return the format of a weight with a scale and without a marker, unless the scale is one of blocks."""
    entry = stored[key]
    if stored[scale].dtype == _POWERS and not scale.endswith(SCALE_INVERSE):
        raise BadQuantization(
            f"{file}: {key!r}: found the scale {scale!r} of type {_POWERS} and no marker, which may be in the order of "
            f"rows or of mxfp8's tiles, expected the name {key}{SCALE_INVERSE} (by rows) or a {MARKER} marker"
        )
    if scale.endswith("." + LLM_INT8_SCALE):
        name = LLM_INT8 if entry.dtype == "I8" else ""
    elif entry.dtype in _OLD_FORMATS:
        name = _OLD_FORMATS[entry.dtype]
    elif entry.dtype == "I8":
        name = _INT8
    else:
        name = SCALED_GGML if entry.is_ggml else ""
    if not name:
        raise BadQuantization(
            f"{file}: {key!r}: found type {entry.dtype} with the scale {scale!r} and no marker, expected 8-bit floats "
            f"({' or '.join(_OLD_FORMATS)}) or I8, or a {MARKER} marker of its format"
        )
    return FORMATS[name]


def _described_beside(key: str, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Return the tensors beside the weight `key` that describe it and do not change its values."""
    if key.rpartition(".")[2] != WEIGHT:
        return []
    prefix = key.removesuffix(WEIGHT)
    names = (*ACTIVATION_SCALES, *([_LLM_INT8_LAYOUT] if prefix + LLM_INT8_SCALE in stored else []))
    return [prefix + name for name in names if prefix + name in stored]


def _bitsandbytes_layer(key: str, data: bytes, stored: Mapping[str, StoredTensor], file: str) -> QuantizedLayer:
    """Return the layer that the tensor `key` of bitsandbytes describes."""
    prefix, _, kind = key.rpartition(BITSANDBYTES_STATE)
    text = _text(data, key, file)
    state = _json_object(text, repr(key), file)
    names = {type_name: name for name, type_name in BITSANDBYTES.items()}
    if kind not in names or state.get("quant_type", kind) != kind:
        found = state.get("quant_type", kind)
        raise BadQuantization(f"{file}: {key!r}: found quant_type {found!r}, expected {' or '.join(names)}")
    if prefix + WEIGHT not in stored:
        raise BadQuantization(f"{file}: {key!r}: describes a layer without a weight, expected {prefix + WEIGHT!r}")
    shape, block, nested = state.get("shape"), state.get("blocksize"), state.get("nested_blocksize", 0)
    if not isinstance(shape, list) or not shape or not all(type(size) is int and 0 < size < MAX_SIZE for size in shape):
        raise BadQuantization(f"{file}: {key!r}: found shape {shape!r}, expected a list of sizes")
    for name, value, is_optional in (("blocksize", block, False), ("nested_blocksize", nested, True)):
        is_power = type(value) is int and 2 <= value <= MAX_BLOCK and value.bit_count() == 1
        if not is_power and not (is_optional and value == 0):
            raise BadQuantization(f"{file}: {key!r}: found {name} {value!r}, expected a power of 2 up to {MAX_BLOCK}")
    offset = state.get("nested_offset", 0.0)
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise BadQuantization(f"{file}: {key!r}: found nested_offset {offset!r}, expected a number")
    parts = {part.name: prefix + part.name for part in FORMATS[names[kind]].parts if prefix + part.name in stored}
    if nested:
        for name in (BITSANDBYTES_NESTED_ABSMAX, BITSANDBYTES_NESTED_MAP):
            if name not in parts:
                raise BadQuantization(f"{file}: {prefix + name!r}: found nothing, expected the factors of its scales")
    scales = stored[parts[BITSANDBYTES_ABSMAX]].dtype if BITSANDBYTES_ABSMAX in parts else "nothing"
    if scales != ("U8" if nested else "F32"):
        expected = "8-bit codes (U8)" if nested else "plain scales (F32)"
        raise BadQuantization(f"{file}: {prefix + BITSANDBYTES_ABSMAX!r}: found {scales}, expected {expected}")
    settings: dict[str, object] = {
        FULL_PRECISION: False,
        "shape": tuple(shape),
        "blocksize": block,
        "nested_blocksize": nested,
        "nested_offset": float(offset),
    }
    return QuantizedLayer(prefix + WEIGHT, FORMATS[names[kind]], settings, text, parts, tuple(shape), (key,))


def _expect_scales(beginning: str, stored: Mapping[str, StoredTensor], described: Collection[str], file: str) -> None:
    """Check that weights under an old marker have scales. Raises BadQuantization when none has one; logs a warning when
    some lack one: some files keep tables and convolutions as plain 8-bit floats."""
    prefixes = [
        key.removesuffix(WEIGHT)
        for key, entry in stored.items()
        if key.startswith(beginning) and key.endswith("." + WEIGHT) and entry.dtype in _OLD_FORMATS
    ]
    ends = (SCALE_WEIGHT, f"{WEIGHT}_scale", f"{WEIGHT}_scale_inv")
    without = [p for p in prefixes if p + WEIGHT not in described and not any(p + end in stored for end in ends)]
    if not without:
        return
    key = without[0] + WEIGHT
    if len(without) == len(prefixes):
        raise BadQuantization(
            f"{file}: {key!r}: found {counted(len(without), 'weight')} of scaled 8-bit floats without scales, "
            f"expected {without[0]}scale_weight"
        )
    _LOG.warning(
        "%s: %d of %d weights of scaled 8-bit floats have no scale and are used unscaled, %r of shape %s first",
        file, len(without), len(prefixes), key, tuple(stored[key].shape),
    )  # fmt: skip


def _expect_no_factor(
    key: str,
    stored: Mapping[str, StoredTensor],
    layers: Mapping[str, QuantizedLayer],
    read: Callable[[str], bytes],
    file: str,
) -> None:
    """Check that a scale of a weight that is no layer has no effect."""
    weight = weight_of_scale(key, stored)
    if weight is None:
        weight = weight_of_activation_scale(key, stored)
        assert weight is not None, key
        if stored[weight].dtype in (*_OLD_FORMATS, *INTEGERS):
            raise BadQuantization(
                f"{file}: {weight!r}: found type {stored[weight].dtype} with the scale {key!r} of its inputs and none "
                f"of its own, expected {weight}_scale"
            )
        return
    factor = _number(stored[key], read(key))
    if factor != 1.0:
        found = f"shape {tuple(stored[key].shape)}" if factor is None else f"{factor:g}"
        raise BadQuantization(
            f"{file}: {key!r}: found a scale ({found}) of a weight of type {stored[weight].dtype}, expected 1, or an "
            f"8-bit float weight ({' or '.join(_OLD_FORMATS)})"
        )


def _number(entry: StoredTensor, data: bytes) -> float | None:
    """Return the one number that a tensor holds; None if it holds several, or an unknown type."""
    if entry.dtype == "BF16" and len(data) == 2:
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    kind = _NUMBERS.get(entry.dtype)
    return float(struct.unpack(kind, data)[0]) if kind and len(data) == struct.calcsize(kind) else None


def _layer(
    prefix: str,
    format_of: Format,
    settings: Mapping[str, object],
    marker: str,
    parts: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
    other: tuple[str, ...],
) -> QuantizedLayer:
    """Return the layer as described, with the shape of its codes."""
    shape = tuple(stored[prefix + WEIGHT].shape)
    return QuantizedLayer(prefix + WEIGHT, format_of, settings, marker, parts, shape, other)


def _checked(layer: QuantizedLayer, stored: Mapping[str, StoredTensor], file: str) -> QuantizedLayer:
    """Return the layer with its weight's shape, after checking its parts against the format. Raises BadQuantization."""
    kind, parts = layer.format, layer.parts

    def wrong(name: str, found: str, expected: str) -> BadQuantization:
        key = parts.get(name, layer.prefix + name)
        return BadQuantization(f"{file}: {key!r}: found {found}, expected {expected} of a {kind.name} layer")

    for part in kind.parts:
        if part.name not in parts:
            if part.required:
                raise wrong(part.name, "nothing", f"the {part.name}")
        elif part.dtypes and stored[parts[part.name]].dtype not in part.dtypes:
            raise wrong(part.name, f"type {stored[parts[part.name]].dtype}", f"the type {' or '.join(part.dtypes)}")
    shapes = {name: tuple(stored[key].shape) for name, key in parts.items()}
    matrix = kind.expected is not EITHER_SCALE or rotates(kind.name, layer.settings)
    if matrix and len(shapes[WEIGHT]) != 2:
        raise wrong(WEIGHT, f"shape {shapes[WEIGHT]}", "two dimensions")
    shape = kind.shape_of(shapes, layer.settings)
    unfit = misfit(kind.name, shape[-1], layer.settings) if matrix else None
    if unfit:
        raise BadQuantization(f"{file}: {layer.key!r}: {unfit} of a {kind.name} layer")
    if any(size % kind.pads_to for size in shape):
        raise wrong(WEIGHT, f"shape {shapes[WEIGHT]}", f"rows and columns padded to {kind.pads_to}")
    for name, allowed in kind.expected(shape, layer.settings).items():
        if name in shapes and shapes[name] not in allowed:
            raise wrong(name, f"shape {shapes[name]}", f"the shape {' or '.join(map(str, dict.fromkeys(allowed)))}")
    extra = [key for key in _part_keys(layer.prefix, stored) if key not in (*parts.values(), *layer.other)]
    if extra:
        raise wrong(extra[0].removeprefix(layer.prefix), "a part", f"only {', '.join(kind.part_names)}")
    return replace(layer, shape=shape)


def _part_keys(prefix: str, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Return the keys that look like parts of the layer's weight in any format."""
    known = {part.name for each in FORMATS.values() for part in each.parts} - {WEIGHT}
    return [prefix + name for name in sorted(known) if prefix + name in stored]
