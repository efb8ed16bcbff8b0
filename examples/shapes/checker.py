"""Detects colour, shape, background and style (filled or outlined) of an image, and compares them with a prompt.

Pure numpy over pixels: no model, no torch, deterministic. Thresholds are relative to the image's size, and are
calibrated on drawn images (tests/examples/test_shapes_data.py). If there are several shapes, it reads the largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.shapes.drawing import (
    BACKGROUNDS,
    PALETTE,
    SHAPES,
    TALLEST_SLOPE,
    Background,
    Colour,
    ShapeInScene,
    signed_distance,
)

# Area of each drawn shape in squared radii, and the distance of its centre of mass below its centre, in radii.
AREA_IN_RADII = {"circle": np.pi, "square": (2 * 0.88) ** 2, "triangle": 1.75**2 / TALLEST_SLOPE}
MASS_BELOW_CENTRE = {"circle": 0.0, "square": 0.0, "triangle": 1 / 6}
# An outline covers at most 0.6 of its own silhouette at the drawn sizes; a filled shape covers all of it.
FILLED_FROM = 0.8
SHAPE_CONTRAST = 0.22
SMALLEST_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of an image. colour and shape are "none" if nothing differs from the background."""

    colour: str
    shape: str
    background: Background
    filled: bool


def read_image(pixels_hwc: NDArray[np.uint8]) -> Reading:
    """Read an image, uint8 [H, W, 3]. Raises ValueError for another dtype or number of dimensions."""
    if pixels_hwc.dtype != np.uint8 or pixels_hwc.ndim != 3 or pixels_hwc.shape[2] != 3:
        raise ValueError(f"pixels: found {pixels_hwc.dtype} {pixels_hwc.shape}, expected uint8 [height, width, 3]")
    image = pixels_hwc.astype(np.float32) / 255
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    ground = np.median(border, axis=0)
    background: Background = "light" if _nearest(ground, BACKGROUNDS) == "light" else "dark"
    difference = np.abs(image - ground).max(axis=-1)
    shape_mask = largest_region(difference > SHAPE_CONTRAST)
    if shape_mask.sum() < SMALLEST_SHARE * shape_mask.size:
        return Reading("none", "none", background, True)
    silhouette = _between_ends(shape_mask)
    shape = _best_fit(silhouette)
    # The half that differs most, so that antialiased edges do not blend the background into the colour.
    strong = shape_mask & (difference >= np.median(difference[shape_mask]))
    colour = _nearest(np.median(image[strong], axis=0), PALETTE)
    return Reading(colour, shape, background, bool(shape_mask.sum() >= FILLED_FROM * silhouette.sum()))


def matches(reading: Reading, prompt: str) -> bool:
    """Whether colour and shape are those in the prompt. Raises ValueError unless the prompt names one of each."""
    words = prompt.lower().replace(",", " ").split()
    colours = {word for word in words if word in PALETTE}
    shapes = {word for word in words if word in SHAPES}
    if len(colours) != 1 or len(shapes) != 1:
        raise ValueError(
            f"prompt: {prompt!r} names {len(colours)} colours and {len(shapes)} shapes, expected one of each"
        )
    return {reading.colour} == colours and {reading.shape} == shapes


def largest_region(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the largest 4-connected region of a mask [H, W]; all False if the mask is empty."""
    numbers = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        padded = np.pad(numbers, 1)
        spread = np.maximum.reduce([numbers, padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]])
        spread = np.where(mask, spread, 0)
        if np.array_equal(spread, numbers):
            break
        numbers = spread
    found, sizes = np.unique(numbers[mask], return_counts=True)
    if not len(found):
        return np.zeros_like(mask)
    return np.asarray(numbers == found[sizes.argmax()])


def _between_ends(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Fill every row from its first to its last marked pixel: the silhouette of an outline."""
    from_left = np.logical_or.accumulate(mask, axis=1)
    from_right = np.logical_or.accumulate(mask[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(from_left & from_right)


def _best_fit(silhouette: NDArray[np.bool_]) -> str:
    """Return the shape with the largest overlap when drawn with the silhouette's area and centre of mass."""
    rows, columns = np.nonzero(silhouette)
    overlaps = {}
    for shape in SHAPES:
        radius = float(np.sqrt(len(rows) / AREA_IN_RADII[shape]))
        row = float(rows.mean()) - MASS_BELOW_CENTRE[shape] * radius
        ideal = signed_distance(ShapeInScene("", shape, float(columns.mean()), row, radius), max(silhouette.shape)) < 0
        ideal = ideal[: silhouette.shape[0], : silhouette.shape[1]]
        overlaps[shape] = (ideal & silhouette).sum() / (ideal | silhouette).sum()
    return max(overlaps, key=overlaps.__getitem__)


def _nearest(colour: NDArray[Any], named: Mapping[Any, Colour]) -> str:
    """Return the name of the nearest colour, by summed absolute difference."""
    distances = {name: float(np.abs(colour - np.array(value)).sum()) for name, value in named.items()}
    return str(min(distances, key=distances.__getitem__))
