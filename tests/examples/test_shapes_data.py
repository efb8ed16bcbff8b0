"""Proves that the checker reads drawn images of every style right, and says wrong where a caption is another's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from examples.shapes import drawing
from examples.shapes.checker import Reading, largest_region, matches, read_image


def drawn(scene: drawing.Scene, side_pixels: int = drawing.SIDE_PIXELS) -> Any:
    return np.round(drawing.draw(scene, side_pixels) * 255).astype(np.uint8)


@pytest.mark.parametrize("background", ["dark", "light"])
@pytest.mark.parametrize("filled", [True, False])
def test_the_checker_reads_drawn_images_of_every_style(background: drawing.Background, filled: bool) -> None:
    rng = np.random.default_rng(7)
    wrong = []
    for _ in range(300):
        scene = drawing.random_scene(rng, background, filled)
        reading = read_image(drawn(scene))
        expected = Reading(scene.shapes[0].colour, scene.shapes[0].shape, background, filled)
        if reading != expected:
            wrong.append((scene, reading))
    assert len(wrong) <= 3, wrong[:3]


def test_the_checker_survives_noise_and_a_tinted_background() -> None:
    rng = np.random.default_rng(8)
    wrong = 0
    for index in range(200):
        scene = drawing.random_scene(rng, "light" if index % 2 else "dark", index % 4 < 2)
        noisy = drawn(scene) + rng.normal(0, 8, (64, 64, 3)) + rng.uniform(-12, 12, 3)
        reading = read_image(np.clip(noisy, 0, 255).astype(np.uint8))
        wrong += not matches(reading, drawing.caption(scene)) or reading.filled != scene.filled
    assert wrong <= 2


def test_the_checker_says_wrong_for_every_other_caption() -> None:
    rng = np.random.default_rng(9)
    for _ in range(20):
        scene = drawing.random_scene(rng)
        reading = read_image(drawn(scene))
        right = [caption for caption in drawing.all_captions() if matches(reading, caption)]
        assert right == [drawing.caption(scene)]


def test_an_empty_image_matches_nothing() -> None:
    for background in ("dark", "light"):
        reading = read_image(drawn(drawing.Scene((), background)))
        assert reading == Reading("none", "none", background, True)
        assert not any(matches(reading, caption) for caption in drawing.all_captions())


def test_other_phrasings_match_and_a_prompt_without_one_colour_and_shape_is_refused() -> None:
    reading = Reading("red", "circle", "dark", True)
    assert matches(reading, "An image of a red circle, flat")
    with pytest.raises(ValueError, match="names 2 colours and 2 shapes"):
        matches(reading, "a red circle and a blue square")
    with pytest.raises(ValueError, match="names 0 colours"):
        matches(reading, "a circle")


def test_pixels_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        read_image(np.zeros((64, 64, 3), np.float32))


def test_the_largest_region_of_two_is_found_whole() -> None:
    mask = np.zeros((20, 20), bool)
    mask[2:5, 2:5] = True
    snake = [(10, column) for column in range(3, 18)] + [(row, 17) for row in range(10, 16)]
    for row, column in snake:
        mask[row, column] = True
    found = largest_region(mask)
    assert found.sum() == len(set(snake))
    assert not found[3, 3]


def test_drawing_is_a_function_of_the_seed_and_unknown_names_are_refused() -> None:
    scenes = [drawing.random_scene(np.random.default_rng(3), share_of_two=0.5) for _ in range(2)]
    assert scenes[0] == scenes[1]
    with pytest.raises(ValueError, match="expected one of red"):
        drawing.draw(drawing.Scene((drawing.ShapeInScene("mauve", "circle", 32, 32, 12),)))
    with pytest.raises(ValueError, match="expected one of circle"):
        drawing.draw(drawing.Scene((drawing.ShapeInScene("red", "star", 32, 32, 12),)))


def test_two_shapes_of_one_scene_do_not_touch_and_the_caption_names_both() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        scene = drawing.random_scene(rng, share_of_two=1.0)
        assert drawing.caption(scene).count(" and ") == 1
        marked = [drawing.signed_distance(item, drawing.SIDE_PIXELS) < 0.5 for item in scene.shapes]
        assert not (marked[0] & marked[1]).any()
