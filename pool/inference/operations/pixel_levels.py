"""Converts images and masks to levels from 0 to 1, and back.

Images and masks have 8 bits, also between two operations: a level is value / 255, and a result is rounded to the
nearest value, halves to the even one, after it was limited to 0 to 1. Operations that only move or negate pixels work
on the 8-bit values and are exact.

Shape legend: T frames (1 for a single image), H W height and width, C colours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from modelpool.pool.values.core.stage_params import (
    FloatArray,
    ImagePixels,
    Mask,
    PixelArray,
    VideoFrames,
    VideoMask,
)

_Frames = TypeVar("_Frames", PixelArray, FloatArray)
#: frames per second of images that were put together and come from no video
STILL_RATE = 1.0


def frames_of(image: ImagePixels | VideoFrames) -> PixelArray:
    """Return the pixels of an image as one frame, or of all frames: [T,H,W,C]."""
    return image.pixels_HWC[None] if isinstance(image, ImagePixels) else image.frames_THWC


def masks_of(mask: Mask | VideoMask) -> PixelArray:
    """Return the values of a mask as one frame, or of all frames: [T,H,W]."""
    return mask.values_HW[None] if isinstance(mask, Mask) else mask.values_THW


def image_like(image: ImagePixels | VideoFrames, frames_THWC: PixelArray) -> ImagePixels | VideoFrames:
    """Return frames as the kind of `image`, with its rate and sound."""
    frames_THWC = np.ascontiguousarray(frames_THWC)
    if isinstance(image, VideoFrames):
        return replace(image, frames_THWC=frames_THWC)
    return ImagePixels(frames_THWC[0]) if len(frames_THWC) == 1 else VideoFrames(frames_THWC, STILL_RATE)


def mask_like(mask: Mask | VideoMask, values_THW: PixelArray) -> Mask | VideoMask:
    """Return values as the kind of `mask`."""
    values_THW = np.ascontiguousarray(values_THW)
    if isinstance(mask, Mask) and len(values_THW) == 1:
        return Mask(values_THW[0])
    return VideoMask(values_THW)


def levels(values: PixelArray) -> FloatArray:
    """Return 8-bit values as levels, 0 to 1."""
    return values.astype(np.float32) / np.float32(255)


def as_pixels(levels: Any) -> PixelArray:
    """Return levels as 8-bit values: limited to 0 to 1, rounded to the nearest, halves to the even value."""
    return np.asarray(np.rint(np.clip(levels, 0, 1) * 255), np.uint8)


def each_frame(
    image: ImagePixels | VideoFrames, change: Callable[[FloatArray], FloatArray]
) -> ImagePixels | VideoFrames:
    """Return an image with each frame changed by a function of levels [H,W,C]; one frame is in memory at a time."""
    return image_like(image, np.stack([as_pixels(change(levels(frame_HWC))) for frame_HWC in frames_of(image)]))


def repeated_to(frames_T: _Frames, count: int) -> _Frames:
    """Return the first `count` frames; if there are fewer, they are repeated from the first one on."""
    return frames_T if len(frames_T) == count else frames_T[np.arange(count) % len(frames_T)]
