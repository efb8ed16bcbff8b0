"""Edges, morphology, images side by side, frames and planes: by hand, and against a plain search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelpool.pool.inference.operations import image_detail
from modelpool.pool.inference.operations.image_detail import MORPHOLOGY, PLANES
from modelpool.pool.inference.operations.operate import operation_named
from modelpool.pool.inference.operations.operation import Size
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import Encoded, ImagePixels, Mask


def run(name: str, settings: dict[str, Any] | None = None, **inputs: Any) -> Any:
    operation = operation_named(name)
    return operation(operation.params_of(settings or {}), inputs)


def drawn(height: int, width: int, seed: int = 0) -> ImagePixels:
    return ImagePixels(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def test_edges_of_a_square_are_its_border_and_weak_ones_need_a_strong_neighbour() -> None:
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[10:30, 20:40] = 255
    edges = run("image_edges", image=ImagePixels(pixels)).pixels_HWC
    rows, columns = np.nonzero(edges[..., 0])
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (10, 29, 20, 39)
    assert 0 not in edges[10, 20:40, 0]
    assert not edges[12:28, 22:38].any(), "one pixel wide"
    faint = (pixels * 0.2).astype(np.uint8)
    assert not run("image_edges", image=ImagePixels(faint)).pixels_HWC.any()
    faint[10:] = np.linspace(255, 60, 60).astype(np.uint8)[:, None]
    linked = run("image_edges", {"low": 0.1, "high": 0.8}, image=ImagePixels(faint)).pixels_HWC
    assert (linked[10, 2:58, 0] == 255).all(), "a weak edge that leads to a strong one"
    alone = run("image_edges", {"low": 0.79, "high": 0.8}, image=ImagePixels(faint)).pixels_HWC
    assert not alone[10, 55:58].any()


def test_a_line_as_long_as_the_image_is_followed_in_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that winds through the whole image took a round for each of its pixels, each over all pixels."""
    side, rounds = 64, []
    weak = np.zeros((side, side), bool)
    weak[::2] = True
    weak[1::4, -1] = weak[3::4, 0] = True
    strong = np.zeros_like(weak)
    strong[0, 0] = True
    part = image_detail.joined_parts
    monkeypatch.setattr(image_detail, "joined_parts", lambda *given: rounds.append(1) or part(*given))
    assert np.array_equal(image_detail._connected(strong, weak), weak)
    assert len(rounds) <= 3 * int(weak.sum()).bit_length()
    drawn_masks = np.random.default_rng(5).random((2, 40, 60)) < np.array([0.01, 0.4])[:, None, None]
    seeds, places = drawn_masks
    expected = seeds.copy()
    for _ in range(expected.size):
        wide = np.pad(expected, 1)
        near = np.logical_or.reduce([wide[y : y + 40, x : x + 60] for y in range(3) for x in range(3)])
        expected, before = expected | (near & places), expected
        if np.array_equal(expected, before):
            break
    assert np.array_equal(image_detail._connected(seeds, places), expected)
    nothing = np.zeros((4, 4), bool)
    assert not image_detail._connected(nothing, nothing).any()


def test_work_without_end_is_refused_before_it_begins() -> None:
    """With the setting and the bound: a mask of 16384 pixels a side that grows by 1024 takes hours."""
    large, film = Size(16384, 16384), Size(4096, 4096, 16)
    wrong = []
    for name, settings, size in (
        ("mask_grow", {"pixels": 1024}, large), ("mask_grow", {"pixels": -1024}, film),
        ("mask_blur", {"pixels": 200.0}, large), ("image_blur", {"radius": 31, "sigma": 1.0}, large),
        ("image_sharpen", {"radius": 31, "sigma": 1.0, "alpha": 1.0}, film),
    ):  # fmt: skip
        operation = operation_named(name)
        (source,) = operation.inputs
        (setting, value) = next(iter(settings.items()))
        with pytest.raises(
            UnusableField, match=f"{setting}: found {value:g} for .* expected up to 68,719,476,736 steps"
        ):
            operation.size_of(operation.params_of(settings), {source: size})
        small = operation.size_of(operation.params_of(settings), {source: Size(1024, 1024)})
        wrong += [] if small == Size(1024, 1024) else [name]
    assert not wrong
    for name, settings in (("image_edges", {}), ("image_morphology", {"operation": "open", "kernel": 999})):
        operation = operation_named(name)  # these take few steps for each pixel, whatever their settings are
        assert operation.size_of(operation.params_of(settings), {"image": large}) == large


