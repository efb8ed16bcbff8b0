"""Finds the scales of weights that no marker describes: by the names in use, the types and the shapes. Torch-free.

A scale is a tensor beside a weight: `scale_weight` of ComfyUI's older files, `weight_scale` of ModelOpt and
compressed-tensors, `weight_scale_inv` of DeepSeek's and transformers' files, `SCB` of bitsandbytes. All of them are
multiplied with the codes; the `inv` of DeepSeek names the inverse of the factor that was used to quantize. A weight has
one for all of it, one for each row, or one for each block.

Scales of activations (`input_scale`, `scale_input`, `activation_scale`, `output_scale`) are for 8-bit products only:
inputs are divided by it, rounded, and the product is multiplied by it. They have no effect on products with unpacked
weights.
Source: comfyui-behaviour facts, section 2; DeepSeek-V3 (`weight_dequant`, MIT); `FP8Linear` of transformers 5.23;
the formats of compressed-tensors 0.12 (Apache-2.0).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from modelpool.pool.values.core.errors import BadQuantization
from modelpool.pool.weights.quant.formats import INPUT_SCALE, LLM_INT8_SCALE, WEIGHT, Shape

#: the older name of a scale; its layer has no other part of that name
SCALE_WEIGHT, SCALE_INPUT = "scale_weight", "scale_input"
#: what follows the name of a weight in the name of its scale
SCALE_INVERSE = "_scale_inv"
_AFTER_WEIGHT = (SCALE_INVERSE, "_scale")
#: scales of activations, after the prefix of a layer
ACTIVATION_SCALES = (SCALE_INPUT, INPUT_SCALE, "activation_scale", "output_scale", "scale_output")
#: endings of the names of scales of weights, the first of which are parts of a layer, and of all scales
_OF_LAYER = ("." + SCALE_WEIGHT, "." + LLM_INT8_SCALE)
_WEIGHT_SCALE_ENDS = (*_OF_LAYER, *_AFTER_WEIGHT)
SCALE_ENDS = (*_WEIGHT_SCALE_ENDS, *("." + name for name in ACTIVATION_SCALES))
#: types of codes, unless the weight has no scale: plain 8-bit floats
EIGHT_BIT_FLOATS: Mapping[str, str] = MappingProxyType({"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"})
INTEGERS = ("I8", "U8")
#: names that say scale or zero point, in the last part of a key; the largest size of inputs or outputs has no effect
_SAYS_SCALE = re.compile(
    r"scale|absmax|(?<!input_)(?<!output_)(?<!activation_)amax|scb$|zero_?point|(^|_)q?zeros?$|(^|_)zp$",
    re.IGNORECASE,
)
#: names that say nothing else, in any part
_IS_SCALE = re.compile(
    r"_?(weights?_?)?(scales?(_inv)?|absmax|amax|scb|q?zeros?|zero_?points?|zp)(_?weights?)?", re.IGNORECASE
)
#: modules that quantize a weight; their parent has it
_IS_QUANTIZER = re.compile(r"_?quantizer", re.IGNORECASE)
_QUANTIZES_VALUES = re.compile(r"(input|output|act|[a-z]_bmm)", re.IGNORECASE)
#: the size of blocks that files use unless others fit
_USUAL_BLOCK = 128


class StoredTensor(Protocol):
    """Description of a stored tensor; `safetensors_file.TensorEntry` is one."""

    @property
    def dtype(self) -> str:
        """safetensors' name of its dtype."""

    @property
    def shape(self) -> Shape:
        """Its shape."""

    @property
    def is_ggml(self) -> bool:
        """Whether it is in a GGUF file."""

    @property
    def path(self) -> str:
        """The file that contains it, if there are several."""


def are_codes(entry: StoredTensor) -> bool:
    """Whether a scale of the tensor must be applied: it has 8 bits, or is in a GGUF file, where weights of any type
    were converted without their scales."""
    return entry.dtype in EIGHT_BIT_FLOATS or entry.dtype in INTEGERS or entry.is_ggml


