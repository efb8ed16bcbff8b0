"""Tiny upscalers in every key layout in circulation, with weights and an image that follow from formulas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

CHANNELS, GROWTH, BLOCKS = 8, 32, 2

#: layout -> (doublings, input channels)
LAYOUTS: Mapping[str, tuple[int, int]] = {
    "esrgan_old_4x": (2, 3),
    "esrgan_old_1x": (0, 3),
    "esrgan_old_8x": (3, 3),
    "esrgan_plus_4x": (2, 3),
    "bsrgan_4x": (2, 3),
    "bsrgan_2x": (1, 3),
    "realesrgan_4x": (2, 3),
    "realesrgan_2x": (2, 12),
    "realesrgan_1x": (2, 48),
    "compact_4x": (4, 3),
    "compact_2x": (2, 3),
}


def tiny_state(layout: str) -> dict[str, Tensor]:
    """Return the tensors of a file in this layout."""
    return {key: _values(place, shape) for place, (key, shape) in enumerate(_shapes(layout))}


def picture(height: int = 6, width: int = 7) -> Tensor:
    """Return an image with values from 0 to 1, [1, 3, height, width]; the sides are multiples of nothing."""
    return (torch.arange(3 * height * width, dtype=torch.float32) * 0.37).sin().view(1, 3, height, width) / 2 + 0.5


def _values(place: int, shape: tuple[int, ...]) -> Tensor:
    count = int(torch.tensor(shape).prod())
    inputs = count // shape[0]
    numbers = (torch.arange(count, dtype=torch.float64) * 1.7 + place).sin() * (1.2 / inputs**0.5)
    return numbers.float().view(shape)


def _shapes(layout: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    doublings, read = LAYOUTS[layout]
    if layout.startswith("compact"):
        yield from _conv("body.0", CHANNELS, 3)
        for number in range(3):
            yield f"body.{2 * number + 1}.weight", (CHANNELS,)
            out = 3 * doublings**2 if number == 2 else CHANNELS
            yield from _conv(f"body.{2 * number + 2}", out, CHANNELS)
        return
    is_old, is_new = layout.startswith("esrgan"), layout.startswith("realesrgan")
    last = 3 * doublings + 2
    yield from _conv("model.0" if is_old else "conv_first", CHANNELS, read)
    for block in range(BLOCKS):
        for dense in (1, 2, 3):
            trunk = "model.1.sub" if is_old else "body" if is_new else "RRDB_trunk"
            stem = f"{trunk}.{block}.{'rdb' if is_new else 'RDB'}{dense}"
            for conv in range(1, 6):
                key = f"{stem}.conv{conv}" + (".0" if is_old else "")
                yield from _conv(key, CHANNELS if conv == 5 else GROWTH, CHANNELS + (conv - 1) * GROWTH)
            if layout.startswith("esrgan_plus"):
                yield f"{stem}.conv1x1.weight", (GROWTH, CHANNELS, 1, 1)
    yield from _conv(f"model.1.sub.{BLOCKS}" if is_old else "conv_body" if is_new else "trunk_conv", CHANNELS, CHANNELS)
    for number in range(1, doublings + 1):
        key = f"model.{3 * number}" if is_old else f"conv_up{number}" if is_new else f"upconv{number}"
        yield from _conv(key, CHANNELS, CHANNELS)
    yield from _conv(f"model.{last}" if is_old else "conv_hr" if is_new else "HRconv", CHANNELS, CHANNELS)
    yield from _conv(f"model.{last + 2}" if is_old else "conv_last", 3, CHANNELS)


def _conv(key: str, out: int, read: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{key}.weight", (out, read, 3, 3)
    yield f"{key}.bias", (out,)
