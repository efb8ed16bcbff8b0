"""Images that the ControlNets of a run are given."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from modelpool.pool.inference.controlnets.controlnet_kinds import KINDS
from modelpool.pool.inference.controlnets.controlnet_run import _images_of
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import (
    ControlRef,
    GuidanceParams,
    ImagePixels,
    ModelRef,
    OutputShape,
    SampleParams,
    SamplingSchedule,
)
from modelpool.pool.values.core.task_inputs import TaskInputs

WORK = SampleParams(
    ModelRef("m", "m", "aa"),
    (),
    OutputShape(64, 48),
    SamplingSchedule(4, "euler", "normal"),
    GuidanceParams(3.0),
    1,
    (ControlRef("c", "c", "bb", 1.0, 0.0, 1.0),),
)
#: a kind that reads the pixels of its image, at the size of the output
OF_PIXELS: Any = [(next(kind for kind in KINDS if not kind.cell_side), None)]
ANY_LATENT: Any = None


@pytest.mark.parametrize("size", [(48, 64), (96, 128)], ids=["of its size", "scaled"])
def test_a_image_that_may_not_be_written_is_read_without_a_warning(size: tuple[int, int]) -> None:
    """As those that other processes hand over are; what is done with what is read changes nothing there."""
    pixels_HWC = np.full((*size, 3), 255, np.uint8)
    pixels_HWC.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (read_CHW,) = _images_of(TaskInputs({"control.0": ImagePixels(pixels_HWC)}), WORK, OF_PIXELS, ANY_LATENT)
    assert read_CHW.shape == (3, 48, 64)
    assert (read_CHW == 1).all()
    read_CHW.zero_()
    assert (pixels_HWC == 255).all()


def test_what_is_turned_is_read_as_it_is() -> None:
    """Rows from the bottom up are no array that torch takes."""
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    (read_CHW,) = _images_of(TaskInputs({"control.0": ImagePixels(pixels_HWC[::-1])}), WORK, OF_PIXELS, ANY_LATENT)
    np.testing.assert_allclose(read_CHW.permute(1, 2, 0) * 255, pixels_HWC[::-1], atol=1e-4)


def test_an_alpha_channel_that_a_controlnet_does_not_read_is_refused() -> None:
    pixels_HWC = np.full((48, 64, 4), 255, np.uint8)
    with pytest.raises(UnusableField, match=r"controls\.image: found an alpha channel; ControlNet 'c' reads colours"):
        tuple(_images_of(TaskInputs({"control.0": ImagePixels(pixels_HWC)}), WORK, OF_PIXELS, ANY_LATENT))
