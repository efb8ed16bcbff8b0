"""The part of Qwen 2.5 VL that sees images: planned from shapes, shown images as transformers shows them, read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from modelpool.pool.models.components.text.vision_prompt import MOST_PROPORTION
from modelpool.pool.models.components.vision.qwen import (
    LEAST_PIXELS,
    MOST_PIXELS,
    PATCH_NUMBERS,
    STEP,
    empty_patches,
    grid_of,
    patches_of,
    plan_qwen_vision,
    read_patches,
)
from modelpool.pool.values.core.errors import UnknownArchitecture
from tests.pool.families.tiny_qwen_edit import VISION
from tests.pool.models.components.text.cases import seeded

#: of Qwen/Qwen2.5-VL-7B-Instruct
PUBLISHED = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip


def module(config: dict[str, Any]) -> Any:
    return Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**config))


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {f"visual.{key}": tuple(value.shape) for key, value in module(config).state_dict().items()}


def test_the_published_one_is_planned_from_its_shapes() -> None:
    """With the facts that no shape tells."""
    plan = plan_qwen_vision(shapes(PUBLISHED), "visual.")
    assert plan.config == PUBLISHED
    assert not plan.key_map.unused
    assert {f"visual.{name}" for name, _ in plan.empty().named_parameters()} == set(shapes(PUBLISHED))


@example(19, 19)
@given(st.integers(8, 4096), st.integers(8, 4096))
def test_the_grid_of_a_image_is_that_of_transformers(width: int, height: int) -> None:
    if max(width, height) > MOST_PROPORTION * min(width, height):
        with pytest.raises(ValueError, match="aspect ratio"):  # no such image is asked for
            smart_resize(height, width, STEP, LEAST_PIXELS, MOST_PIXELS)
        return
    expected = smart_resize(height, width, STEP, LEAST_PIXELS, MOST_PIXELS)
    rows, columns = grid_of((width, height))
    assert (rows * STEP, columns * STEP) == expected
    assert empty_patches((width, height)).shape == (rows * columns * 4, PATCH_NUMBERS)


@pytest.mark.parametrize("size", [(230, 150), (64, 64), (28, 300)])
def test_it_reads_a_image_as_its_class_does(size: tuple[int, int]) -> None:
    """What it has to know of windows and places beforehand changes nothing."""
    own = seeded(module(VISION))
    patches = patches_of(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8))
    grid = grid_of(size)
    with torch.no_grad():
        found = read_patches(own, patches, grid)
        expected = own(patches, grid_thw=torch.tensor([[1, 2 * grid[0], 2 * grid[1]]])).pooler_output  # type: ignore[operator]
    assert found.shape == (grid[0] * grid[1], VISION["out_hidden_size"])
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


DAMAGED = {
    "a block left out": ("visual.blocks.3.", None, "found no blocks.3.attn.proj.bias, expected one of shape"),
    "no merger": ("visual.merger.", None, "found no merger.mlp.2.bias, which every Qwen 2.5 VL has"),
    "a narrow width": ("", {**VISION, "hidden_size": 32, "num_heads": 4}, "expected a multiple of 64 states"),
    "other patches": ("", {**VISION, "patch_size": 16}, "2, 16, 16.*, expected .* 2 frames and 14x14 pixels"),
    "an unknown weight": (
        "",
        {**VISION, "more": True},
        "found blocks.0.gate, expected no such weight in one",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_none_is_refused(case: str) -> None:
    without, config, message = DAMAGED[case]
    config = dict(config or VISION)
    extra = {"visual.blocks.0.gate": (3,)} if config.pop("more", False) else {}
    own = {key: shape for key, shape in shapes(config).items() if not without or not key.startswith(without)}
    with pytest.raises(UnknownArchitecture, match=f"it is not a Qwen 2.5 VL vision encoder: .*{message}") as refused:
        plan_qwen_vision({**own, **extra}, "visual.")
    assert "Error(" not in str(refused.value)
