"""GGUF files as converters write them, for tests: with the `gguf` package's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

KINDS = gguf.GGMLQuantizationType


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    kind: str = "Q8_0",
    architecture: str = "flux",
    *,
    entries: Mapping[str, Any] | None = None,
    part_tensors: int = 0,
) -> None:
    """A file of these tensors: matrices with rows that fill blocks as `kind`, other weights in float32. Convolutions
    with rows that fill no block are written flat beside the shape that they had, those of videos as they are.

    `entries` are written beside them, each as the kind of value that it is, None for one that is left out; with
    `part_tensors` the file is split into parts of so many each, whose names are made of that of `path`.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    for key, value in (entries or {}).items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    values = gguf.GGML_QUANT_SIZES[KINDS[kind]][0]
    for name, tensor in tensors.items():
        numbers = tensor.detach().float().numpy()
        if numbers.ndim < 2 or numbers.ndim > 4:
            writer.add_tensor(name, numbers)
            continue
        if numbers.shape[-1] % values and numbers[0].size % values == 0:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(size) for size in numbers.shape])
            numbers = numbers.reshape(numbers.shape[0], -1)
        if numbers.shape[-1] % values:
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, gguf.quantize(numbers, KINDS[kind]), raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(tensors: Mapping[str, Tensor], kind: str = "Q8_0") -> dict[str, Tensor]:
    """The values that these tensors have in such a file."""
    values, found = gguf.GGML_QUANT_SIZES[KINDS[kind]][0], {}
    for name, tensor in tensors.items():
        numbers = tensor.detach().float()
        if 1 < numbers.ndim < 5 and numbers[0].numel() % values == 0:
            rows = numbers.reshape(numbers.shape[0], -1).numpy()
            back: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = gguf.dequantize(
                gguf.quantize(rows, KINDS[kind]), KINDS[kind]
            )
            numbers = torch.from_numpy(back).reshape(tensor.shape)
        found[name] = numbers
    return found
