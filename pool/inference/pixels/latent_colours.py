"""`LatentColours`: a linear map from the channels of a latent cell to a colour, fitted to what a VAE decodes.

The map is found by least squares from random latents that the VAE decodes: each cell is a sample, with the mean of its
pixels as colour. So it exists for every VAE, without published figures. Latents of one colour fit better than latents
that vary within the image: a decoder mixes neighbouring cells, and the map reads one. Knows neither modules nor files.

Shape legend: S samples, C latent channels, H W latent height and width, N cells, P Q pixel height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from modelpool.pool.values.core.stage_params import FloatArray, PixelArray

Matrix: TypeAlias = npt.NDArray[np.float64]

#: latents that a map is fitted to, at least: twice its unknowns for 16 channels
LEAST_SAMPLES = 32
#: deviation of a cell from the mean of its latent, which itself has deviation 1
_CELL_DEVIATION = 0.1
#: values beyond this show as this: a latent has about unit variance
_MOST = 1e3
#: added to the diagonal of the normal equations, as a share of its mean: a channel that never varies gets no colour
_RIDGE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class LatentColours:
    """The map: a row for each channel and one for the constant, in shares of full brightness."""

    map_C3: Matrix

    @classmethod
    def fitted(cls, latents_SCHW: FloatArray, images: Sequence[PixelArray]) -> LatentColours:
        """Return the best map for latents, in the scale of the diffusion model, and the images that they were decoded
        to."""
        cells = latents_SCHW.shape[2:]
        features = np.concatenate([_with_one(latent_CHW) for latent_CHW in latents_SCHW])
        colours = np.concatenate([cell_means(image, cells) for image in images])
        gram = features.T @ features
        ridge = np.full(len(gram), _RIDGE * np.trace(gram) / len(gram))
        ridge[-1] = 1e-9  # not of the constant: without information, the colour is the mean
        return cls(np.linalg.solve(gram + np.diag(ridge), features.T @ colours))

    def image(self, latent_CHW: FloatArray) -> PixelArray:
        """Return the colours [H, W, 3] of a latent's cells."""
        finite_CHW = np.nan_to_num(latent_CHW, posinf=_MOST, neginf=-_MOST).clip(-_MOST, _MOST)
        colours = _with_one(finite_CHW) @ self.map_C3
        pixels: PixelArray = np.clip(np.rint(colours * 255.0), 0, 255).astype(np.uint8)
        return pixels.reshape(*latent_CHW.shape[1:], 3)


def cell_means(pixels_PQ3: PixelArray, cells: tuple[int, ...]) -> Matrix:
    """Return the mean colour [N, 3], 0 to 1, of the pixels of each of height times width `cells`. The image has at
    least as many pixels."""
    (height, width), (rows, columns) = pixels_PQ3.shape[:2], cells
    tall, wide = height // rows, width // columns
    whole = pixels_PQ3[: rows * tall, : columns * wide].reshape(rows, tall, columns, wide, 3)
    means: Matrix = whole.mean(axis=(1, 3), dtype=np.float64).reshape(-1, 3) / 255.0
    return means


def latents_to_fit(channels: int, cells: int) -> FloatArray:
    """Return random latents [S, C, H, W] of `cells` squared, each of almost one colour; always the same ones."""
    draw, count = np.random.default_rng(0), max(LEAST_SAMPLES, 2 * channels)
    means = draw.standard_normal((count, channels, 1, 1))
    varied = means + _CELL_DEVIATION * draw.standard_normal((count, channels, cells, cells))
    found: FloatArray = varied.astype(np.float32)
    return found


def _with_one(latent_CHW: FloatArray) -> Matrix:
    """Return the channels of each cell and a constant: [N, C + 1]."""
    cells_NC = latent_CHW.reshape(latent_CHW.shape[0], -1).T.astype(np.float64)
    return np.concatenate([cells_NC, np.ones((len(cells_NC), 1))], axis=1)
