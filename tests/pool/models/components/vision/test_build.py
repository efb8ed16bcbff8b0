"""Vision encoders out of every published spelling: built, equal to the model that was saved, and saved as they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from modelpool.pool.models.components.vision.build_vision_encoder import plan_vision
from modelpool.pool.values.core.errors import UnknownArchitecture
from tests.pool.families.tiny_transformers import seeded
from tests.pool.families.tiny_videos import SIDE, clip_vision, open_clip_vision

File = dict[str, Tensor]


def transformers_file(state: Mapping[str, Tensor]) -> File:
    """As a file of its own, with the table of positions that older ones carry."""
    return {**state, "vision_model.embeddings.position_ids": torch.arange(5)[None]}


def whole_clip(state: Mapping[str, Tensor]) -> File:
    """With a text model beside it."""
    return {**state, "text_model.final_layer_norm.weight": torch.ones(4), "logit_scale": torch.ones(())}


def without_projection(state: Mapping[str, Tensor]) -> File:
    """As transformers saves the model that has none."""
    bare = {key.removeprefix("vision_model."): tensor for key, tensor in state.items()}
    return {key: tensor for key, tensor in bare.items() if key != "visual_projection.weight"}


SPELLINGS: Mapping[str, Callable[[Mapping[str, Tensor]], File]] = {
    "open_clip": open_clip_vision,
    "transformers": transformers_file,
    "whole clip": whole_clip,
    "without projection": without_projection,
}


def _built(file: File, prefix: str = "") -> tuple[Any, Any]:
    named = {prefix + key: tensor for key, tensor in file.items()}
    plan = plan_vision({key: tuple(tensor.shape) for key, tensor in named.items()}, prefix)
    module = plan.empty()
    module.load_state_dict(plan.key_map.load(named), assign=True)
    return plan, module


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_the_same_encoder(name: str) -> None:
    """And what was read of the file is there again after saving."""
    encoder = seeded(clip_vision, 3)
    file = SPELLINGS[name](encoder.state_dict())
    plan, module = _built(file, "visual.")
    pixels = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    found, expected = (each(pixels, output_hidden_states=True) for each in (module, encoder))
    torch.testing.assert_close(found.hidden_states[-2], expected.hidden_states[-2])
    if name == "without projection":
        assert isinstance(module, transformers.CLIPVisionModel)
    else:
        torch.testing.assert_close(found.image_embeds, expected.image_embeds)
    saved = plan.key_map.save(module.state_dict())
    unused = {key.removeprefix("visual.") for key in plan.key_map.unused}
    assert unused <= {"vision_model.embeddings.position_ids", "text_model.final_layer_norm.weight", "logit_scale"}
    assert {key.removeprefix("visual.") for key in saved} == file.keys() - unused
    assert all(torch.equal(saved[key], file[key.removeprefix("visual.")]) for key in saved)


def test_the_published_sizes_are_those_of_clip_h() -> None:
    """Of the shapes alone: heads, activation and pixels as laion/CLIP-ViT-H-14-laion2B-s32B-b79K has them."""
    with torch.device("meta"):
        published = transformers.CLIPVisionModelWithProjection(
            transformers.CLIPVisionConfig(
                hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16, image_size=224,
                patch_size=14, projection_dim=1024, hidden_act="gelu",
            )
        )  # fmt: skip
    shapes = {key: tuple(value.shape) for key, value in published.state_dict().items()}
    config = plan_vision(shapes).config
    assert config == {key: getattr(published.config, key) for key in config}
    assert len(plan_vision(shapes).empty().state_dict()) == len(shapes)


@pytest.mark.parametrize("missing", ["class_embedding", "conv1.weight", "transformer.resblocks.1.ln_1.bias"])
def test_a_file_that_is_not_whole_is_refused(missing: str) -> None:
    file = open_clip_vision(seeded(clip_vision, 3).state_dict())
    del file[missing]
    with pytest.raises(UnknownArchitecture):
        plan_vision({key: tuple(tensor.shape) for key, tensor in file.items()}).empty()
