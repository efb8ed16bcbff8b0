"""The golden cases of quantized weights, with inputs made anew from their seeds. Known to tests only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from modelpool.pool.weights.quant.formats import FORMATS
from modelpool.pool.weights.quant.quantize import PER_ROW

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
NEWEST, OLDER = "quant.2026-07", "quant"

_OLD_LAYOUT = {"torch.float8_e4m3fn": "float8_e4m3fn", "torch.float8_e5m2": "float8_e5m2"}
_BY_LAYOUT = {each.layout: each.name for each in FORMATS.values()}


@dataclass(frozen=True)
class Case:
    """One weight that was quantized elsewhere.

    seed, scale  as `quantize` takes them
    expected     stored parts by name (8-bit types as bytes), `dequant`, `linear`, `linear_qq` where there is one
    """

    file: str
    name: str
    format: str
    settings: Mapping[str, object]
    seed: int | None
    scale: Tensor | None
    weight: Tensor
    x: Tensor
    bias: Tensor
    expected: Mapping[str, Tensor]
    weight_only: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"

    @property
    def parts(self) -> dict[str, Tensor]:
        """The stored weights."""
        return {name: t for name, t in self.expected.items() if name not in ("dequant", "linear", "linear_qq")}


def document(file: str) -> dict[str, Any]:
    """The golden file's description."""
    loaded: dict[str, Any] = json.loads((GOLDEN / f"{file}.json").read_text())
    return loaded


def cases(file: str) -> list[Case]:
    """The cases of a golden file."""
    tensors = safetensors.torch.load_file(GOLDEN / f"{file}.safetensors")
    return [_case(file, said, tensors) for said in document(file)["cases"]]


def as_bytes(part: Tensor) -> Tensor:
    """8-bit floats as bytes, the rest as it is."""
    return part.view(torch.uint8) if part.dtype.itemsize == 1 and part.is_floating_point() else part


def draw(shape: list[int], seed: int, scale: float, dtype: torch.dtype) -> Tensor:
    """The golden files' random numbers."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def _case(file: str, said: dict[str, Any], tensors: dict[str, Tensor]) -> Case:
    dtype = getattr(torch, said["dtype"].removeprefix("torch."))
    options, settings = said["kwargs"], {}
    for name in ("convrot", "convrot_groupsize"):
        if name in options:
            settings[name] = json.loads(options[name].lower())
    if "per_channel" in options:
        settings[PER_ROW] = True
    scale = options.get("scale")
    if scale is None and file == OLDER:
        scale = "1.0"
    prefix = said["name"] + "."
    return Case(
        file=file,
        name=said["name"],
        format=_BY_LAYOUT.get(said["layout"]) or _OLD_LAYOUT[options["dtype"]],
        settings=settings,
        seed=int(options["stochastic_rounding"]) if "stochastic_rounding" in options else None,
        scale=None if scale in (None, "recalculate") else torch.tensor(float(scale)),
        weight=draw(said["w_shape"], said["w_seed"], said["w_scale"], dtype),
        x=draw(said["x_shape"], said["x_seed"], 1.0, dtype),
        bias=draw([said["w_shape"][0]], said["bias_seed"], said["bias_scale"], dtype),
        expected={k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)},
        weight_only=said["linear"] == "weight-only",
    )
