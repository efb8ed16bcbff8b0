"""Every operation computes its formula, on one image and on frames, and predicts the size of its result; what a result
cannot hold is refused by name."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from modelpool.pool.inference.operations.image_filters import bayer_ranks
from modelpool.pool.inference.operations.latent_edits import NOT_LATENT_EDITS, VaeScale
from modelpool.pool.inference.operations.operate import OPERATIONS, operate, operation_named
from modelpool.pool.inference.operations.operation import Size, size_of_result
from modelpool.pool.inference.operations.pixel_levels import STILL_RATE
from modelpool.pool.inference.operations.resampling import ALIGNED_METHODS, PLAIN_METHODS, resampled
from modelpool.pool.inference.pixels.image_ops import centre_box
from modelpool.pool.values.core.errors import UnknownName, UnusableField
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    Encoded,
    ImagePixels,
    Latent,
    Mask,
    OperationParams,
    VideoFrames,
    VideoMask,
)
from modelpool.pool.values.core.task_inputs import TaskInputs
from tests.each_case import each_case

#: settings with which each operation runs here, and those that it refuses
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "image_scale": ({"method": "bicubic", "width": 9, "height": 0, "crop": True}, {"method": "cubic"}),
    "image_scale_by": ({"method": "area", "factor": 0.5}, {"factor": 0.0}),
    "image_scale_to_pixels": ({"method": "bilinear", "megapixels": 0.001, "multiple": 8}, {"megapixels": 1e9}),
    "image_scale_to_longest": ({"method": "lanczos", "longest": 40}, {"longest": 0}),
    "image_scale_to_shortest": ({"method": "area", "shortest": 9}, {"shortest": 0}),
    "image_scale_like": ({"method": "bilinear", "crop": True}, {"method": "cubic"}),
    "image_scale_to_multiple": ({"method": "bilinear", "multiple": 8}, {"multiple": 0}),
    "image_scale_within": ({"width": 0, "height": 7}, {"width": -1}),
    "image_scale_to_nearest": ({"method": "lanczos", "sizes": (8, 16, 16, 8)}, {"sizes": ()}),
    "image_scale_by_sides": ({"width_factor": 1.3, "height_factor": 0.5, "multiple": 8}, {"height_factor": 0.1}),
    "image_scale_to_cells": ({"compression": 3, "cell": 2}, {"compression": 0, "cell": 2}),
    "image_scale_by_filter": ({"factor": 1.55, "method": "bicubic", "oversampled": True}, {"method": "area"}),
    "image_crop_square": ({"position": "left"}, {"position": "corner"}),
    "image_crop": ({"x": 3, "y": 30, "width": 5, "height": 4}, {"width": 0}),
    "image_pad": ({"left": 1, "top": 0, "right": 3, "bottom": 2, "feathering": 4}, {"top": -1}),
    "image_pad_mask": ({"left": 1, "top": 0, "right": 3, "bottom": 2, "feathering": 4}, {"top": 10**9}),
    "image_invert": ({}, {"strength": 1}),
    "image_edges": ({"low": 0.2, "high": 0.5}, {"low": -1.0}),
    "image_morphology": ({"operation": "gradient", "kernel": 4}, {"operation": "melt"}),
    "image_noise": ({"seed": 5, "strength": 0.2}, {"strength": 2.0}),
    "image_stitch": ({"direction": "up", "spacing": 3}, {"direction": "in"}),
    "image_letterbox": ({"width": 30, "height": 12, "colour": "black"}, {"width": 0}),
    "image_plane": ({"plane": "V"}, {"plane": "X"}),
    "image_of_planes": ({}, {"x": 1}),
    "image_with_alpha": ({}, {"x": 1}),
    "image_alpha_mask": ({}, {"x": 1}),
    "image_match_colours": ({"strength": 0.5}, {"method": "mvgd"}),
    "image_blend": ({"factor": 0.3, "mode": "soft_light"}, {"mode": "hard_light"}),
    "image_composite": ({"x": -2, "y": 3}, {"x": 10**9}),
    "image_batch": ({}, {"rate": 1}),
    "image_from_batch": ({"start": 1, "length": 2}, {"length": 0}),
    "image_repeat": ({"amount": 3}, {"amount": 10**9}),
    "image_there_and_back": ({}, {"x": 1}),
    "image_rotate": ({"rotation": "90 degrees"}, {"rotation": "45 degrees"}),
    "image_flip": ({"method": "x-axis: vertically"}, {"method": "z"}),
    "image_solid": ({"width": 4, "height": 3, "colour": 0x0102FF, "count": 2}, {"colour": -1}),
    "video_of_images": ({"rate": 12.0}, {"rate": 0.0}),
    "image_blur": ({"radius": 2, "sigma": 0.7}, {"radius": 20}),
    "image_sharpen": ({"radius": 2, "sigma": 0.7, "alpha": 0.4}, {"alpha": -1.0}),
    "image_brightness": ({"factor": 1.5}, {"factor": -1.0}),
    "image_contrast": ({"factor": 0.5}, {"factor": 1e9}),
    "image_quantize": ({"colours": 4, "dither": "bayer-4"}, {"dither": "bayer-3"}),
    "mask_from_image": ({"channel": "green"}, {"channel": "cyan"}),
    "mask_from_colour": ({"colour": 0x102030}, {"colour": 1 << 24}),
    "mask_to_image": ({}, {"x": 0}),
    "mask_solid": ({"width": 3, "height": 2, "level": 0.5}, {"level": 2.0}),
    "mask_invert": ({}, {"x": 0}),
    "mask_crop": ({"x": 3, "y": 2, "width": 50, "height": 4}, {"height": 0}),
    "mask_composite": ({"x": 2, "y": 1, "mode": "xor"}, {"mode": "nand"}),
    "mask_feather": ({"left": 3, "top": 0, "right": 99, "bottom": 2}, {"left": -1}),
    "mask_radial": ({"x": 3, "y": 4}, {"x": 0}),
    "mask_grow": ({"pixels": -2, "tapered": False}, {"pixels": 10**6}),
    "mask_threshold": ({"level": 0.5}, {"level": 1.5}),
    "mask_blur": ({"pixels": 1.5}, {"pixels": -1.0}),
    "mask_scale": ({"width": 7, "height": 5}, {"method": "lanczos"}),
    "latent_empty": ({"channels": 4, "width": 3, "height": 2}, {"width": 10**8}),
    "latent_upscale": ({"method": "bislerp", "width": 9, "height": 20, "crop": True}, {"width": 0}),
    "latent_upscale_to_pixels": ({"method": "bislerp", "width": 0, "height": 96}, {"downscale": 0}),
    "latent_upscale_by": ({"method": "bicubic", "factor": 1.5}, {"factor": 1e9}),
    "latent_upscale_by_sides": ({"width_factor": 1.3, "height_factor": 2.0, "multiple": 8}, {"height_factor": 0.1}),
    "latent_crop": ({"x": 8, "y": 800, "width": 40, "height": 16}, {"width": 1}),
    "latent_flip": ({"method": "y-axis: horizontally"}, {"method": ""}),
    "latent_rotate": ({"rotation": "270 degrees"}, {"rotation": "-90"}),
    "latent_composite": ({"x": 16, "y": -8, "feather": 16}, {"feather": -1}),
    "latent_add": ({}, {"factor": 1}),
    "latent_subtract": ({}, {"factor": 1}),
    "latent_multiply": ({"factor": 0.5}, {"factor": math.inf}),
    "latent_interpolate": ({"ratio": 0.25}, {"ratio": 1.1}),
    "latent_blend": ({"ratio": 0.25}, {"ratio": -0.1}),
    "latent_frames": ({"start": 1, "length": 1}, {"start": 9}),
    "latent_replace_frames": ({"index": -3}, {"index": 1}),
    "latent_normalize_start": ({"start": 1, "reference": 5}, {"start": 0}),
    "latent_sound_track": ({"length": 4, "width": 8}, {"length": -1}),
    "encoded_zero": ({}, {"x": 1}),
    "encoded_concat": ({}, {"x": 1}),
    "encoded_pooled_of": ({}, {"x": 1}),
    "encoded_of_two": ({}, {"x": 1}),
    "encoded_of_three": ({}, {"x": 1}),
    "encoded_average": ({"strength": 0.25}, {"strength": 2.0}),
    "encoded_padding": ({"least_padding": 0, "least_tokens": 3}, {"least_tokens": -1}),
    "audio_silence": ({"seconds": 0.5, "rate": 100}, {"seconds": 1e9}),
    "audio_trim": ({"start": -0.2, "seconds": 0.1}, {"seconds": 0.0}),
    "audio_concat": ({}, {"x": 1}),
    "audio_merge": ({}, {"x": 1}),
    "audio_volume": ({"decibels": -6.0}, {"decibels": 1e9}),
    "image_pick": ({"indices": (0, 0)}, {"indices": (9,)}),
    "image_fit": ({"width": 30, "height": 9, "how": "fill", "multiple": 4}, {"how": "crop"}),
    "image_crop_at": ({"width": 5, "height": 4, "position": "right-center", "x": 1}, {"position": "middle"}),
    "image_sharpen_adaptive": ({"amount": 0.8}, {"amount": 2.0}),
    "image_grey": ({"factor": 0.5, "method": "lightness"}, {"method": "lab"}),
    "image_without_alpha": ({}, {"x": 1}),
    "image_two_levels": ({"amount": 0.5}, {"amount": -1.0}),
    "mask_of_primary": ({"colour": "yellow", "red": 0.6}, {"colour": "grey"}),
    "mask_of_near_colour": ({"red": 100, "green": 90, "blue": 80, "threshold": 90}, {"red": 300}),
    "mask_gaussian": ({"radius": 2, "sigma": 1.5, "level": 0.5}, {"radius": 99}),
}


def draw(*shape: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([seed, *shape]).integers(0, 256, shape, np.uint8)


def drawn(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def example(kind: str, place: int, frames: int) -> Any:
    """An input; the second one has another size."""
    high, wide = 14 + 3 * place, 20 + place
    time = (frames,) if frames else ()
    pooled = drawn(6, seed=place)
    return {
        "image": ImagePixels(draw(high, wide, 3)) if not frames else VideoFrames(draw(frames, high, wide, 3), 8.0),
        "mask": Mask(draw(high, wide)) if not frames else VideoMask(draw(frames, high, wide)),
        "latent": Latent(drawn(4, *time, high, wide)),
        "encoded": Encoded(drawn(5 + 2 * place, 8), pooled),
        "audio": AudioSamples(drawn(100 + place, 1 + place), 100),
    }[kind]


def run(name: str, *inputs: Any, **settings: Any) -> Any:
    found = OPERATIONS[name]
    return found(found.params_of(settings), dict(zip(found.inputs, inputs, strict=False)))


def arrays(result: Any) -> list[npt.NDArray[Any]]:
    return [value for name in result.__match_args__ if isinstance(value := getattr(result, name), np.ndarray)]


def timing_of(result: Any) -> float:
    """Frames per second of several images, seconds of audio; 0 for others."""
    if isinstance(result, AudioSamples):
        return len(result.samples_SC) / result.samples_per_second
    return result.frame_rate if isinstance(result, VideoFrames) else 0.0


#: operations on videos alone, and operations on inputs of one size
_OF_VIDEOS = ("latent_frames", "latent_replace_frames", "latent_normalize_start")
_OF_ONE_SIZE = ("latent_replace_frames",)


@each_case("name", OPERATIONS)
def test_an_operation_predicts_its_size_and_timing_and_changes_no_input(name: str) -> None:
    assert sorted(CASES) == sorted(OPERATIONS), "each has a case here"
    found = operation_named(name)
    settings, refused = CASES[name]
    for frames in (0, 3):
        if name in _OF_VIDEOS and not frames:
            continue
        places = [0 if name in _OF_ONE_SIZE else place for place in range(len(found.inputs))]
        inputs = {one: example(kind, place, frames)
                  for place, (one, kind) in zip(places, found.inputs.items(), strict=True)}  # fmt: skip
        if name == "latent_sound_track":
            inputs["sound"] = Latent(inputs["sound"].samples_CHW, np.ones((4, 8), np.float32))
        before = [one.copy() for value in inputs.values() for one in arrays(value)]
        params = found.params_of(settings)
        result = found(params, inputs)
        sizes = {one: size_of_result(value) for one, value in inputs.items()}
        assert size_of_result(result) == found.size_of(params, sizes), (name, frames)
        timings = {one: timing for one, value in inputs.items() if (timing := timing_of(value))}
        if timing := timing_of(result):
            assert timing == pytest.approx(found.timing(params, timings) or STILL_RATE), (name, frames)
        assert all(one.flags.c_contiguous and one.dtype in (np.uint8, np.float32) for one in arrays(result))
        work = OperationParams(name, tuple(sorted(settings.items())))
        again = arrays(operate(work, TaskInputs(inputs)))
        assert all(np.array_equal(one, other) for one, other in zip(again, arrays(result), strict=True))
        after = [one for value in inputs.values() for one in arrays(value)]
        assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
        with pytest.raises(UnusableField):
            found.size_of(found.params_of({**settings, **refused}), sizes)
        if found.optional:
            found(params, {one: value for one, value in inputs.items() if one not in found.optional})
    if found.inputs:
        with pytest.raises(UnusableField, match=f"{name}: {next(iter(found.inputs))}: found nothing"):
            found(params, {})


@each_case("method", (*PLAIN_METHODS, *ALIGNED_METHODS))
@each_case("size", [(5, 31), (40, 9), (20, 14), (1, 1), (60, 42)])
def test_methods_are_those_of_interpolate(method: str, size: tuple[int, int]) -> None:
    values = drawn(3, 14, 20)
    width, height = size
    options: dict[str, Any] = {"align_corners": method in ALIGNED_METHODS} if method.startswith("bi") else {}
    wanted = torch.nn.functional.interpolate(
        torch.from_numpy(values)[None], size=(height, width), mode=method.removesuffix("-aligned"), **options
    )[0].numpy()
    np.testing.assert_allclose(resampled(values, width, height, method), wanted, atol=2e-5)


def test_sizes_are_rounded_as_the_nodes_round_them() -> None:
    cases: dict[tuple[str, int, int], tuple[dict[str, Any], tuple[int, int]]] = {
        ("image_scale", 20, 15): ({"method": "area", "width": 0, "height": 6}, (8, 6)),
        ("image_scale", 3, 1000): ({"method": "area", "width": 0, "height": 10}, (1, 10)),
        ("image_scale", 7, 9): ({"method": "area", "width": 0, "height": 0}, (7, 9)),
        ("image_scale_by", 5, 3): ({"method": "area", "factor": 0.5}, (2, 2)),  # 2.5 and 1.5: halves to even
        ("image_scale_by", 7, 5): ({"method": "area", "factor": 0.9, "cut": True}, (6, 4)),
        ("image_scale_within", 100, 50): ({"width": 40, "height": 10}, (20, 10)),
        ("image_scale_to_pixels", 1000, 500): ({"method": "area", "megapixels": 1.0}, (1448, 724)),
        ("image_scale_to_longest", 1000, 500): ({"method": "area", "longest": 33}, (33, 16)),
        ("image_scale_to_shortest", 1000, 500): ({"method": "area", "shortest": 33}, (66, 33)),
        ("image_scale_to_shortest", 300, 500): ({"method": "area", "shortest": 30}, (30, 50)),
        ("image_scale_to_multiple", 1000, 507): ({"method": "area", "multiple": 64}, (960, 448)),
        ("image_scale_to_multiple", 40, 507): ({"method": "area", "multiple": 64}, (40, 507)),
        ("latent_upscale_to_pixels", 20, 14): (
            {"method": "area", "width": 8, "height": 100},
            (8, 12),
        ),  # at least 64 pixels
        ("latent_upscale_to_pixels", 20, 15): ({"method": "area", "width": 0, "height": 96}, (16, 12)),
        ("latent_crop", 20, 14): ({"x": 999, "y": 999, "width": 800, "height": 16}, (8, 2)),
    }
    for (name, width, height), (settings, wanted) in cases.items():
        found = OPERATIONS[name]
        size = found.size_of(found.params_of(settings), dict.fromkeys(found.inputs, Size(width, height)))
        assert (size.width, size.height) == wanted, (name, settings)
    assert centre_box(100, 50, 10, 10) == (25, 0, 50, 50)
    assert centre_box(50, 99, 10, 10) == (0, 24, 50, 51)  # 24.5: half to even


def test_lanczos_is_pillows() -> None:
    pixels = draw(14, 20, 3)
    wanted = np.asarray(Image.fromarray(pixels).resize((33, 9), Image.Resampling.LANCZOS))
    found = run("image_scale", ImagePixels(pixels), method="lanczos", width=33, height=9)
    np.testing.assert_array_equal(found.pixels_HWC, wanted)


def test_an_image_covers_multiples_and_is_cut_at_the_centre() -> None:
    """100x51 with sides of 16: 96x48 of the image scaled by 0.96, which is 96x49."""
    image = ImagePixels(draw(51, 100, 3))
    found = run("image_scale_to_multiple", image, method="area", multiple=16)
    scaled = run("image_scale", image, method="area", width=96, height=49)
    np.testing.assert_array_equal(found.pixels_HWC, scaled.pixels_HWC[:48])
    narrow = ImagePixels(draw(100, 51, 3))
    found = run("image_scale_to_multiple", narrow, method="area", multiple=16)
    wide = run("image_scale", narrow, method="area", width=49, height=96)
    np.testing.assert_array_equal(found.pixels_HWC, wide.pixels_HWC[:, :48])
    aligned = ImagePixels(draw(32, 48, 3))
    same = run("image_scale_to_multiple", aligned, method="area", multiple=16)
    np.testing.assert_array_equal(same.pixels_HWC, aligned.pixels_HWC)


def test_brightness_multiplies_and_contrast_moves_from_the_middle() -> None:
    pixels = np.array([[[0, 100, 200, 77], [255, 128, 51, 0]]], np.uint8)
    cases = {
        ("image_brightness", 1.5): [[0, 150, 255, 77], [255, 192, 76, 0]],
        ("image_contrast", 1.5): [[0, 86, 236, 77], [255, 128, 13, 0]],
        ("image_contrast", 0.0): [[128, 128, 128, 77], [128, 128, 128, 0]],
    }
    for (name, factor), wanted in cases.items():
        found = run(name, ImagePixels(pixels), factor=factor)
        assert found.pixels_HWC.tolist() == [wanted], (name, factor)


def test_an_image_gets_the_size_of_another() -> None:
    image, like = ImagePixels(draw(20, 30, 3)), ImagePixels(draw(12, 12, 3))
    for crop in (False, True):
        found = run("image_scale_like", image, like, method="bilinear", crop=crop)
        wanted = run("image_scale", image, method="bilinear", width=12, height=12, crop=crop)
        np.testing.assert_array_equal(found.pixels_HWC, wanted.pixels_HWC)


def test_blend_modes() -> None:
    one, other = draw(6, 5, 3), draw(6, 5, 3, seed=1)
    a, b = (each.astype(np.float64) / 255 for each in (one, other))
    lifted = np.where(a <= 0.25, ((16 * a - 12) * a + 4) * a, np.sqrt(a))
    modes = {
        "normal": b,
        "multiply": a * b,
        "screen": a + b - a * b,
        "overlay": np.where(a <= 0.5, 2 * a * b, 2 * (a + b - a * b) - 1),
        "soft_light": np.where(b <= 0.5, a - (1 - 2 * b) * a * (1 - a), a + (2 * b - 1) * (lifted - a)),
        "difference": a - b,
    }
    for mode, mixed in modes.items():
        found = run("image_blend", ImagePixels(one), ImagePixels(other), factor=0.75, mode=mode).pixels_HWC
        wanted = np.clip(a * 0.25 + mixed * 0.75, 0, 1) * 255
        assert np.abs(found - wanted).max() <= 0.5001, mode


def test_blur_and_sharpen_are_convolutions() -> None:
    pixels, radius, sigma = draw(14, 20, 3), 3, 0.8
    places = torch.linspace(-1, 1, 2 * radius + 1)
    kernel = torch.exp(-(places[:, None] ** 2 + places[None, :] ** 2) / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    levels = torch.from_numpy(pixels).permute(2, 0, 1)[:, None].float() / 255
    wide = torch.nn.functional.pad(levels, (radius,) * 4, mode="reflect")
    smooth = torch.nn.functional.conv2d(wide, kernel[None, None])
    sharp = torch.nn.functional.conv2d(wide, -kernel[None, None] * 5) + levels * 6
    for name, wanted, settings in (("image_blur", smooth, {}), ("image_sharpen", sharp, {"alpha": 0.5})):
        found = run(name, ImagePixels(pixels), radius=radius, sigma=sigma, **settings).pixels_HWC
        expected = wanted.clamp(0, 1)[:, 0].permute(1, 2, 0).numpy() * 255
        assert np.abs(found - expected).max() <= 0.501, name


def test_quantize_leaves_few_colours_and_the_mean() -> None:
    smooth = np.linspace(0, 255, 64).astype(np.uint8)
    pixels = np.repeat(np.repeat(smooth[None, :, None], 64, axis=0), 3, axis=2)
    for dither in ("none", "floyd-steinberg", "bayer-2", "bayer-16"):
        found = run("image_quantize", ImagePixels(pixels), colours=4, dither=dither).pixels_HWC
        assert len(np.unique(found.reshape(-1, 3), axis=0)) <= 4, dither
        assert abs(found.mean() - pixels.mean()) < 12, dither
    assert bayer_ranks(2).tolist() == [[0, 2], [3, 1]]
    assert bayer_ranks(4).tolist() == [[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]]


def test_padding_and_its_mask() -> None:
    image = ImagePixels(draw(20, 30, 3))
    settings = {"left": 4, "top": 0, "right": 0, "bottom": 6, "feathering": 5}
    padded, mask = run("image_pad", image, **settings).pixels_HWC, run("image_pad_mask", image, **settings).values_HW
    np.testing.assert_array_equal(padded[:20, 4:], image.pixels_HWC)
    assert (padded[:, :4] == 128).all()
    assert (padded[20:] == 128).all()
    assert (mask[:, :4] == 255).all()
    for row, column in ((0, 4), (0, 6), (10, 29), (19, 20), (17, 5)):
        distance = min(column - 4, 19 - row)
        wanted = max(0.0, 1 - distance / 5) ** 2
        assert mask[row, column] == round(wanted * 255), (row, column)


def test_compositions_of_images_and_masks() -> None:
    under, over, mask = draw(8, 9, 3), draw(4, 5, 3), draw(4, 5)
    found = run("image_composite", ImagePixels(under), ImagePixels(over), Mask(mask), x=-2, y=6).pixels_HWC
    wanted = under.astype(np.float64)
    share = mask[:2, 2:, None] / 255
    wanted[6:, :3] = over[:2, 2:] * share + under[6:, :3] * (1 - share)
    assert np.abs(found - wanted).max() <= 0.501
    one, other = draw(6, 7), draw(3, 3, seed=2)
    part = one[1:4, 2:5].astype(int)
    bits = part > 127, other > 127
    modes = {
        "multiply": np.rint(part * other / 255),
        "add": np.minimum(part + other, 255),
        "subtract": np.maximum(part - other, 0),
        "and": (bits[0] & bits[1]) * 255,
        "or": (bits[0] | bits[1]) * 255,
        "xor": (bits[0] ^ bits[1]) * 255,
    }
    for mode, part_wanted in modes.items():
        values = run("mask_composite", Mask(one), Mask(other), x=2, y=1, mode=mode).values_HW
        np.testing.assert_array_equal(values[1:4, 2:5], part_wanted, mode)
        np.testing.assert_array_equal(np.delete(values, [1, 2, 3], axis=0), np.delete(one, [1, 2, 3], axis=0))


def test_masks_grow_by_steps_and_fade_at_their_sides() -> None:
    point = np.zeros((9, 9), np.uint8)
    point[4, 4] = 200
    rows, columns = np.abs(np.indices((9, 9)) - 4)
    for tapered, distance in ((True, rows + columns), (False, np.maximum(rows, columns))):
        found = run("mask_grow", Mask(point), pixels=3, tapered=tapered).values_HW
        np.testing.assert_array_equal(found, np.where(distance <= 3, 200, 0))
        shrunk = run("mask_grow", Mask(255 - point), pixels=-3, tapered=tapered).values_HW
        np.testing.assert_array_equal(shrunk, 255 - found)
    white = Mask(np.full((4, 6), 255, np.uint8))
    assert (run("mask_grow", white, pixels=-5).values_HW == 255).all(), "outside, the edge is repeated"
    faded = run("mask_feather", white, left=4, top=2, right=0, bottom=0).values_HW
    wanted = np.rint(255 * np.outer([0.5, 1, 1, 1], [0.25, 0.5, 0.75, 1, 1, 1]))
    np.testing.assert_array_equal(faded, wanted)
    round_one = run("mask_radial", Mask(np.full((8, 12), 255, np.uint8)), x=4, y=4).values_HW
    y, x = np.indices((8, 12)) + 0.5
    wide = np.where(x < 4, 4 - x, (x - 4) / 2)  # 8 pixels to the right side, 4 to the others
    wanted = np.rint(255 * np.maximum(0, 1 - np.hypot(wide / 4, (y - 4) / 4)))
    np.testing.assert_allclose(round_one, wanted, atol=1)
    assert run("mask_threshold", Mask(np.array([[127, 128]], np.uint8)), level=0.5).values_HW.tolist() == [[0, 255]]
    with pytest.raises(UnusableField, match="found alpha"):
        run("mask_from_image", ImagePixels(draw(2, 2, 3)), channel="alpha")


def test_latents_are_mixed_in_the_scale_of_the_vae() -> None:
    scale = VaeScale(0.5, 0.25, (1.0, -1.0), (2.0, 3.0))
    vae = [drawn(2, 10, 12, seed=seed) for seed in (1, 2)]
    one, other = (Latent(scale.to_model(each)) for each in vae)
    np.testing.assert_allclose(scale.to_vae(one.samples_CHW), vae[0], atol=1e-5)
    lengths = [np.linalg.norm(each, axis=0) for each in vae]
    direction = vae[0] / lengths[0] * 0.3 + vae[1] / lengths[1] * 0.7
    direction /= np.linalg.norm(direction, axis=0)
    wanted = {
        "latent_add": (vae[0] + vae[1], {}),
        "latent_subtract": (vae[0] - vae[1], {}),
        "latent_interpolate": (direction * (lengths[0] * 0.3 + lengths[1] * 0.7), {"ratio": 0.3}),
        "latent_blend": (vae[0] * 0.3 + vae[1] * 0.7, {"ratio": 0.3}),
    }
    for name, (values, settings) in wanted.items():
        found = scale.to_vae(run(name, one, other, scale=scale.numbers, **settings).samples_CHW)
        np.testing.assert_allclose(found, values, atol=1e-5, err_msg=name)
    with pytest.raises(UnusableField, match="second: found a latent of"):
        run("latent_add", one, Latent(drawn(4, 10, 12)))


def test_latents_are_turned_along_the_arc() -> None:
    samples = drawn(4, 3, 2)
    found = run("latent_upscale_by", Latent(samples), method="bislerp", factor=2.0).samples_CHW
    lengths = np.linalg.norm(samples, axis=0)
    shares = [0.0, 0.25, 0.75, 1.0]  # the places 0, 0.25, 0.75 and 1 between two columns
    for row in (0, 5):  # rows at the edge are not mixed
        a, b = samples[:, row // 3 * 2, 0], samples[:, row // 3 * 2, 1]
        first, second = lengths[row // 3 * 2]
        angle = math.acos(a @ b / first / second)
        for column, share in enumerate(shares):
            turned = (math.sin((1 - share) * angle) * a / first + math.sin(share * angle) * b / second) / math.sin(
                angle
            )
            wanted = turned * (first * (1 - share) + second * share)
            np.testing.assert_allclose(found[:, row, column], wanted, atol=1e-5)


def test_latents_are_pasted_with_feather_at_inner_sides_only() -> None:
    under, over = np.zeros((1, 6, 8), np.float32), np.ones((1, 3, 4), np.float32)
    found = run("latent_composite", Latent(under), Latent(over), x=0, y=8, feather=16).samples_CHW[0]
    rows, columns = np.array([0.5, 1 * 1, 0.5]), np.array([1, 1, 1, 0.5])
    np.testing.assert_allclose(found[1:4, :4], np.outer(rows, columns))
    assert not found[:, 4:].any()
    assert not found[0].any()
    assert not found[4:].any()
    samples = drawn(2, 3, 5, 7)
    turned = run("latent_rotate", Latent(samples), rotation="90 degrees").samples_CHW
    np.testing.assert_array_equal(turned, np.rot90(samples, -1, (2, 3)))
    np.testing.assert_array_equal(turned[:, :, 0], samples[:, :, ::-1, 0], "clockwise: the left side is on top")


def test_texts_are_averaged_joined_and_set_to_zero() -> None:
    first, second = Encoded(drawn(4, 3), drawn(2)), Encoded(drawn(2, 3, seed=1), drawn(2, seed=1))
    found = run("encoded_average", first, second, strength=0.75)
    longer = np.concatenate([second.context_LD, np.zeros((2, 3), np.float32)])
    np.testing.assert_allclose(found.context_LD, first.context_LD * 0.75 + longer * 0.25, atol=1e-6)
    assert first.pooled_V is not None
    assert second.pooled_V is not None
    np.testing.assert_allclose(found.pooled_V, first.pooled_V * 0.75 + second.pooled_V * 0.25, atol=1e-6)
    joined = run("encoded_concat", first, second)
    np.testing.assert_array_equal(joined.context_LD, np.concatenate([first.context_LD, second.context_LD]))
    marks: dict[str, npt.NDArray[Any]] = {"mask": np.ones(4, np.int64), "states": drawn(4, 2)}
    zero = run("encoded_zero", Encoded(first.context_LD, first.pooled_V, marks))
    assert not zero.context_LD.any()
    assert not zero.pooled_V.any()
    assert not zero.others["states"].any()
    assert zero.others["mask"].all(), "the tokens are still there"
    with pytest.raises(UnusableField, match="found texts with mask, states"):
        run("encoded_concat", Encoded(first.context_LD, None, marks), second)


def test_marks_of_a_text_are_its_tokens_and_the_padding_that_is_wanted() -> None:
    """A text of Chroma has marks of its tokens and of one padding token; one that fills all places has none."""
    context_LD = drawn(8, 4)
    for own, padding, least, expected in ((5, 0, 3, 5), (5, 1, 0, 6), (1, 0, 3, 3), (0, 2, 0, 2)):
        text = Encoded(context_LD, None, {"context_mask": np.arange(8) < own + 1})
        found = run("encoded_padding", text, least_padding=padding, least_tokens=least)
        assert found.others["context_mask"].tolist() == [place < expected for place in range(8)], (own, padding, least)
        assert found.context_LD is context_LD
    full = Encoded(context_LD, None, {"context_mask": np.arange(8) < 6})
    for text, padding in ((Encoded(context_LD, None), 0), (full, 9)):
        assert not run("encoded_padding", text, least_padding=padding, least_tokens=3).others
    with pytest.raises(UnusableField, match="expected it behind them"):
        run("encoded_padding", Encoded(context_LD, None, {"context_mask": np.arange(8) > 2}),
            least_padding=0, least_tokens=3)  # fmt: skip


def test_images_are_scaled_by_a_filter_of_pillow_at_eight_times_the_size_first() -> None:
    pixels = draw(10, 14, 3)
    image = Image.fromarray(pixels)
    expected = image.resize((7 * 8, 5 * 8), Image.Resampling.BICUBIC).resize((7, 5), Image.Resampling.BICUBIC)
    found = run("image_scale_by_filter", ImagePixels(pixels), factor=0.5, method="bicubic", oversampled=True)
    assert np.array_equal(found.pixels_HWC, np.asarray(expected))
    found = run("image_scale_by_filter", ImagePixels(pixels), width=9, height=20, method="nearest")
    assert np.array_equal(found.pixels_HWC, np.asarray(image.resize((9, 20), Image.Resampling.NEAREST)))
    operation = OPERATIONS["image_scale_by_filter"]
    params = operation.params_of({"width": 4000, "height": 4000, "oversampled": True})
    with pytest.raises(UnusableField, match=r"oversampled: found 4000x4000"):
        operation.size_of(params, {"image": Size(64, 64)})


def test_frames_are_oversampled_one_after_the_other_and_their_work_is_counted() -> None:
    """Before: all frames were in memory at 8 times the sides: a video of 100 frames of 512x512 took 5 GB."""
    frames, settings = draw(16, 64, 64, 3), {"factor": 1.0, "oversampled": True}
    tracemalloc.start()
    try:
        found = run("image_scale_by_filter", VideoFrames(frames, 8.0), **settings)
        assert tracemalloc.get_traced_memory()[1] < frames.nbytes * 8**2 / 2
    finally:
        tracemalloc.stop()
    for frame, expected in zip(found.frames_THWC, frames, strict=True):
        assert np.array_equal(frame, run("image_scale_by_filter", ImagePixels(expected), **settings).pixels_HWC)
    operation = OPERATIONS["image_scale_by_filter"]
    params = operation.params_of({"width": 512, "height": 512, "oversampled": True})
    assert operation.size_of(params, {"image": Size(64, 64, 256)}) == Size(512, 512, 256)
    with pytest.raises(UnusableField, match=r"oversampled: found 8 for 512x512 in 257 frames"):
        operation.size_of(params, {"image": Size(64, 64, 257)})


def test_sides_of_latents_are_cut_to_cells_and_then_the_nearest_multiple() -> None:
    """Computed by hand: 80 * 1.53125 = 122.5 is cut to 122, of which 120 is the nearest multiple of 8; 12 is as near to
    8 as to 16, and becomes 16."""
    operation = OPERATIONS["latent_upscale_by_sides"]
    params = operation.params_of({"width_factor": 1.53125, "height_factor": 0.5, "multiple": 8})
    assert operation.size_of(params, {"samples": Size(80, 24)}) == Size(120, 16)
    operation = OPERATIONS["image_scale_by_sides"]
    params = operation.params_of({"width_factor": 1.53125, "height_factor": 0.5, "multiple": 8})
    assert operation.size_of(params, {"image": Size(80, 24)}) == Size(120, 16)


def test_an_image_is_scaled_to_whole_cells_of_a_compression() -> None:
    """As ComfyUI's StableCascade_StageC_VAEEncode: 50 // 8 and 33 // 8 cells, bicubic, and a crop at the centre."""
    image = ImagePixels(np.random.default_rng(5).integers(0, 256, (33, 50, 3), dtype=np.uint8))
    made, expected = (
        operate(OperationParams(name, tuple(sorted(settings.items()))), TaskInputs({"image": image}))
        for name, settings in (
            ("image_scale_to_cells", {"compression": 8, "cell": 4, "method": "bicubic", "crop": True}),
            ("image_scale", {"width": 24, "height": 16, "method": "bicubic", "crop": True}),
        )
    )
    assert isinstance(made, ImagePixels)
    assert isinstance(expected, ImagePixels)
    np.testing.assert_array_equal(made.pixels_HWC, expected.pixels_HWC)


