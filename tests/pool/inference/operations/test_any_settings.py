"""Every operation on images, masks and latents, with random settings (NaN, infinity, negative and huge numbers) and
inputs of different sizes, numbers of frames and channels: it returns what it declared, of finite numbers, or is
refused."""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from typing import Any

import numpy as np

from modelpool.pool.inference.operations.operate import OPERATIONS
from modelpool.pool.inference.operations.operation import IMAGE, LATENT, MASK, Operation, size_of_result
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import ImagePixels, Latent, Mask, VideoFrames, VideoMask

TRIES, MOST_CELLS = 200, 1 << 18
_DRAWN = np.random.default_rng(0)


def _bytes(*shape: int) -> Any:
    return _DRAWN.integers(0, 256, shape, np.uint8)


def _numbers(*shape: int) -> Any:
    return _DRAWN.standard_normal(shape, np.float32)


INPUTS: dict[str, list[Any]] = {
    IMAGE: [
        *(ImagePixels(_bytes(*shape)) for shape in ((1, 1, 3), (7, 5, 3), (5, 7, 4), (48, 40, 3))),
        *(VideoFrames(_bytes(*shape), 8.0) for shape in ((3, 7, 5, 3), (1, 4, 4, 3), (2, 3, 9, 4))),
    ],
    MASK: [
        *(Mask(_bytes(*shape)) for shape in ((1, 1), (7, 5), (48, 40))),
        *(VideoMask(_bytes(*shape)) for shape in ((3, 7, 5), (2, 2, 2))),
    ],
    LATENT: [Latent(_numbers(*shape)) for shape in ((4, 1, 1), (4, 7, 5), (4, 3, 7, 5), (16, 5, 7))],
}  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "bool": [True, False],
    "int": [0, 1, -1, 3, 7, 64, 100_000, 2**40],
    "float": [0.0, 1.0, -1.0, 0.5, 0.01, 1e-9, 1e9, math.nan, math.inf, -math.inf],
    "tuple[int, ...]": [(), (1,), (4, 8), (0, 0), (-1, 5)],
    "tuple[float, ...]": [(), (1.0,), (1.0, 0.0), (math.nan, 0.0), (0.5, 0.1, 1.0, 1.0)],
}
TEXTS: dict[str, list[str]] = {
    "method": ["nearest", "bilinear", "bicubic", "area", "nearest-exact", "lanczos", "bislerp", "y-axis: horizontally"],
    "mode": ["normal", "multiply", "screen", "overlay", "soft_light", "difference", "add", "subtract", "and", "xor"],
    "dither": ["none", "floyd-steinberg", "bayer-2"], "rotation": ["none", "90 degrees", "180 degrees"],
    "operation": ["erode", "gradient", "top_hat"], "direction": ["right", "up"], "colour": ["white", "red"],
    "plane": ["Y", "U"], "channel": ["red", "alpha"],
}  # fmt: skip


def settings_of(operation: Operation, rng: random.Random) -> dict[str, Any]:
    found = {}
    for one in dataclasses.fields(operation.params):
        if one.default is not dataclasses.MISSING and rng.random() < 0.5:
            continue
        kind = str(one.type)
        found[one.name] = rng.choice(TEXTS.get(one.name, ["x"]) if kind == "str" else VALUES[kind])
    return found


def problem_of(operation: Operation, settings: dict[str, Any], inputs: dict[str, Any]) -> str | None:
    """Faults of a result; "" for a refusal, and None for a right result."""
    try:
        params = operation.params_of(settings)
        declared = operation.size_of(params, {name: size_of_result(value) for name, value in inputs.items()})
        if declared.width * declared.height * declared.count > MOST_CELLS:
            return ""
        made = operation(params, inputs)
    except UserError:
        return ""
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    if size_of_result(made) != declared:
        return f"found {size_of_result(made)}, declared {declared}"
    if isinstance(made, Latent) and not np.isfinite(made.samples_CHW).all():
        return "numbers that are not finite"
    return None


def test_an_operation_returns_what_it_declares_or_is_refused() -> None:
    """Found: images with and without alpha that are pasted into each other, crops to a shape in which nothing was left,
    and latents of cells of no pixels."""
    rng, wrong, never = random.Random(7), [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, operation in OPERATIONS.items():
            if not set(operation.inputs.values()) <= set(INPUTS):
                continue
            is_run = False
            for _ in range(TRIES):
                inputs = {each: rng.choice(INPUTS[kind]) for each, kind in operation.inputs.items()
                          if each not in operation.optional or rng.random() < 0.5}  # fmt: skip
                settings = settings_of(operation, rng)
                found = problem_of(operation, settings, inputs)
                is_run |= found is None
                if found:
                    wrong.append(
                        (name, settings, {each: size_of_result(value) for each, value in inputs.items()}, found)
                    )
            never += [] if is_run else [name]
    assert not wrong, wrong[:5]
    assert not never, "each is run with some settings"
