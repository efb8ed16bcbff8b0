"""A LLaVA as one text encoder's folder: its language part and the part that sees images, which are two components
here.

Names are those of published folders: "language_model.model.", "vision_tower.vision_model.", "multi_modal_projector.".
The class wants a head of words, which nothing reads and no file has: its configuration says that the table of words is
that too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

from modelpool.pool.formats.safetensors_writer import TensorToWrite
from modelpool.pool.mapping.tensor_bytes import made
from modelpool.pool.saving.component_weights import ComponentWeights

#: the tokens that stand for an image, and that fill a text up. Source: xtuner/llava-llama-3-8b-v1_1-transformers
_IMAGE_ID, _PAD_ID = 128257, 128258
_TOWER, _PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."
_OUR_TOWER = "tower."


def is_llava(module: nn.Module) -> bool:
    """Whether `module` is what `llava` makes."""
    return isinstance(module, LlavaForConditionalGeneration)


def llava(text: Any, sight: Any) -> nn.Module:
    """The class of both parts, without weights. Sizes are those of the parts."""
    vocabulary = text.config.vocab_size
    own = {**text.config.to_dict(), "tie_word_embeddings": True}
    config = LlavaConfig(
        text_config=own,
        vision_config={**sight.config.to_dict(), "model_type": "clip_vision_model"},
        image_token_index=min(_IMAGE_ID, vocabulary - 1),
        pad_token_id=min(_PAD_ID, vocabulary - 1),
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        module: nn.Module = LlavaForConditionalGeneration(config)
    return module


def llava_names(module: nn.Module) -> dict[str, str]:
    """What the parameters of the class are called in published folders; its head is not there."""
    levels = {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": _TOWER,
        "model.multi_modal_projector.": _PROJECTOR,
    }
    return {
        name: published + name.removeprefix(level)
        for name, _ in module.named_parameters()
        for level, published in levels.items()
        if name.startswith(level)
    }


def llava_tensors(
    text: ComponentWeights, sight: ComponentWeights, dtype: torch.dtype | None
) -> Iterator[TensorToWrite]:
    """Those of both parts under their published names, in `dtype` (their own where that is None)."""
    names = {name: f"language_model.model.{name}" for name in text.shapes}
    seen = {
        name: _TOWER + name.removeprefix(_OUR_TOWER) if name.startswith(_OUR_TOWER) else _PROJECTOR + name
        for name in sight.shapes
    }
    for weights, published in ((text, names), (sight, seen)):
        for name, shape in weights.shapes.items():
            own = dtype or weights.dtype(name)
            yield made(published[name], own, shape, partial(weights.parameter, name, own))