def test_frames_there_and_back_have_neither_end_twice() -> None:
    back = OPERATIONS["image_there_and_back"]
    for count, wanted in ((1, [0]), (2, [0, 1]), (3, [0, 1, 2, 1]), (5, [0, 1, 2, 3, 4, 3, 2, 1])):
        frames_THWC = np.arange(count, dtype=np.uint8)[:, None, None, None].repeat(3, axis=3)
        found = back.run(back.params_of({}), {"image": VideoFrames(frames_THWC, 8.0)})
        assert (found.frames_THWC[:, 0, 0, 0].tolist(), found.frame_rate) == (wanted, 8.0)


def test_what_is_no_operation_is_refused_by_name() -> None:
    for name, reason in NOT_LATENT_EDITS.items():
        with pytest.raises(UnknownName, match=f"{name}.*{reason}"):
            operation_named(name)
    with pytest.raises(UnknownName, match="image_melt"):
        operation_named("image_melt")
    found = OPERATIONS["image_repeat"]
    with pytest.raises(UnusableField, match="its result has 16384x16384 in 4096 frames"):
        found.size_of(found.params_of({"amount": 4096}), {"image": Size(16384, 16384)})
    with pytest.raises(UnusableField, match="image_scale: expected the settings height"):
        OPERATIONS["image_scale"].params_of({"width": 8})