def weight_of_scale(key: str, keys: Mapping[str, object]) -> str | None:
    """Return the tensor among `keys` that `key` scales by its name; None if there is none."""
    if not key.endswith(_WEIGHT_SCALE_ENDS):
        return None
    if key.endswith(_OF_LAYER):
        stem = key.rpartition(".")[0]
        return next((weight for weight in (f"{stem}.{WEIGHT}", stem) if weight in keys), None)
    end = next((end for end in _AFTER_WEIGHT if key.endswith(end)), "")
    named = key.removesuffix(end)
    # factors of LoRAs have no "weight" in their names
    return next((weight for weight in (named, named.removesuffix("." + WEIGHT)) if weight in keys), None)


def weight_of_activation_scale(key: str, keys: Mapping[str, object]) -> str | None:
    """Return the weight among `keys` of the layer with `key` as a scale of its activations; None if there is none."""
    module, _, name = key.rpartition(".")
    weight = f"{module}.{WEIGHT}"
    return weight if name in ACTIVATION_SCALES and weight in keys else None


def scales_of_codes(stored: Mapping[str, StoredTensor], skip: Iterable[str], file: str) -> dict[str, str]:
    """Return the key of the scale of each weight that has one and must be multiplied with it, except for the weights
    `skip`. Raises BadQuantization for a weight with several."""
    known, found = set(skip), dict[str, str]()
    for key in stored:
        weight = weight_of_scale(key, stored)
        if weight is None or weight in known or not are_codes(stored[weight]):
            continue
        if stored[weight].dtype not in (*EIGHT_BIT_FLOATS, *INTEGERS) and not weight.endswith(WEIGHT):
            continue  # a parameter of a GGUF file that is named like this
        if weight in found:
            raise BadQuantization(
                f"{file}: {weight!r}: found two scales, {found[weight]!r} and {key!r}, expected one of them"
            )
        found[weight] = key
    return found


