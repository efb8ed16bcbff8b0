"""Saves a LLaVA as the folder of one text encoder: its language part and its vision part, which are two components
here.

Names are as in published folders: "language_model.model.", "vision_tower.vision_model.", "multi_modal_projector.".
The class requires a language-model head, which nothing reads and no file has: its configuration ties it to the token
embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

from modelpool.pool.files.formats.safetensors_writer import TensorToWrite
from modelpool.pool.models.saving.component_weights import ComponentWeights
from modelpool.pool.weights.quant.tensor_bytes import computed_tensor

#: the image token and the padding token. Source: xtuner/llava-llama-3-8b-v1_1-transformers
_IMAGE_ID, _PAD_ID = 128257, 128258
_TOWER, _PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."
_OUR_TOWER = "tower."


def is_llava(module: nn.Module) -> bool:
    """Whether `module` is a result of `llava`."""
    return isinstance(module, LlavaForConditionalGeneration)


def llava(text: Any, vision: Any) -> nn.Module:
    """Return the class of both parts, without weights. Sizes are the parts'."""
    vocabulary = text.config.vocab_size
    text_config = {**text.config.to_dict(), "tie_word_embeddings": True}
    config = LlavaConfig(
        text_config=text_config,
        vision_config={**vision.config.to_dict(), "model_type": "clip_vision_model"},
        image_token_index=min(_IMAGE_ID, vocabulary - 1),
        pad_token_id=min(_PAD_ID, vocabulary - 1),
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        module: nn.Module = LlavaForConditionalGeneration(config)
    return module


def llava_names(module: nn.Module) -> dict[str, str]:
    """Return the names of the class's parameters in published folders; its head is left out."""
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
    text: ComponentWeights, vision: ComponentWeights, dtype: torch.dtype | None
) -> Iterator[TensorToWrite]:
    """Yield the tensors of both parts under their published names, in `dtype` (None: their dtypes)."""
    names = {name: f"language_model.model.{name}" for name in text.shapes}
    vision_names = {
        name: _TOWER + name.removeprefix(_OUR_TOWER) if name.startswith(_OUR_TOWER) else _PROJECTOR + name
        for name in vision.shapes
    }
    for weights, published in ((text, names), (vision, vision_names)):
        for name, shape in weights.shapes.items():
            target = dtype or weights.dtype(name)
            yield computed_tensor(published[name], target, shape, partial(weights.parameter, name, target))
