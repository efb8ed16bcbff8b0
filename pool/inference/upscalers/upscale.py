"""Enlarges images with an upscaler, complete or by tiles: the stage of `UpscaleParams`.

A network enlarges by its own factor, which may be much larger than the one that is wanted. The host holds its result as
bytes, and a band of it in float32.

Shape legend: B batch, C channels, H W height and width, T frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from modelpool.pool.inference.pixels.spans import even_tile
from modelpool.pool.inference.pixels.tiled import count_tiles, run_tiled_bands
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.stage_params import (
    ImagePixels,
    Output,
    PixelArray,
    RunHooks,
    UpscaleParams,
    VideoFrames,
)
from modelpool.pool.values.core.stopping import stop_check, stop_if_asked
from modelpool.pool.values.core.task_inputs import IMAGE, TaskInputs
from modelpool.pool.values.specs.spec import ExecutionMode
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher

#: edges of tiles in pixels of the image, largest first, for images that do not fit in memory as a whole
TILES = (512, 384, 256, 192, 128, 96, 64)
#: neighbouring tiles share this fraction (1 / n) of their edge, but no less than `LEAST_OVERLAP` pixels: the networks
#: look farther, but distant pixels change little
OVERLAP_SHARE, LEAST_OVERLAP = 8, 16


def upscale_images(
    works: Sequence[UpscaleParams],
    inputs: Sequence[TaskInputs],
    upscaler: ModelPatcher,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
) -> tuple[Output, ...]:
    """Enlarge the image or video of each of `works`, which have equal sizes, in one run; the frames of a video one
    after the other. With `division.tile`, by tiles of that edge. One step for each tile of each frame. Raises
    CorruptFile for a result with NaN or infinity, and Stopped at a tile or layer."""
    work = works[0]
    tile = min(filter(None, (work.tile, 0 if division is None else division.tile)), default=0)
    sources: list[ImagePixels | VideoFrames] = [
        read.read(IMAGE, VideoFrames) if work.frames else read.read(IMAGE, ImagePixels) for read in inputs
    ]
    batches = [_frames(source) for source in sources]
    made: list[list[PixelArray]] = [[] for _ in works]
    frames = len(batches[0])
    with upscaler.running(stop_check(hooks)) as module:
        for number in range(frames):
            pixels_BHWC = np.stack([batch[number] for batch in batches])
            scale = int(getattr(module, "scale", 1))
            own = pixels_BHWC.shape[2] * scale, pixels_BHWC.shape[1] * scale
            enlarged_BHWC: PixelArray = np.empty((len(works), own[1], own[0], 3), dtype=np.uint8)
            begin = 0
            for rows_BHWC in _enlarged(pixels_BHWC, module, upscaler, tile, work.overlap, hooks, (number, frames)):
                enlarged_BHWC[:, begin : begin + rows_BHWC.shape[1]] = rows_BHWC
                begin += rows_BHWC.shape[1]
            for results, pixels_HWC in zip(made, enlarged_BHWC, strict=True):
                results.append(_scaled(pixels_HWC, work.out_width, work.out_height))
    return tuple(
        VideoFrames(np.stack(results), source.frame_rate, source.sound)
        if isinstance(source, VideoFrames)
        else ImagePixels(results[0])
        for source, results in zip(sources, made, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of an image, each as height and width, in its pixels.

    edges     of the kept part of a tile: of nearly equal size
    overlaps  of neighbouring parts, over which one fades into the other
    context   pixels around a part that are computed with it, and dropped
    """

    edges: tuple[int, int]
    overlaps: tuple[int, int]
    context: tuple[int, int]

    @classmethod
    def of(cls, width: int, height: int, tile: int, overlap: int, step: int) -> Tiles:
        """Return tiles of at most `tile`, of which neighbours share `overlap` pixels; 0 is one tile, or the usual
        overlap. Half of the overlap is context: at its very edge, a tile knows nothing of pixels beyond. Tiles begin
        at multiples of `step` pixels, which an upscaler reads as one position."""
        if not tile or max(width, height) <= tile:
            return cls((height, width), (0, 0), (0, 0))
        tile = tile - tile % step or step
        overlap = min(overlap or max(tile // OVERLAP_SHARE, LEAST_OVERLAP), tile // 2)
        context = overlap // 4 - overlap // 4 % step
        fading = overlap - 2 * context
        fading -= fading % step
        edges, overlaps, contexts = [], [], []
        for side in (height, width):
            is_cut = side > tile
            edge = even_tile(side, tile - 2 * context, fading) if is_cut else side
            edges.append(edge + -edge % step)
            overlaps.append(fading if is_cut else 0)
            contexts.append(context if is_cut else 0)
        return cls((edges[0], edges[1]), (overlaps[0], overlaps[1]), (contexts[0], contexts[1]))

    @property
    def computed(self) -> tuple[int, int]:
        """Height and width that are computed at once, with the context."""
        return self.edges[0] + 2 * self.context[0], self.edges[1] + 2 * self.context[1]

    def slowdown(self, width: int, height: int) -> float:
        """Return the number of pixels that are computed, relative to an image of this size."""
        covered = 1
        for side, edge, lap, more in zip((height, width), self.edges, self.overlaps, self.context, strict=True):
            count = 1 if side <= edge else math.ceil((side - lap) / (edge - lap))
            covered *= side + (count - 1) * (lap + 2 * more)
        return covered / (width * height)


def _enlarged(
    pixels_BHWC: PixelArray,
    module: nn.Module,
    upscaler: ModelPatcher,
    tile: int,
    overlap: int,
    hooks: RunHooks,
    frame: tuple[int, int],
) -> Iterator[PixelArray]:
    """Yield the rows of images of equal size, enlarged by the factor of the network, in bands [B, rows, W, C].
    `frame`: the number of this one, and of all."""
    x_BCHW = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).float() / 255
    height, width = x_BCHW.shape[-2:]
    scale, step = int(getattr(module, "scale", 1)), int(getattr(module, "unshuffle", 1))
    plan = Tiles.of(width, height, tile, overlap, step)
    number, frames = frame
    tiles = count_tiles((height, width), plan.edges, plan.overlaps, (scale, scale))
    bands = run_tiled_bands(
        lambda part_BCHW: _called(module, part_BCHW, upscaler),
        x_BCHW,
        plan.edges,
        plan.overlaps,
        (scale, scale),
        before_tile=lambda: stop_if_asked(hooks.should_stop),
        on_tile=lambda done, total: hooks.on_step(number * tiles + done, frames * tiles),
        context=plan.context,
    )
    for rows_BCHW in bands:
        if not torch.isfinite(rows_BCHW).all():
            raise CorruptFile(f"upscaler {upscaler.key}: found an image with NaN or infinity, expected numbers")
        yield rows_BCHW.clamp(0, 1).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def _called(module: nn.Module, part_BCHW: Tensor, upscaler: ModelPatcher) -> Tensor:
    with torch.no_grad():
        made_BCHW: Tensor = module(part_BCHW.to(upscaler.device).to(upscaler.compute_dtype))
    return made_BCHW


def _scaled(pixels_HWC: PixelArray, width: int, height: int) -> PixelArray:
    """Scale to this size with Lanczos; unchanged if the network made it."""
    if pixels_HWC.shape[:2] == (height, width):
        return pixels_HWC
    return np.asarray(Image.fromarray(pixels_HWC).resize((width, height), Image.Resampling.LANCZOS))


def _frames(source: ImagePixels | VideoFrames) -> PixelArray:
    return source.pixels_HWC[None] if isinstance(source, ImagePixels) else source.frames_THWC