def block_sizes(
    scales: Mapping[str, str], stored: Mapping[str, StoredTensor], declared: Shape | None, file: str
) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of the blocks of each weight that have one factor each in its scale, for `scales` by
    weight; 0 where a block has all of them. The last block of a dimension may be smaller.

    The size is the one that fits every weight of `file`: 128, or else a power of 2; `declared` is what a configuration
    says. Parts of a model in separate files may have different sizes. Raises BadQuantization, naming a weight and its
    scale, if none or several fit.
    """
    try:
        return dict.fromkeys(scales, _size_of_blocks(scales, stored, declared, file))
    except BadQuantization:
        by_path: dict[str, dict[str, str]] = {}
        for key, scale in scales.items():
            by_path.setdefault(stored[key].path, {})[key] = scale
        if len(by_path) == 1:
            raise
    sizes = (dict.fromkeys(own, _size_of_blocks(own, stored, declared, file)) for own in by_path.values())
    return {key: size for own in sizes for key, size in own.items()}


def _size_of_blocks(
    scales: Mapping[str, str], stored: Mapping[str, StoredTensor], declared: Shape | None, file: str
) -> tuple[int, int]:
    """Return the one size of blocks that all these weights have. Raises BadQuantization, also for factors that could be
    of blocks as of rows or columns in the other dimension."""
    rows, columns = (
        _block_size(
            [(key, stored[key].shape[dim], stored[scale].shape[dim]) for key, scale in scales.items()],
            declared[dim] if declared else 0,
            scales,
            file,
        )
        for dim in (0, 1)
    )
    for key, scale in scales.items():
        (high, wide), shape = stored[key].shape, tuple(stored[scale].shape)
        if (not rows and shape == (1, high)) or (not columns and shape == (wide, 1)):
            raise BadQuantization(
                f"{file}: {key!r}: found its scale {scale!r} of shape {shape} for a weight of shape {(high, wide)}, "
                f"expected {(high, 1)} for factors of rows, or blocks of rows and columns"
            )
    return rows, columns


def _block_size(counts: list[tuple[str, int, int]], declared: int, scales: Mapping[str, str], file: str) -> int:
    """Return the size of blocks in one dimension, from the size of each weight in it and its number of blocks."""

    def wrong(key: str, found: str) -> BadQuantization:
        return BadQuantization(
            f"{file}: {key!r}: {found} in its scale {scales[key]!r}, expected one factor for the weight, for each row "
            f"or for each block of a size that fits all weights of the file"
        )

    least, most = 1, 0
    for key, size, blocks in counts:
        if not 1 <= blocks <= max(size, 1):
            raise wrong(key, f"found {blocks} factors for {size} rows or columns")
        low, high = -(-size // blocks), -(-size // (blocks - 1)) - 1 if blocks > 1 else 0
        if low * (blocks - 1) >= size > 0:
            raise wrong(key, f"found {blocks} factors for {size} rows or columns")
        least, most = max(least, low), min(most, high) if most and high else most or high
    if not most:
        return 0  # one block in every weight
    first = next(key for key, _, blocks in counts if blocks > 1)
    if declared:
        if least <= declared <= most:
            return declared
        raise wrong(first, f"found blocks that are not of the declared size {declared}")
    power = 1 << (least - 1).bit_length()
    found = _USUAL_BLOCK if least <= _USUAL_BLOCK <= most else power if power <= most else 0
    divided = {size // blocks if size % blocks == 0 else 0 for _, size, blocks in counts if blocks > 1}
    if not found and len(divided) == 1:
        found = divided.pop()
    if not found and least == most:
        found = least
    if least <= found <= most:
        return found
    sizes = f"{least} to {most} rows or columns" if least <= most else "several sizes"
    raise wrong(first, f"found blocks of {sizes}")


def expect_scales_read(stored: Mapping[str, StoredTensor], unread: Iterable[str], file: str) -> None:
    """Raise BadQuantization, naming both, for a tensor of `unread` that by a part of its name is a scale or zero point
    and is beside 8-bit codes: these would be taken for numbers."""
    scales = {key: places for key in unread if (places := _places(key))}
    if not scales:
        return
    by_module: dict[str, str] = {}
    for key, entry in stored.items():
        if are_codes(entry) and key not in scales:
            by_module.setdefault(key, key)
            by_module.setdefault(key.rpartition(".")[0] or key, key)
    for scale, places in scales.items():
        for place in places:
            if place in by_module:
                raise BadQuantization(
                    f"{file}: {by_module[place]!r}: found codes of type {stored[by_module[place]].dtype} beside "
                    f"{scale!r}, whose use is not known, expected a scale under a known name: "
                    f"{SCALE_WEIGHT}, {WEIGHT}_scale or {WEIGHT}_scale_inv"
                )


def _places(key: str) -> tuple[str, ...]:
    """Return the names of tensors or modules that `key` would be a scale of, by each part of its name that says so."""
    segments = key.split(".")
    found: list[str] = []
    for at, segment in enumerate(segments):
        said, before, after = _SAYS_SCALE.search(segment), segments[:at], segments[at + 1 :]
        if said is None or (after and not _IS_SCALE.fullmatch(segment)):
            continue
        quantizer = _IS_QUANTIZER.search(before[-1]) if before else None
        if quantizer is not None and _QUANTIZES_VALUES.match(before[-1]):
            continue
        found += _named(before, segment[: said.start()])
        if quantizer is not None:
            found += _named(before[:-1], before[-1][: quantizer.start()])
        if after:  # `scales.a.weight`: named after what it is a scale of
            found += _named([*before, *after[:-1]], after[-1])
    return tuple(dict.fromkeys(found))


def _named(module: list[str], name: str) -> list[str]:
    """Return the names of the module, and of `name` in it with and without `weight`."""
    parent = ".".join(module)
    stem = f"{parent}.{name}".strip("._")
    return [place for place in (parent, stem, stem.removesuffix(WEIGHT).rstrip("._")) if place]
