"""Table of the quantization formats that published files use. Torch-free.

For each format: its name, the tensors that it is stored as, how their shapes follow from the weight's, and the GPU
generation from which kernels exist. Computes nothing: `pool.weights.quant.marked_codec` turns stored tensors into
values. Source of the names and layouts: comfyui-behaviour facts, sections 2 and 2.1; comfy_kitchen 0.2.40 (Apache-2.0),
its `tensor` package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]

#: the part that every format has: the quantized codes
WEIGHT = "weight"
#: calibrated factor of the inputs; used only by native kernels
INPUT_SCALE = "input_scale"
#: the 4-bit formats of bitsandbytes, with the type of each in its files
BITSANDBYTES: Mapping[str, str] = MappingProxyType({"bitsandbytes_nf4": "nf4", "bitsandbytes_fp4": "fp4"})
#: parts of a layer of bitsandbytes besides its codes: scales, table of values, and the same for quantized scales
BITSANDBYTES_ABSMAX, BITSANDBYTES_MAP = "weight.absmax", "weight.quant_map"
BITSANDBYTES_NESTED_ABSMAX, BITSANDBYTES_NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
#: beginning of the name of the tensor that describes such a layer; its 4-bit type follows
BITSANDBYTES_STATE = "weight.quant_state.bitsandbytes__"
#: setting of every format: always multiply with the unpacked weight
FULL_PRECISION = "full_precision_matrix_mult"

_FLOATS = ("F32", "F16", "BF16")
#: the part with the factors of the codes
WEIGHT_SCALE = "weight_scale"
#: formats without a published marker: a weight is its codes times the factors of their blocks, or times factors that a
#: GGUF file has beside weights of any type; and the factors of LLM.int8
BLOCKS_OF: Mapping[str, str] = MappingProxyType(
    {
        "float8_e4m3fn": "float8_e4m3fn_blocks",
        "float8_e5m2": "float8_e5m2_blocks",
        "int8_tensorwise": "int8_blocks",
        "scaled_ggml": "scaled_ggml_blocks",
    }
)
SCALED_GGML = "scaled_ggml"
LLM_INT8, LLM_INT8_SCALE = "bitsandbytes_int8", "SCB"
#: settings of formats with a factor per block: rows and columns of a block; 0 for all
BLOCK_ROWS, BLOCK_COLUMNS = "block_rows", "block_columns"


@dataclass(frozen=True, slots=True)
class FormatPart:
    """One stored tensor of a quantized layer.

    name      in the file, after the layer's prefix
    dtypes    safetensors' names of the allowed types; () for any type of a weight
    required  whether a layer without it cannot be read
    """

    name: str
    dtypes: tuple[str, ...]
    required: bool = True


@dataclass(frozen=True, slots=True)
class Format:
    """One quantization format.

    name          `format` in a layer's marker
    layout        the comfy_kitchen class that implements it
    parts         stored tensors; `weight` first
    shape_of      returns the weight's shape (padding included) from the shapes of the parts and the settings
    expected      returns allowed shapes of parts from the weight's shape and the settings; other parts may have any
    defaults      settings that change the computation, with the values used when a marker leaves them out
    group_size    values that share a scale; 0 for a scale per row or per weight
    pads_to       rows and columns are stored padded to a multiple of this
    native_from   CUDA compute capability from which kernels compute with packed weights; None: no kernels
    can_quantize  whether weights can be quantized here; otherwise the format needs calibration elsewhere
    scales_inputs  its kernels scale inputs by their largest value, unless the file has a scale for them
    """

    name: str
    layout: str
    parts: tuple[FormatPart, ...]
    shape_of: Callable[[Mapping[str, Shape], Mapping[str, object]], Shape]
    expected: Callable[[Shape, Mapping[str, object]], Mapping[str, Sequence[Shape]]]
    defaults: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    group_size: int = 0
    pads_to: int = 1
    native_from: tuple[int, int] | None = None
    can_quantize: bool = True
    scales_inputs: bool = False

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of all parts that a layer may have."""
        return tuple(part.name for part in self.parts)


