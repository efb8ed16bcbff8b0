"""Allegro's autoencoder, for videos of every size.

Copies no weights and knows no files; see `pool.models.components.vae.vae_classes` for how it is built.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor


class AutoencoderKLAllegro(diffusers.AutoencoderKLAllegro):  # type: ignore[misc]
    """diffusers' autoencoder, which runs in overlapping tiles of time, height and width.

    The tiles are a part of the model: its norms are over a tile. diffusers leaves black what no tile reaches, and
    cannot run videos smaller than a tile. Here the last tile ends with the video, and a smaller video is one tile.
    Where diffusers' tiles fill the video, the result is equal.
    """

    def _decode(self, z: Tensor) -> Tensor:
        """Return frames before channels, as diffusers' class: [B,T,C,H,W]."""
        each = self._cell
        cells = _frame_by_frame(self.post_quant_conv, z)
        video: Tensor = self._tiled(self.decoder, cells, (1, 1, 1), each, self.config.out_channels)
        return video.transpose(1, 2).contiguous()

    def _encode(self, x: Tensor) -> Tensor:
        """Return mean and log-variance of latents."""
        moments = self._tiled(self.encoder, x, self._cell, (1, 1, 1), 2 * self.config.latent_channels)
        return _frame_by_frame(self.quant_conv, moments)

    @property
    def _cell(self) -> tuple[int, int, int]:
        """Frames, and pixels along the sides, of a latent cell."""
        side = self.spatial_compression_ratio
        return int(self.config.temporal_compression_ratio), side, side

    def _tiled(
        self,
        call: Callable[[Tensor], Tensor],
        x_BCTHW: Tensor,
        read: tuple[int, int, int],
        made: tuple[int, int, int],
        channels: int,
    ) -> Tensor:
        """Return what `call` makes of each tile, blended. `read` and `made` are lengths of a cell in its input and its
        output."""
        spans = [
            _spans(size // own, kernel // cell, stride // cell, out)
            for size, own, kernel, stride, cell, out in zip(
                x_BCTHW.shape[2:], read, self.kernel, self.stride, self._cell, made, strict=True
            )
        ]
        sides = [size // own * out for size, own, out in zip(x_BCTHW.shape[2:], read, made, strict=True)]
        result = x_BCTHW.new_zeros((x_BCTHW.shape[0], channels, *sides))
        tiles = list(itertools.product(*spans))
        # all tiles need the same memory: a dry run computes one instead of dozens
        for tile in tiles[:1] if x_BCTHW.is_meta else tiles:
            frames, rows, columns = (slice(a * own, b * own) for (a, b, _), own in zip(tile, read, strict=True))
            part = call(x_BCTHW[..., frames, rows, columns])
            for axis, (_, _, weights) in enumerate(tile):
                if weights is not None:
                    part = part * weights.to(part).reshape(-1, *[1] * (2 - axis))
            frames, rows, columns = (slice(a * out, b * out) for (a, b, _), out in zip(tile, made, strict=True))
            result[..., frames, rows, columns] += part
        return result


_Span = tuple[int, int, Tensor | None]


def _spans(cells: int, kernel: int, stride: int, length: int) -> list[_Span]:
    """Return first and last cell of each tile, and the weights of its values, `length` for each cell: they rise and
    fall in a line where tiles overlap, and add up to 1. None for the only tile."""
    if cells <= kernel:
        return [(0, cells, None)]
    count = 1 + math.ceil((cells - kernel) / stride)
    starts = [min(number * stride, cells - kernel) for number in range(count)]
    overlap = (kernel - stride) * length
    ramp = torch.arange(overlap, dtype=torch.float32) / max(overlap, 1)
    weights, total = [], torch.zeros(cells * length)
    for number, start in enumerate(starts):
        own = torch.ones(kernel * length)
        if number > 0:
            own[:overlap] *= ramp
        if number < count - 1:
            own[len(own) - overlap :] *= 1 - ramp
        weights.append(own)
        total[start * length : (start + kernel) * length] += own
    return [
        (start, start + kernel, own / total[start * length : (start + kernel) * length])
        for start, own in zip(starts, weights, strict=True)
    ]


def _frame_by_frame(convolution: Callable[[Tensor], Any], x_BCTHW: Tensor) -> Tensor:
    """Return what a convolution of images makes of each frame."""
    frames = convolution(x_BCTHW.transpose(1, 2).flatten(0, 1))
    video: Tensor = frames.unflatten(0, (x_BCTHW.shape[0], -1)).transpose(1, 2)
    return video
