"""The map from latents to colours is the best linear one."""

from __future__ import annotations

import numpy as np

from modelpool.pool.inference.pixels.latent_colours import LatentColours, cell_means, latents_to_fit
from modelpool.pool.values.core.stage_params import PixelArray


def decoded_linearly(latent_CHW: np.ndarray, map_43: np.ndarray) -> PixelArray:
    """What a VAE would decode that has this map, at eight pixels to a cell."""
    cells = np.clip(np.einsum("chw,cd->hwd", latent_CHW, map_43) + 0.5, 0.0, 1.0)
    return np.rint(cells * 255).astype(np.uint8).repeat(8, axis=0).repeat(8, axis=1)


def test_a_vae_that_is_linear_is_found_exactly() -> None:
    draw = np.random.default_rng(1)
    truth = draw.normal(size=(4, 3)) * 0.02  # no colour is clipped
    latents = latents_to_fit(4, 8)
    colours = LatentColours.fitted(latents, [decoded_linearly(each, truth) for each in latents])
    other = draw.normal(size=(4, 6, 10)).astype(np.float32)
    expected = decoded_linearly(other, truth)[::8, ::8]
    assert np.abs(colours.image(other).astype(int) - expected).max() <= 1


def test_a_channel_that_never_varies_has_no_colour_and_nothing_overflows() -> None:
    latents = latents_to_fit(4, 8)
    latents[:, 3] = 0.0
    truth = np.full((4, 3), 0.02)
    colours = LatentColours.fitted(latents, [decoded_linearly(each, truth) for each in latents])
    assert np.abs(colours.map_C3[3]).max() < 1e-6
    wild = np.full((4, 2, 2), np.inf, np.float32)
    assert colours.image(wild).shape == (2, 2, 3)


def test_the_colour_of_a_cell_is_the_mean_of_its_pixels() -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[:2, :2] = [[[255, 0, 0], [0, 0, 0]], [[255, 0, 0], [0, 0, 0]]]
    assert np.allclose(cell_means(pixels, (2, 2))[0], [0.5, 0.0, 0.0])
