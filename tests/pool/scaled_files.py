"""Files with weights that are 8-bit codes with scales, in every published spelling, and the values that they stand
for."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

File = dict[str, Tensor]

#: types of codes, and the largest of each
CODES = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
_MARKERS = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "int8": "int8_tensorwise"}
#: shapes of scales; numbers are the rows and columns of blocks
SHAPES = ("()", "(1,)", "(1, 1)", "(O,)", "(O, 1)", "32 32", "16 16", "1 16", "128 128", "0 16")
#: names that say scale or zero point and are none that files are known to use
UNKNOWN = ("scales", "scale", "qscale", "weight.scale", "zero_point", "weight_zero_point", "weight_absmax", "qzeros")
LLM_INT8 = "SCB"


@dataclass(frozen=True)
class Spelling:
    """How a file has its scaled weights.

    codes  their type
    name   of a scale, after the prefix of the layer
    shape  of a scale, as in SHAPES
    dtype  of a scale
    more   what else the file has: "comfy_quant", "scaled_fp8", a scale of activations
    """

    codes: str
    name: str
    shape: str
    dtype: torch.dtype = torch.float32
    more: str = ""


def spellings() -> list[Spelling]:
    """All combinations of types, names and shapes, each once, in an order that is the same everywhere."""
    extras = ("", "scaled_fp8", "input_scale", "activation_scale", "output_scale", "")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    found = [Spelling(codes, name, shape) for codes in CODES for name in _NAMES for shape in SHAPES]
    found = [
        Spelling(each.codes, each.name, each.shape, dtypes[n % 3], extras[n % 5] if each.codes != "int8" else "")
        for n, each in enumerate(found)
    ]
    found += [Spelling(codes, "weight_scale", shape, more="comfy_quant") for codes in CODES for shape in SHAPES[:5]]
    found += [Spelling("float8_e4m3fn", "weight_scale_inv", "32 32", torch.float8_e8m0fnu)]
    found += [Spelling("int8", LLM_INT8, "(O,)")]
    random.Random(5).shuffle(found)
    return found


_NAMES = ("scale_weight", "weight_scale", "weight_scale_inv")


def scaled(plain: Mapping[str, Tensor], how: Spelling, seed: int = 0) -> tuple[File, File]:
    """`plain` with most weights as codes, and the values that these stand for."""
    chance = random.Random(seed)
    keys = [key for key, tensor in plain.items() if is_scalable(key, tensor, how)]
    if how.more != "scaled_fp8":  # under that marker all have scales
        keys = [key for key in keys if chance.random() < 0.8] or keys[:1]
    file, values = dict(plain), {key: tensor.clone() for key, tensor in plain.items()}
    for key in keys:
        codes, scale, values[key] = _coded(plain[key].float(), how)
        prefix = key.removesuffix("weight")
        file[key], file[prefix + how.name] = codes, scale
        if how.more == "comfy_quant":
            marker = json.dumps({"format": _MARKERS[how.codes]}).encode()
            file[prefix + "comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
        elif how.more.endswith("_scale"):
            file[prefix + how.more] = torch.tensor(0.37)
    if how.more == "scaled_fp8":
        file["scaled_fp8"] = torch.zeros(0, dtype=getattr(torch, how.codes))
    return file, values


def is_scalable(key: str, tensor: Tensor, how: Spelling) -> bool:
    """Whether a weight can be stored like this."""
    dimensions = (2,) if (" " in how.shape and how.shape[0] != "(") or how.name == LLM_INT8 else (2, 3, 4, 5)
    is_weight = key.endswith(".weight") and tensor.is_floating_point() and tensor.ndim in dimensions
    return is_weight and tensor.numel() >= 4


def _coded(weight: Tensor, how: Spelling) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale as stored, and values."""
    largest, rows = CODES[how.codes], weight.reshape(weight.shape[0], -1)
    if how.shape in ("()", "(1,)", "(1, 1)"):
        factors = rows.abs().amax().reshape(1, 1)
        shape = {"()": (), "(1,)": (1,), "(1, 1)": (1, 1)}[how.shape]
    elif how.shape.startswith("(O"):
        factors = rows.abs().amax(1, keepdim=True)
        shape = (len(rows),) if how.shape == "(O,)" else (len(rows), *(1,) * (weight.ndim - 1))
    else:
        sizes = [int(size) for size in how.shape.split()]
        high, wide = (size or length for size, length in zip(sizes, rows.shape, strict=True))
        factors = _blocks(rows.abs(), high, wide)
        shape = tuple(factors.shape)
    factors = factors.clamp(min=1e-8)
    if how.name == LLM_INT8:
        stored, used = factors, factors / 127
    elif how.dtype is torch.float8_e8m0fnu:
        stored = torch.exp2((factors / largest).log2().ceil()).to(how.dtype)
        used = stored.float()
    else:
        stored = (factors / largest).to(how.dtype)
        # the least number of half precision that is not 0
        stored = stored.clamp(min=torch.finfo(how.dtype).tiny)
        used = stored.float()
    if " " in how.shape and how.shape[0] != "(":
        used = used.repeat_interleave(high, 0)[: len(rows)].repeat_interleave(wide, 1)[:, : rows.shape[1]]
    scaled_rows = (rows / used).clamp(-largest, largest)
    codes = scaled_rows.round().to(torch.int8) if how.codes == "int8" else scaled_rows.to(getattr(torch, how.codes))
    values = (codes.float() * used).reshape(weight.shape)
    return codes.reshape(weight.shape), stored.reshape(shape), values


def _blocks(sizes: Tensor, high: int, wide: int) -> Tensor:
    down, across = math.ceil(sizes.shape[0] / high), math.ceil(sizes.shape[1] / wide)
    padded = torch.zeros(down * high, across * wide)
    padded[: sizes.shape[0], : sizes.shape[1]] = sizes
    return padded.reshape(down, high, across, wide).amax((1, 3))