def test_settings_have_the_types_of_their_parameters() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "image_scale": {"width": 2.5, "height": True, "method": 3, "crop": 1},
        "image_scale_to_nearest": {"sizes": (1, 2.5)},
        "latent_multiply": {"factor": "2", "scale": (1.0, "x")},
    }
    for name, settings in wrong.items():
        for setting, value in settings.items():
            with pytest.raises(UnusableField, match=f"{name}: {setting}: found"):
                OPERATIONS[name].params_of({**CASES[name][0], setting: value})
    known = {str(one.type) for each in OPERATIONS.values() for one in dataclasses.fields(each.params)}
    assert known <= {"bool", "int", "float", "str", "tuple[int, ...]", "tuple[float, ...]"}, (
        "values of a task's settings"
    )
    with pytest.raises(UnusableField, match=r"scale: found \(0"):
        run("latent_multiply", example("latent", 0, 0), factor=2.0, scale=(0.0, 0.0))


def test_a_process_that_plans_needs_no_torch() -> None:
    code = "import sys; from modelpool.pool.inference.operations import operate;sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cells_of_a_video_are_replaced_and_made_like_those_behind_them() -> None:
    """The cells at the start get the mean and the deviation of those behind them, as far as each may move: the formula
    in 64 bits, in the scale of the VAE."""
    video, image = Latent(drawn(4, 6, 5, 3) * 2 + 1), Latent(drawn(4, 5, 3, seed=1))
    replaced = run("latent_replace_frames", video, image, index=-4).samples_CHW
    np.testing.assert_array_equal(replaced[:, 2], image.samples_CHW)
    kept = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(replaced[:, kept], video.samples_CHW[:, kept])
    for source, index in ((Latent(drawn(4, 2, 5, 3)), 5), (Latent(drawn(4, 5, 4)), 0)):
        with pytest.raises(UnusableField, match="source"):
            run("latent_replace_frames", video, source, index=index)
    factor = 0.5
    changed = run("latent_normalize_start", video, start=2, reference=3, scale=(factor, 0.0)).samples_CHW
    own = video.samples_CHW.astype(np.float64) / factor
    like = own[:, 2:5]
    for cell in range(2):
        one = own[:, cell]
        mean = np.clip(like.mean(), one.mean() - 0.3, one.mean() + 0.35)
        deviation = np.clip(like.std(ddof=1), one.std(ddof=1) - 0.35, one.std(ddof=1) + 0.5)
        expected = ((one - one.mean()) / one.std(ddof=1) * deviation + mean) * factor
        np.testing.assert_allclose(changed[:, cell], expected, atol=1e-5)
    np.testing.assert_allclose(changed[:, 2:], video.samples_CHW[:, 2:], atol=1e-6)
    alone = Latent(drawn(4, 1, 5, 3))
    np.testing.assert_array_equal(
        run("latent_normalize_start", alone, start=4, reference=5).samples_CHW, alone.samples_CHW
    )
