"""Arguments of EfficientNet V2 (`pool.models.components.common.efficientnet`) from shapes. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture

#: arguments of `efficientnet`, by name
EfficientNetConfig: TypeAlias = dict[str, Any]
#: stride of the first convolution, and of the first block of each stage: no shape states them. Source: table 4 of the
#: paper
FIRST_STRIDE, STAGE_STRIDES = 2, (1, 2, 2, 2, 1, 2)
#: pixels along one side of a cell of the result
EFFICIENTNET_CELL = FIRST_STRIDE * math.prod(STAGE_STRIDES)


def efficientnet_config(shapes: Mapping[str, Shape], prefix: str) -> EfficientNetConfig:
    """Return the arguments of `efficientnet` for tensors of `shapes` under `prefix`. Raises UnknownArchitecture."""
    first = _kernel(shapes, f"{prefix}0.0.weight")
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)\.(\d+)\.block\.")
    blocks = {(int(match[1]), int(match[2])) for key in shapes if (match := pattern.match(key))}
    layers = [sum(stage == number for stage, _ in blocks) for number in range(1, len(STAGE_STRIDES) + 1)]
    if not all(layers) or len(blocks) != sum(layers):
        found = ", ".join(map(str, sorted({stage for stage, _ in blocks}))) or "none"
        raise UnknownArchitecture(f"EfficientNet: found blocks in stages {found}; expected 1 to {len(STAGE_STRIDES)}")
    stages: list[tuple[int, int, int, bool]] = []
    width = first[0]
    for number, count in enumerate(layers, start=1):
        block = f"{prefix}{number}.0.block."
        is_fused = f"{block}2.fc1.weight" not in shapes
        # with an expansion of 1, a block of one convolution has no other layer
        last = 3 if not is_fused else int(f"{block}1.0.weight" in shapes)
        out = _kernel(shapes, f"{block}{last}.0.weight")[0]
        expansion = _kernel(shapes, f"{block}0.0.weight")[0] // width if last else 1
        stages.append((out, count, expansion, is_fused))
        width = out
    return {
        "in_channels": first[1],
        "first_channels": first[0],
        "stages": stages,
        "out_channels": _kernel(shapes, f"{prefix}{len(STAGE_STRIDES) + 1}.0.weight")[0],
    }


def _kernel(shapes: Mapping[str, Shape], key: str) -> Shape:
    """Return the shape of the kernel of a convolution. Raises UnknownArchitecture if there is none."""
    if len(shapes.get(key, ())) != 4:
        raise UnknownArchitecture(f"EfficientNet: {key}: found {shapes.get(key)}, expected a convolution")
    return shapes[key]
