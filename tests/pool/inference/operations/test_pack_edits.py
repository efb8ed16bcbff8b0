"""Edits of packs of nodes are their formulas: compared with torch and torchvision where these have one, and with values
that were computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from modelpool.pool.inference.operations.image_scaling import scaled
from modelpool.pool.inference.operations.operate import OPERATIONS
from modelpool.pool.inference.operations.operation import Size
from modelpool.pool.inference.operations.pack_edits import CORNERS, PRIMARIES, CropAt, Fit, crop_box, fit_size
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import ImagePixels, Mask, VideoFrames, VideoMask

PHOTO = ImagePixels(np.random.default_rng(3).integers(0, 256, (12, 20, 3), np.uint8))


def run(name: str, value: Any, /, **settings: Any) -> Any:
    found = OPERATIONS[name]
    return found(found.params_of(settings), {next(iter(found.inputs)): value})


def test_frames_are_picked_by_their_places() -> None:
    frames = VideoFrames(np.arange(4 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 2, 3, 3), 8.0)
    picked = run("image_pick", frames, indices=(3, 0, 0))
    np.testing.assert_array_equal(picked.frames_THWC, frames.frames_THWC[[3, 0, 0]])
    assert isinstance(run("image_pick", frames, indices=(2,)), ImagePixels)
    for indices in ((4,), (-1,), ()):
        with pytest.raises(UnusableField, match="indices: found"):
            run("image_pick", frames, indices=indices)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"width": 10, "height": 10}, (10, 10)),
        ({"width": 0, "height": 10}, (20, 10)),
        ({"width": 10, "height": 10, "how": "within"}, (10, 6)),
        ({"width": 0, "height": 24, "how": "within"}, (40, 24)),
        ({"width": 0, "height": 6, "how": "within"}, (10, 6)),
        ({"width": 10, "height": 10, "how": "pad"}, (10, 10)),
        ({"width": 10, "height": 10, "how": "fill"}, (10, 10)),
        ({"width": 40, "height": 40, "condition": "larger"}, (20, 12)),
        ({"width": 40, "height": 8, "condition": "larger"}, (40, 8)),
        ({"width": 40, "height": 8, "condition": "smaller"}, (40, 8)),
        ({"width": 10, "height": 8, "condition": "smaller"}, (20, 12)),
        ({"width": 40, "height": 8, "condition": "larger area"}, (20, 12)),
        ({"width": 40, "height": 5, "condition": "smaller area"}, (20, 12)),
        ({"width": 19, "height": 10, "how": "within", "multiple": 4}, (12, 8)),
        ({"width": 40, "height": 40, "condition": "larger", "multiple": 8}, (16, 8)),
    ],
)
def test_an_image_fits_a_size_under_a_condition(settings: dict[str, Any], wanted: tuple[int, int]) -> None:
    found = run("image_fit", PHOTO, **settings)
    assert found.pixels_HWC.shape[1::-1] == wanted
    assert fit_size(Fit(**settings), Size(20, 12)) == Size(*wanted)


def test_a_fit_is_a_resize_with_a_crop_or_with_space_around() -> None:
    plain = scaled(PHOTO, 17, 10, "bicubic")
    filled = run("image_fit", PHOTO, width=10, height=10, how="fill", method="bicubic")
    np.testing.assert_array_equal(filled.pixels_HWC, plain.pixels_HWC[:, 3:13])
    padded = run("image_fit", PHOTO, width=10, height=11, how="pad", method="area").pixels_HWC
    np.testing.assert_array_equal(padded[2:8], scaled(PHOTO, 10, 6, "area").pixels_HWC)
    assert not padded[:2].any()
    assert not padded[8:].any()
    cut = run("image_fit", PHOTO, width=40, height=40, condition="larger", multiple=9)
    np.testing.assert_array_equal(cut.pixels_HWC, PHOTO.pixels_HWC[1:10, 1:19])


def test_a_crop_is_at_its_place_and_ends_at_the_image() -> None:
    corners = {name: crop_box(CropAt(8, 5, name), Size(20, 12))[:2] for name in CORNERS}
    assert corners == {
        "top-left": (0, 0), "top-center": (6, 0), "top-right": (12, 0), "right-center": (12, round(3.5)),
        "bottom-right": (12, 7), "bottom-center": (6, 7), "bottom-left": (0, 7), "left-center": (0, round(3.5)),
        "center": (6, round(3.5)),
    }  # fmt: skip
    moved = run("image_crop_at", PHOTO, width=8, height=5, position="top-right", x=4, y=-2)
    np.testing.assert_array_equal(moved.pixels_HWC, PHOTO.pixels_HWC[:3, 16:])
    with pytest.raises(UnusableField, match="x, y: found 20, 0"):
        run("image_crop_at", PHOTO, width=8, height=5, position="top-left", x=20)


def test_adaptive_sharpening_is_its_formula() -> None:
    amount = 0.6
    levels = torch.from_numpy(PHOTO.pixels_HWC).permute(2, 0, 1).double() / 255
    windows = torch.nn.functional.unfold(levels[:, None], 3, padding=1).view(3, 9, 12, 20)
    cross, diagonal = windows[:, [1, 3, 4, 5, 7]], windows[:, [0, 2, 6, 8]]
    low, high = (getattr(cross, name)(1).values + getattr(diagonal, name)(1).values for name in ("min", "max"))
    weight = -torch.sqrt(torch.minimum(low, 2 - high) / (high + 1e-5)) * (1 / 8 + amount * (1 / 5 - 1 / 8))
    wanted = (windows[:, 4] + weight * windows[:, [1, 3, 5, 7]].sum(1)) / (1 + 4 * weight)
    found = run("image_sharpen_adaptive", PHOTO, amount=amount).pixels_HWC
    difference = np.abs(found - (wanted.clamp(0, 1) * 255).permute(1, 2, 0).numpy())
    assert difference.max() < 0.51
    assert (found != PHOTO.pixels_HWC).any()


def test_grey_and_two_levels_are_of_the_channels() -> None:
    pixel = ImagePixels(np.array([[[200, 100, 30]]], np.uint8))
    for method, grey in (
        ("luminance (Rec.709)", 0.2126 * 200 + 0.7152 * 100 + 0.0722 * 30),
        ("luminance (Rec.601)", 0.299 * 200 + 0.587 * 100 + 0.114 * 30),
        ("average", 110),
        ("lightness", 115),
    ):
        found = run("image_grey", pixel, method=method, factor=0.5).pixels_HWC[0, 0]
        np.testing.assert_allclose(found, [(each + grey) / 2 for each in (200, 100, 30)], atol=0.51)
    for amount, level in ((0.43, 255), (0.44, 0)):
        assert (run("image_two_levels", pixel, amount=amount).pixels_HWC == level).all()
    clear = ImagePixels(np.dstack([PHOTO.pixels_HWC, PHOTO.pixels_HWC[..., :1]]))
    np.testing.assert_array_equal(run("image_without_alpha", clear).pixels_HWC, PHOTO.pixels_HWC)


def test_masks_of_colours_are_where_the_colours_are() -> None:
    colours = dict(zip(PRIMARIES, np.array([
        [255, 0, 0], [0, 255, 0], [0, 0, 255], [0, 255, 255], [255, 0, 255], [255, 255, 0], [0, 0, 0], [255, 255, 255],
    ], np.uint8), strict=True))  # fmt: skip
    image = ImagePixels(np.stack(list(colours.values()))[None])
    for place, colour in enumerate(PRIMARIES):
        mask = run("mask_of_primary", image, colour=colour)
        assert isinstance(mask, Mask)
        assert [*np.flatnonzero(mask.values_HW[0])] == [place]
    edge = ImagePixels(np.array([[[217, 38, 38], [216, 38, 38], [217, 39, 38]]], np.uint8))
    assert [*run("mask_of_primary", edge, colour="red").values_HW[0]] == [255, 0, 0]
    near = ImagePixels(np.array([[[10, 20, 30], [13, 17, 30], [14, 20, 30]]], np.uint8))
    assert [*run("mask_of_near_colour", near, red=10, green=20, blue=30, threshold=3).values_HW[0]] == [255, 255, 0]
    frames = VideoFrames(np.stack([PHOTO.pixels_HWC] * 2), 8.0)
    assert isinstance(run("mask_of_primary", frames, colour="black"), VideoMask)


def test_a_mask_is_blurred_by_a_gaussian_with_mirrored_edges() -> None:
    values = np.asarray(Image.effect_noise((20, 14), 90))
    for level in (0.0, 0.5):
        radius, sigma = 3, 1.4
        levels = torch.from_numpy(values.copy()).double() / 255
        levels = (levels > level).double() if level else levels
        weights = torch.tensor([math.exp(-(place**2) / (2 * sigma**2)) for place in range(-radius, radius + 1)])
        kernel = torch.outer(weights, weights).double()
        wide = torch.nn.functional.pad(levels[None, None], [radius] * 4, mode="reflect")
        wanted = torch.nn.functional.conv2d(wide, (kernel / kernel.sum())[None, None])[0, 0].numpy() * 255
        found = run("mask_gaussian", Mask(values), radius=radius, sigma=sigma, level=level).values_HW
        assert np.abs(found - wanted).max() < 0.51
