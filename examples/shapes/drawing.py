"""Draws images with captions: coloured shapes on a plain background, with numpy only.

Contains the palette, the shapes, the two backgrounds, the two styles (filled, outline) and the drawing of a scene. The
images are the training data of the example model and the ground truth of its checker. No torch, models or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Background = Literal["dark", "light"]
Colour = tuple[float, float, float]

PALETTE: dict[str, Colour] = {
    "red": (0.90, 0.15, 0.15),
    "green": (0.15, 0.70, 0.20),
    "blue": (0.15, 0.30, 0.90),
    "yellow": (0.95, 0.85, 0.15),
    "purple": (0.60, 0.20, 0.75),
    "cyan": (0.10, 0.80, 0.85),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
# Both backgrounds are far from every colour of the palette, and the light one is pale blue-grey, not white.
BACKGROUNDS: dict[Background, Colour] = {"dark": (0.14, 0.14, 0.17), "light": (0.88, 0.90, 0.94)}
SIDE_PIXELS = 64
STROKE_PIXELS = 3.5
TALLEST_SLOPE = 3.0**0.5  # an upward triangle whose sides are equal to within one percent


@dataclass(frozen=True, slots=True)
class ShapeInScene:
    """One shape: palette name, shape name, centre and radius in pixels (origin top left, y down)."""

    colour: str
    shape: str
    x_pixels: float
    y_pixels: float
    radius_pixels: float


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of an image: its shapes, in drawing order, on a background, filled or as outlines."""

    shapes: tuple[ShapeInScene, ...]
    background: Background = "dark"
    filled: bool = True


def signed_distance(item: ShapeInScene, side_pixels: int) -> NDArray[np.float32]:
    """Return each pixel centre's distance to the shape's edge, negative inside; float32 [side, side], in pixels."""
    rows, columns = np.mgrid[0:side_pixels, 0:side_pixels].astype(np.float32)
    dx, dy, radius = np.abs(columns - item.x_pixels), rows - item.y_pixels, item.radius_pixels
    if item.shape == "circle":
        distance = np.sqrt(dx**2 + dy**2) - radius
    elif item.shape == "square":
        distance = np.maximum(dx, np.abs(dy)) - radius * 0.88
    elif item.shape == "triangle":
        distance = np.maximum((dx * TALLEST_SLOPE - (dy + radius)) / 2, dy - radius * 0.75)
    else:
        raise ValueError(f"shape: found {item.shape!r}, expected one of {', '.join(SHAPES)}")
    return np.asarray(distance, dtype=np.float32)


def draw(scene: Scene, side_pixels: int = SIDE_PIXELS) -> NDArray[np.float32]:
    """Draw a scene with antialiased edges: float32 [side, side, 3] in 0..1. Raises ValueError for unknown names."""
    image = np.tile(np.asarray(BACKGROUNDS[scene.background], dtype=np.float32), (side_pixels, side_pixels, 1))
    for item in scene.shapes:
        if item.colour not in PALETTE:
            raise ValueError(f"colour: found {item.colour!r}, expected one of {', '.join(PALETTE)}")
        distance = signed_distance(item, side_pixels)
        if not scene.filled:
            distance = np.abs(distance + STROKE_PIXELS / 2) - STROKE_PIXELS / 2
        cover = np.clip(0.5 - distance, 0, 1)[..., None]
        image = image * (1 - cover) + cover * np.asarray(PALETTE[item.colour], dtype=np.float32)
    return image.astype(np.float32)


def caption(scene: Scene) -> str:
    """Return the caption of a scene: "a red circle", or "a red circle and a blue square" in the order of its shapes."""
    return " and ".join(f"a {item.colour} {item.shape}" for item in scene.shapes)


def all_captions() -> list[str]:
    """Return all 18 captions of one shape, ordered by colour."""
    return [f"a {colour} {shape}" for colour in PALETTE for shape in SHAPES]


def random_scene(
    rng: np.random.Generator, background: Background = "dark", filled: bool = True, share_of_two: float = 0.0
) -> Scene:
    """Return a scene: one shape near the middle or, with probability share_of_two, two at random opposite places."""
    names = [(colour, shape) for colour in PALETTE for shape in SHAPES]
    middle = SIDE_PIXELS / 2
    if rng.random() >= share_of_two:
        colour, shape = names[rng.integers(len(names))]
        x, y = middle + rng.uniform(-5, 5, size=2)
        return Scene((ShapeInScene(colour, shape, x, y, rng.uniform(13, 18)),), background, filled)
    first, second = rng.permutation(len(names))[:2]
    along = np.array([middle - rng.uniform(13, 16), middle + rng.uniform(13, 16)])
    across = middle + rng.uniform(-4, 4, size=2)
    along = along[:: rng.choice([-1, 1])]
    places = np.stack([along, across] if rng.random() < 0.5 else [across, along], axis=1)
    shapes = tuple(
        ShapeInScene(names[name][0], names[name][1], x, y, rng.uniform(9, 11.5))
        for name, (x, y) in zip((first, second), places.tolist(), strict=True)
    )
    return Scene(shapes, background, filled)
