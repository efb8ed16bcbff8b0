"""Images that vision encoders are shown equal diffusers' and transformers'."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from diffusers.pipelines.stable_video_diffusion.pipeline_stable_video_diffusion import _resize_with_antialiasing
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.models.components.vision.preprocess import DEVIATIONS, MEANS, preprocess_image
from modelpool.pool.values.core.sampling_facts import VisionEncoderUse

#: smaller than the shown size, larger, and much larger along one side
SIZES = [(8, 8), (28, 28), (64, 96), (97, 61), (30, 400), (1000, 40)]
SIDE = 28


def image(height: int, width: int) -> Any:
    return np.random.default_rng(height + width).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_a_whole_image_is_squeezed_as_diffusers_does(size: tuple[int, int]) -> None:
    pixels = torch.from_numpy(image(*size)).permute(2, 0, 1)[None].float() / 255
    small = (_resize_with_antialiasing(pixels * 2 - 1, (SIDE, SIDE)) + 1) / 2
    means, deviations = (torch.tensor(values)[:, None, None] for values in (MEANS, DEVIATIONS))
    np.testing.assert_allclose(
        preprocess_image(image(*size), SIDE, VisionEncoderUse.PROJECTED), (small - means) / deviations, atol=2e-5
    )


@pytest.mark.parametrize("size", SIZES)
def test_the_middle_of_a_image_is_that_of_transformers(size: tuple[int, int]) -> None:
    sides = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    processor = transformers.CLIPImageProcessorPil(**sides)
    expected = processor(images=image(*size), return_tensors="pt").pixel_values
    np.testing.assert_allclose(preprocess_image(image(*size), SIDE, VisionEncoderUse.PENULTIMATE), expected, atol=1e-5)


@given(height=st.integers(1, 70), width=st.integers(1, 70), vision_use=st.sampled_from(VisionEncoderUse))
@settings(max_examples=60, deadline=None)
def test_every_image_can_be_shown(height: int, width: int, vision_use: VisionEncoderUse) -> None:
    """However small: found that a mirror of one row has no row to show."""
    found = preprocess_image(np.full((height, width, 3), 128, np.uint8), SIDE, vision_use)
    assert found.shape == (1, 3, SIDE, SIDE)
    grey = (128 / 255 - torch.tensor(MEANS)) / torch.tensor(DEVIATIONS)
    if vision_use in (VisionEncoderUse.LAST, VisionEncoderUse.POOLED):  # SigLIP's values are from -1 to 1
        grey = torch.full((3,), 128 / 255 * 2 - 1)
    np.testing.assert_allclose(found, grey[None, :, None, None].expand_as(found), atol=1e-3)


def test_a_thread_of_a_image_costs_no_more_than_a_square_of_it() -> None:
    """Found: one of 1 x 16384 was scaled whole, to eight gigabytes."""
    tracemalloc.start()
    found = preprocess_image(np.full((1, 16_384, 3), 128, np.uint8), SIDE, VisionEncoderUse.PENULTIMATE)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.shape == (1, 3, SIDE, SIDE)
    assert peak_bytes < 64 << 20