def test_morphology_is_the_extreme_of_each_square() -> None:
    image, wrong = drawn(9, 12), []
    for size in (3, 4, 7, 8, 30):
        found = {name: run("image_morphology", {"operation": name, "kernel": size}, image=image) for name in MORPHOLOGY}
        pixels = image.pixels_HWC.astype(int)
        wide, narrow = (_search(pixels, size, choose) for choose in (np.max, np.min))
        opened, closed = _search(narrow, size, np.max), _search(wide, size, np.min)
        wanted = {
            "dilate": wide, "erode": narrow, "open": opened, "close": closed, "gradient": wide - narrow,
            "top_hat": np.maximum(pixels - opened, 0), "bottom_hat": np.maximum(closed - pixels, 0),
        }  # fmt: skip
        wrong += [(size, name) for name, want in wanted.items() if not np.array_equal(found[name].pixels_HWC, want)]
    assert not wrong


def _search(pixels: Any, size: int, choose: Any) -> Any:
    """The extreme of the square around each pixel, of the pixels in the image."""
    before, after = size // 2, size - 1 - size // 2
    found = np.empty_like(pixels)
    for row in range(len(pixels)):
        for column in range(pixels.shape[1]):
            part = pixels[max(0, row - before) : row + after + 1, max(0, column - before) : column + after + 1]
            found[row, column] = choose(part, axis=(0, 1))
    return found


def test_two_images_meet_at_equal_sides_or_in_the_middle_of_black_space() -> None:
    one, other = drawn(20, 30), drawn(40, 10, seed=1)
    beside = run(
        "image_stitch", {"direction": "right", "spacing": 3, "colour": "red"}, first=one, second=other
    ).pixels_HWC
    assert beside.shape == (20, 30 + 4 + 5, 3)
    assert np.array_equal(beside[:, :30], one.pixels_HWC)
    assert (beside[:, 30:34] == (255, 0, 0)).all()
    above = run("image_stitch", {"direction": "up", "matches": False}, first=one, second=other).pixels_HWC
    assert above.shape == (60, 30, 3)
    assert np.array_equal(above[:40, 10:20], other.pixels_HWC)
    assert not above[:40, :10].any()
    assert np.array_equal(above[40:], one.pixels_HWC)


def test_a_letterbox_keeps_proportions_and_planes_make_the_image_again() -> None:
    image = drawn(20, 40)
    framed = run("image_letterbox", {"width": 40, "height": 40}, image=image).pixels_HWC
    assert np.array_equal(framed[10:30], image.pixels_HWC)
    assert (framed[:10] == 255).all()
    planes = {plane: run("image_plane", {"plane": plane}, image=image) for plane in PLANES}
    again = run("image_of_planes", **planes).pixels_HWC
    assert np.abs(again.astype(int) - image.pixels_HWC).max() <= 4, "rounded to 8 bits, and colours that fit"
    grey = ImagePixels(np.full((4, 4, 3), 90, np.uint8))
    assert {plane: int(run("image_plane", {"plane": plane}, image=grey).pixels_HWC[0, 0, 0]) for plane in PLANES} == {
        "Y": 90, "U": 128, "V": 128,
    }  # fmt: skip


def test_a_white_mask_is_transparent_and_its_inverse_comes_back() -> None:
    mask = Mask(np.random.default_rng(3).integers(0, 256, (8, 8), np.uint8))
    shown = run("image_with_alpha", image=drawn(8, 8), mask=mask)
    assert np.array_equal(shown.pixels_HWC[..., 3], 255 - mask.values_HW)
    assert np.array_equal(run("image_alpha_mask", image=shown).values_HW, mask.values_HW)
    assert not run("image_alpha_mask", image=drawn(8, 8)).values_HW.any()


