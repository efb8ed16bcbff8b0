"""Inputs are read by name: another name, or another kind of result, is an error and never another image."""

from __future__ import annotations

import numpy as np
import pytest

from modelpool.pool.values.core.results import ImagePixels, VideoFrames
from modelpool.pool.values.core.stage_params import Encoded, Latent, Mask
from modelpool.pool.values.core.task_inputs import TaskInputs, WrongInputs

PROMPT, NEGATIVE = (Encoded(np.full((2, 3), value, np.float32)) for value in (1.0, 2.0))
START, MASK = Latent(np.zeros((4, 2, 2), np.float32)), Mask(np.zeros((16, 16), np.uint8))


def test_inputs_are_found_by_name_in_any_order() -> None:
    for names, results in (
        (("positive", "negative", "start"), (PROMPT, NEGATIVE, START)),
        (("start", "negative", "positive"), (START, NEGATIVE, PROMPT)),
    ):
        inputs = TaskInputs.named(names, results)
        assert inputs.read("positive", Encoded) is PROMPT
        assert inputs.read("negative", Encoded) is NEGATIVE
        assert inputs.read("start", Latent) is START
        assert set(inputs) == set(names)


def test_inputs_that_changed_places_are_an_error_that_names_both() -> None:
    swapped = TaskInputs.named(("start", "mask"), (MASK, START))
    with pytest.raises(WrongInputs, match=r"'start': found TaskInputs\(start: Mask, mask: Latent\), expected Latent"):
        swapped.read("start", Latent)


def test_a_missing_or_repeated_name_is_an_error() -> None:
    with pytest.raises(WrongInputs, match="'negative'"):
        TaskInputs({"positive": PROMPT}).read("negative", Encoded)
    for names in (("positive",), ("positive", "positive"), ("positive", "negative", "start")):
        with pytest.raises(WrongInputs, match="expected positive"):
            TaskInputs.named(names, (PROMPT, NEGATIVE))


def test_numbered_inputs_come_in_their_order() -> None:
    latents = [Latent(np.full((1, 1, 1), number, np.float32)) for number in range(12)]
    inputs = TaskInputs({f"reference.{number}": latent for number, latent in reversed(list(enumerate(latents)))})
    assert inputs.read_all("reference", Latent) == tuple(latents)
    assert inputs.read_all("control", Latent) == ()


def test_models_read_images_without_alpha_channels_and_controlnets_with_them() -> None:
    """Before: an image with an alpha channel failed inside a convolution, on one GPU after the other."""
    whole_HWC = np.random.default_rng(0).integers(0, 256, (6, 5, 4), np.uint8)
    results = {
        "image": ImagePixels(whole_HWC),
        "reference.0": ImagePixels(whole_HWC),
        "opaque": ImagePixels(whole_HWC[..., :3]),
        "video": VideoFrames(whole_HWC[None], 8.0),
        "control.0": ImagePixels(whole_HWC),
        "mask": MASK,
    }
    read = TaskInputs.of_model(results)
    for name in ("image", "reference.0", "opaque"):
        assert np.array_equal(read.read(name, ImagePixels).pixels_HWC, whole_HWC[..., :3]), name
    assert np.array_equal(read.read("video", VideoFrames).frames_THWC, whole_HWC[None, ..., :3])
    assert read.read("video", VideoFrames).frame_rate == 8.0
    assert read["control.0"] is results["control.0"]
    assert read["mask"] is MASK
