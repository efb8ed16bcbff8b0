"""Matched colours have the means and covariances of the reference; the map is the one that moves them least."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelpool.pool.inference.operations.operate import operate
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import ImagePixels, OperationParams, VideoFrames
from modelpool.pool.values.core.task_inputs import TaskInputs


def drawn(seed: int, mean: float, spread: float) -> Any:
    """Colours that depend on each other, away from the ends of the scale."""
    numbers = np.random.default_rng(seed)
    mixed = numbers.standard_normal((40, 50, 3)) @ (np.eye(3) + 0.4 * numbers.standard_normal((3, 3)))
    return np.clip(mean + spread * mixed, 0, 255).round().astype(np.uint8)


def matched(image: Any, reference: Any, **settings: Any) -> Any:
    inputs = {"image": image, "reference": reference}
    return operate(OperationParams("image_match_colours", tuple(sorted(settings.items()))), TaskInputs(inputs))


def moments(pixels: Any) -> tuple[Any, Any]:
    values = pixels.reshape(-1, 3) / 255
    return values.mean(0), np.cov(values.T)


def test_matched_colours_have_the_moments_of_the_reference() -> None:
    one, other = drawn(1, 90, 20), drawn(2, 150, 12)
    found = matched(ImagePixels(one), ImagePixels(other)).pixels_HWC
    for own, wanted in zip(moments(found), moments(other), strict=True):
        np.testing.assert_allclose(own, wanted, atol=2e-4)


def test_the_map_is_symmetric_and_positive_so_that_it_moves_colours_least() -> None:
    one, other = drawn(1, 90, 20), drawn(2, 150, 12)
    found = matched(ImagePixels(one), ImagePixels(other)).pixels_HWC
    source, target = (each.reshape(-1, 3) / 255 - each.reshape(-1, 3).mean(0) / 255 for each in (one, found))
    linear = np.linalg.lstsq(source, target, rcond=None)[0]
    np.testing.assert_allclose(linear, linear.T, atol=2e-3)
    assert (np.linalg.eigvalsh((linear + linear.T) / 2) > 0).all()


def test_a_share_of_the_change_and_no_change() -> None:
    one, other = ImagePixels(drawn(1, 90, 20)), ImagePixels(drawn(2, 150, 12))
    whole, half = (matched(one, other, strength=share).pixels_HWC.astype(int) for share in (1.0, 0.5))
    assert np.abs(half - (one.pixels_HWC + whole) / 2).max() <= 1
    assert np.array_equal(matched(one, other, strength=0.0).pixels_HWC, one.pixels_HWC)
    assert np.abs(matched(one, one).pixels_HWC.astype(int) - one.pixels_HWC).max() <= 1


def test_flat_colours_become_the_mean_and_frames_have_their_own_reference() -> None:
    flat = ImagePixels(np.full((8, 8, 3), 60, np.uint8))
    other = ImagePixels(drawn(2, 150, 12))
    found = matched(flat, other).pixels_HWC
    assert np.abs(found - other.pixels_HWC.reshape(-1, 3).mean(0)).max() <= 1
    frames = VideoFrames(np.stack([drawn(1, 90, 20), drawn(3, 120, 15)]), 8.0)
    each = matched(frames, VideoFrames(np.stack([drawn(2, 150, 12), drawn(4, 60, 9)]), 8.0)).frames_THWC
    alone = matched(ImagePixels(drawn(3, 120, 15)), ImagePixels(drawn(4, 60, 9))).pixels_HWC
    assert np.array_equal(each[1], alone)
    with pytest.raises(UnusableField, match="reference: found 3 images, expected one, or 2"):
        matched(frames, VideoFrames(np.stack([drawn(2, 150, 12)] * 3), 8.0))