def test_each_text_encoder_reads_a_text_of_its_own() -> None:
    """Columns of CLIP-L and of CLIP-G, which are as many as the pooled embedding has; rows of CLIP and of T5."""
    random = np.random.default_rng(4)
    one, other = (Encoded(random.random((7, 10), np.float32), random.random(6, np.float32)) for _ in range(2))
    both = run("encoded_of_two", first=one, second=other)
    assert np.array_equal(both.context_LD[:, :4], one.context_LD[:, :4])
    assert np.array_equal(both.context_LD[:, 4:], other.context_LD[:, 4:])
    assert np.array_equal(both.pooled_V, other.pooled_V)
    pooled = run("encoded_pooled_of", first=one, second=other)
    assert np.array_equal(pooled.context_LD, one.context_LD)
    assert np.array_equal(pooled.pooled_V, other.pooled_V)
    texts = []
    for _ in range(3):  # 3 rows of CLIP, with zeros behind 4 columns, and 2 of T5
        context_LD = random.random((5, 9), np.float32)
        context_LD[:3, 4:] = 0
        texts.append(Encoded(context_LD, random.random(4, np.float32)))
    found = run("encoded_of_three", **dict(zip(("first", "second", "third"), texts, strict=True)))
    assert np.array_equal(found.context_LD[:3, :2], texts[0].context_LD[:3, :2])
    assert np.array_equal(found.context_LD[:3, 2:], texts[1].context_LD[:3, 2:])
    assert np.array_equal(found.context_LD[3:], texts[2].context_LD[3:])
    assert found.pooled_V is not None
    assert np.array_equal(found.pooled_V, np.concatenate([texts[0].pooled_V[:2], texts[1].pooled_V[2:]]))
    named = dict(zip(("first", "second", "third"), texts, strict=True))
    clip_only = run("encoded_of_three", {"has_third": False}, **named)
    assert np.array_equal(clip_only.context_LD, found.context_LD[:3])
    assert np.array_equal(clip_only.pooled_V, found.pooled_V)
    third_only = run("encoded_of_three", {"has_clip": False}, **named)
    assert np.array_equal(third_only.context_LD, found.context_LD[3:])
    none = run("encoded_of_three", {"has_clip": False, "has_third": False}, **named)
    assert (none.context_LD.shape, none.context_LD.any()) == ((3, 9), False)
    assert not third_only.pooled_V.any()
    assert not none.pooled_V.any()


def test_of_two_images_the_first_decides_about_alpha() -> None:
    """An image with an alpha channel could not be mixed with one without."""
    plain = drawn(4, 6)
    clear = ImagePixels(np.concatenate([drawn(4, 6, 1).pixels_HWC, np.full((4, 6, 1), 90, np.uint8)], axis=-1))
    whole = {"factor": 1.0, "mode": "normal"}
    found = run("image_blend", whole, first=plain, second=clear).pixels_HWC
    np.testing.assert_array_equal(found, clear.pixels_HWC[..., :3])
    found = run("image_blend", whole, first=clear, second=plain).pixels_HWC
    np.testing.assert_array_equal(found[..., :3], plain.pixels_HWC)
    assert (found[..., 3] == 255).all()


@pytest.mark.parametrize("is_first", [True, False])
def test_images_next_to_each_other_keep_their_alpha_channel(is_first: bool) -> None:
    """Before: a batch lost the one of its second image without a word, and images side by side lost both."""
    plain = drawn(4, 6)
    clear = ImagePixels(np.concatenate([drawn(4, 6, 1).pixels_HWC, np.full((4, 6, 1), 90, np.uint8)], axis=-1))
    first, second = (clear, plain) if is_first else (plain, clear)
    batch = run("image_batch", {}, first=first, second=second).frames_THWC
    settings = {"direction": "right", "spacing": 2, "colour": "red"}
    beside = run("image_stitch", settings, first=first, second=second).pixels_HWC
    left, right = beside[:, :6], beside[:, -6:]
    for found in (batch, (left, right)):
        for image, given in zip(found, (first, second), strict=True):
            np.testing.assert_array_equal(image[..., :3], given.pixels_HWC[..., :3])
            assert (image[..., 3] == (90 if given is clear else 255)).all()
    assert (beside[:, 6:-6] == (255, 0, 0, 255)).all()