def _as_stored(shapes: Mapping[str, Shape], _settings: Mapping[str, object]) -> Shape:
    return shapes[WEIGHT]


def _two_a_byte(shapes: Mapping[str, Shape], _settings: Mapping[str, object]) -> Shape:
    rows, *columns = shapes[WEIGHT]
    return (rows, *columns[:-1], columns[-1] * 2) if columns else (rows,)


def _w4a8_shape(shapes: Mapping[str, Shape], settings: Mapping[str, object]) -> Shape:
    """Codes have 4 or 6 bits; the column count follows from the group scales."""
    groups = (*shapes["weight_s_rel"], 0, 0)[1]
    return (shapes[WEIGHT][0], groups * number(settings, "group_size"))


def number(settings: Mapping[str, object], name: str) -> int:
    """Return the integer setting `name`."""
    value = settings[name]
    assert isinstance(value, int), f"{name} is {value!r}"
    return value


def round_up(count: int, multiple: int) -> int:
    """Round `count` up to a multiple of `multiple`."""
    return -(-count // multiple) * multiple


def rotates(format_name: str, settings: Mapping[str, object]) -> bool:
    """Whether groups of columns are stored rotated."""
    return "convrot_groupsize" in settings and (format_name != "int8_tensorwise" or bool(settings["convrot"]))


def misfit(format_name: str, columns: int, settings: Mapping[str, object]) -> str | None:
    """Return the problem with these settings for a weight of `columns` columns, as "found ..., expected ..."; None if
    there is none.

    A rotation is a Hadamard matrix of a power of 4; asym_w4a8_int8 has groups of 4 to 16, or of a multiple of 16;
    convrot_w4a4 multiplies 64 columns at a time.
    """
    steps: dict[str, int] = {}
    if rotates(format_name, settings):
        size = number(settings, "convrot_groupsize")
        if size < 4 or size.bit_count() != 1 or size.bit_length() % 2 == 0:
            return f"found convrot_groupsize {size}, expected a power of 4"
        steps["convrot_groupsize"] = size
    if "group_size" in settings:
        size = number(settings, "group_size")
        if format_name == "asym_w4a8_int8" and (size < 4 or (16 % size and size % 16)):
            return f"found group_size {size}, expected 4, 8 or a multiple of 16"
        steps["group_size"] = size
    if format_name == "convrot_w4a4":
        steps["its kernels' step"] = 64
    wrong = next((name for name, size in steps.items() if columns % size), None)
    return None if wrong is None else f"found {columns} columns, expected a multiple of {wrong} ({steps[wrong]})"


_ONE: tuple[Shape, ...] = ((), (1,), (1, 1))


def _scale_of_all_or_rows(shape: Shape, _settings: Mapping[str, object]) -> Mapping[str, Sequence[Shape]]:
    rows = shape[0] if shape else 1
    by_row = [(rows,), *((rows, *(1,) * n) for n in range(1, len(shape)))]
    return {"weight_scale": (*_ONE, *by_row, (1,) * len(shape)), INPUT_SCALE: _ONE}


def _blocked(group_size: int) -> Callable[[Shape, Mapping[str, object]], Mapping[str, Sequence[Shape]]]:
    """Block scales in cuBLAS's order: tiles of 128 rows and 4 blocks."""

    def expected(shape: Shape, _settings: Mapping[str, object]) -> Mapping[str, Sequence[Shape]]:
        rows, columns = shape
        scales = (round_up(rows, 128), round_up(columns // group_size, 4))
        return {
            "weight_scale": (scales, (scales[0] * scales[1],)),
            "weight_scale_2": _ONE,
            INPUT_SCALE: _ONE,
            "pre_quant_scale": ((columns,),),
        }

    return expected


def _w4a4_expected(shape: Shape, _settings: Mapping[str, object]) -> Mapping[str, Sequence[Shape]]:
    return {"weight_scale": ((shape[0],), (shape[0], 1))}


def _w4a8_expected(shape: Shape, settings: Mapping[str, object]) -> Mapping[str, Sequence[Shape]]:
    rows, columns = shape
    groups = columns // number(settings, "group_size")
    return {
        WEIGHT: ((rows, columns // 2), (rows, columns * 3 // 4)),
        "weight_s_rel": ((rows, groups),),
        "weight_s_channel": ((rows,),),
        "weight_codebook": ((16,),),
        "weight_correction": ((groups, rows),),
    }


def _awq_expected(shape: Shape, settings: Mapping[str, object]) -> Mapping[str, Sequence[Shape]]:
    groups = ((shape[1] // number(settings, "group_size"), shape[0]),)
    return {"weight_scale": groups, "weight_zeros": groups}


def _bitsandbytes_shape(_shapes: Mapping[str, Shape], settings: Mapping[str, object]) -> Shape:
    shape = settings["shape"]
    assert isinstance(shape, tuple), shape
    return shape


def _bitsandbytes_expected(shape: Shape, settings: Mapping[str, object]) -> Mapping[str, Sequence[Shape]]:
    values = math.prod(shape)
    codes, blocks = -(-values // 2), -(-values // number(settings, "blocksize"))
    nested = number(settings, "nested_blocksize")
    of_scales: dict[str, Sequence[Shape]] = {}
    if nested:
        of_scales = {BITSANDBYTES_NESTED_ABSMAX: ((-(-blocks // nested),),), BITSANDBYTES_NESTED_MAP: ((256,),)}
    return {
        WEIGHT: ((codes, 1), (1, codes)),
        BITSANDBYTES_ABSMAX: ((blocks,),),
        BITSANDBYTES_MAP: ((16,),),
        **of_scales,
    }


def _bitsandbytes(name: str) -> Format:
    return Format(
        name=name,
        layout="bitsandbytes' Params4bit",
        parts=(
            FormatPart(WEIGHT, ("U8",)),
            FormatPart(BITSANDBYTES_ABSMAX, ("F32", "U8")),
            FormatPart(BITSANDBYTES_MAP, ("F32",)),
            FormatPart(BITSANDBYTES_NESTED_ABSMAX, ("F32",), required=False),
            FormatPart(BITSANDBYTES_NESTED_MAP, ("F32",), required=False),
        ),
        shape_of=_bitsandbytes_shape,
        expected=_bitsandbytes_expected,
        defaults=MappingProxyType({"blocksize": 64, "nested_blocksize": 0, "nested_offset": 0.0, "shape": ()}),
        can_quantize=False,
    )


def _block_scales(shape: Shape, settings: Mapping[str, object]) -> Mapping[str, Sequence[Shape]]:
    rows, columns = number(settings, BLOCK_ROWS), number(settings, BLOCK_COLUMNS)
    return {WEIGHT_SCALE: ((-(-shape[0] // rows) if rows else 1, -(-shape[1] // columns) if columns else 1),)}


def _with_block_scales(name: str, dtypes: tuple[str, ...]) -> Format:
    return Format(
        name=name,
        layout="transformers' FP8Linear",
        parts=(FormatPart(WEIGHT, dtypes), FormatPart(WEIGHT_SCALE, (*_FLOATS, "F8_E8M0"))),
        shape_of=_as_stored,
        expected=_block_scales,
        defaults=MappingProxyType({BLOCK_ROWS: 128, BLOCK_COLUMNS: 128}),
        can_quantize=False,
    )


#: `expected` of formats with a scale per weight or per row; such weights may have any number of dimensions
EITHER_SCALE = _scale_of_all_or_rows

_INPUT_SCALE = FormatPart(INPUT_SCALE, ("F32", "F16", "BF16"), required=False)


def _scaled_fp8(name: str, layout: str, dtype: str) -> Format:
    return Format(
        name=name,
        layout=layout,
        parts=(FormatPart(WEIGHT, (dtype,)), FormatPart("weight_scale", _FLOATS), _INPUT_SCALE),
        shape_of=_as_stored,
        expected=EITHER_SCALE,
        native_from=(8, 9),
    )


_ALL = (
    _scaled_fp8("float8_e4m3fn", "TensorCoreFP8E4M3Layout", "F8_E4M3"),
    _scaled_fp8("float8_e5m2", "TensorCoreFP8E5M2Layout", "F8_E5M2"),
    Format(
        name="mxfp8",
        layout="TensorCoreMXFP8Layout",
        parts=(FormatPart(WEIGHT, ("F8_E4M3",)), FormatPart("weight_scale", ("F8_E8M0", "U8")), _INPUT_SCALE),
        shape_of=_as_stored,
        expected=_blocked(32),
        group_size=32,
        pads_to=32,
        native_from=(10, 0),
    ),
    Format(
        name="nvfp4",
        layout="TensorCoreNVFP4Layout",
        parts=(
            FormatPart(WEIGHT, ("U8",)),
            FormatPart("weight_scale", ("F8_E4M3",)),
            FormatPart("weight_scale_2", ("F32",)),
            _INPUT_SCALE,
            FormatPart("pre_quant_scale", _FLOATS, required=False),
        ),
        shape_of=_two_a_byte,
        expected=_blocked(16),
        group_size=16,
        pads_to=16,
        native_from=(10, 0),
        scales_inputs=True,
    ),
    Format(
        name="int8_tensorwise",
        layout="TensorWiseINT8Layout",
        parts=(FormatPart(WEIGHT, ("I8",)), FormatPart("weight_scale", _FLOATS)),
        shape_of=_as_stored,
        expected=EITHER_SCALE,
        defaults=MappingProxyType({"convrot": False, "convrot_groupsize": 256}),
        native_from=(7, 5),
    ),
    Format(
        name="convrot_w4a4",
        layout="TensorCoreConvRotW4A4Layout",
        parts=(FormatPart(WEIGHT, ("I8", "U8")), FormatPart("weight_scale", _FLOATS)),
        shape_of=_two_a_byte,
        expected=_w4a4_expected,
        defaults=MappingProxyType({"convrot_groupsize": 256, "linear_dtype": "int4"}),
        native_from=(7, 5),
    ),
    Format(
        name="asym_w4a8_int8",
        layout="AsymW4A8Int8Layout",
        parts=(
            FormatPart(WEIGHT, ("I8", "U8")),
            FormatPart("weight_s_rel", ("F8_E4M3", "F32")),
            FormatPart("weight_s_channel", ("F32",)),
            FormatPart("weight_codebook", ("F32",), required=False),
            FormatPart("weight_correction", _FLOATS, required=False),
        ),
        shape_of=_w4a8_shape,
        expected=_w4a8_expected,
        defaults=MappingProxyType({"group_size": 16, "convrot_groupsize": 256}),
        group_size=16,
        native_from=(8, 0),
    ),
    Format(
        name="awq_w4a16",
        layout="TensorCoreAWQW4A16Layout",
        parts=(
            FormatPart(WEIGHT, ("I8", "U8")),
            FormatPart("weight_scale", _FLOATS),
            FormatPart("weight_zeros", _FLOATS),
        ),
        shape_of=_two_a_byte,
        expected=_awq_expected,
        defaults=MappingProxyType({"group_size": 64}),
        group_size=64,
        can_quantize=False,
    ),
    *map(_bitsandbytes, BITSANDBYTES),
    Format(
        name=LLM_INT8,
        layout="bitsandbytes' Int8Params",
        parts=(FormatPart(WEIGHT, ("I8",)), FormatPart(LLM_INT8_SCALE, _FLOATS)),
        shape_of=_as_stored,
        expected=lambda shape, _settings: {LLM_INT8_SCALE: ((shape[0],),)},
        can_quantize=False,
    ),
    Format(
        name=SCALED_GGML,
        layout="weights of a GGUF file with a scale",
        parts=(FormatPart(WEIGHT, ()), FormatPart(WEIGHT_SCALE, _FLOATS)),
        shape_of=_as_stored,
        expected=EITHER_SCALE,
        can_quantize=False,
    ),
    _with_block_scales("float8_e4m3fn_blocks", ("F8_E4M3",)),
    _with_block_scales("float8_e5m2_blocks", ("F8_E5M2",)),
    _with_block_scales("int8_blocks", ("I8",)),
    _with_block_scales("scaled_ggml_blocks", ()),
)

FORMATS: Mapping[str, Format] = MappingProxyType({each.name: each for each in _ALL})
