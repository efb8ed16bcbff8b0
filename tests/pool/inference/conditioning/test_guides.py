"""Where images and frames that guide a video are: in its latent, and in time."""

from __future__ import annotations

from typing import Any

import torch

from modelpool.pool.families.parts.video_calls import at_all_places, guide_bounds, read_tokens
from modelpool.pool.inference.conditioning.guides import (
    GUIDE,
    GUIDE_CELLS,
    GUIDE_FRAMES,
    GUIDE_MASK,
    guide_shape,
    placed_guides,
)
from modelpool.pool.values.core.stage_params import GuideCondition

SHAPE = (2, 7, 4, 6)


def placed(*guides: GuideCondition) -> dict[str, Any]:
    """The inputs of a model: each guide has its number as latent."""
    images = [torch.full((1, *guide_shape(guide, SHAPE)), n + 1.0) for n, guide in enumerate(guides)]
    return placed_guides(guides, images, SHAPE)


def test_images_alone_have_the_inputs_that_they_had() -> None:
    found = placed(GuideCondition(0, 0.5), GuideCondition(9, 1.0))
    assert found.keys() == {GUIDE, GUIDE_MASK, GUIDE_FRAMES}
    assert found[GUIDE][0, 0, :, 0, 0].tolist() == [2, 1, 0, 0, 0, 0, 0]
    assert guide_bounds(found, 8, causal=True).tolist() == [[[9, 10]]]


def test_frames_lead_in_cells_of_their_own_with_their_times() -> None:
    guides = GuideCondition(0, 1.0), GuideCondition(0, 0.5, 3), GuideCondition(4, 1.0), GuideCondition(9, 1.0, 2)
    found = placed(*guides)
    assert found[GUIDE][0, 0, :, 1, 1].tolist() == [2, 2, 2, 3, 4, 4, 1]
    assert found[GUIDE_MASK][0, 0, :, 1, 1].tolist() == [0.5, 0.5, 0.5, 1, 1, 1, 1]
    assert found[GUIDE_CELLS][0, :, 0].tolist() == [0, 1, 2, -1, 0, 1]
    # as in a video from the start on: a first cell of one frame
    start, inside = [[0, 1], [1, 9], [9, 17]], [[4, 5], [9, 17], [17, 25]]
    assert guide_bounds(found, 8, causal=True)[0].tolist() == [*start, *inside]
    assert guide_bounds(found, 8, causal=False)[0].tolist() == [[0, 8], [8, 16], [16, 24], *inside]


def test_an_image_next_to_the_first_frame_is_one_frame() -> None:
    found = placed(GuideCondition(0, 1.0), GuideCondition(0, 0.5, 1))
    assert found[GUIDE][0, 0, :3, 0, 0].tolist() == [2, 1, 0]
    assert guide_bounds(found, 8, causal=True).tolist() == [[[0, 1]]]


def test_a_model_reads_nothing_between_the_places_of_smaller_frames() -> None:
    found = placed(GuideCondition(0, 0.5, 2, 2), GuideCondition(9, 1.0))
    assert found[GUIDE_MASK][0, 0, 1].tolist() == [[0.5, 0, 0.5, 0, 0.5, 0], [0] * 6] * 2
    tokens = torch.arange(7.0 * 4 * 6).reshape(1, -1, 1)
    read = read_tokens(tokens, found)
    cell = [0, 2, 4, 12, 14, 16]
    assert read[0, :12, 0].tolist() == [*cell, *(24 + place for place in cell)]
    assert read[0, 12:, 0].tolist() == list(range(48, 168))
    back = at_all_places(read + 1, tokens.shape[1], found)
    kept = back != 0
    assert torch.equal(back[kept], tokens[kept] + 1)
    assert int(kept.sum()) == read.shape[1]
    # the audio of a video is behind its frames in some latents
    assert read_tokens(torch.zeros(1, 9, 7 * 24), found, dim=2).shape == (1, 9, read.shape[1])
