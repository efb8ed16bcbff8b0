"""A tiny Qwen-Image whose text encoder's file has the part that sees images too, as the published one has; and the
processor of its pipelines, for images and texts alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import BatchFeature, Qwen2VLImageProcessorPil
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from modelpool.pool.families.parts.text_reading import IMAGE_TOKEN
from tests.pool.families.tiny_transformers import FAMILIES, WIDTH, words
from tests.pool.models.components.text import cases as texts
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny
from tests.pool.zoo.case import quiet_libraries

#: in the last of so many blocks all of an image is looked at at once
BLOCKS = 8
VISION = {
    "depth": BLOCKS, "hidden_size": 64, "intermediate_size": 40, "num_heads": 16, "out_hidden_size": WIDTH,
    "fullatt_block_indexes": [BLOCKS - 1], "window_size": 112,
}  # fmt: skip


def seeing_encoder() -> Any:
    """A Qwen 2.5 VL as its own class has it: with the weights of the tiny text encoder in its language part."""
    text = texts.qwen2(words=words("qwen"))
    own: Any = text.config
    with quiet_libraries():
        config = transformers.Qwen2_5_VLConfig(
            text_config=own.to_dict(), vision_config=VISION, image_token_id=tiny("qwen").token_to_id(IMAGE_TOKEN)
        )
        whole = _Placed(config)
    texts.seeded(whole)
    whole.model.language_model.load_state_dict(text.state_dict())
    return whole.eval().requires_grad_(False)


class _Placed(Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc] # transformers is not typed
    """Its own class, told which tokens stand for an image: newer versions want to be told, and give an image the
    places of a text where they are not, as the pipelines of diffusers 0.42 leave them; the model was trained with rows
    and columns."""

    def forward(self, input_ids: Tensor, **given: Any) -> Any:
        """As its own."""
        kinds = (input_ids == self.config.image_token_id).int()
        return super().forward(input_ids=input_ids, mm_token_type_ids=kinds, **given)


def published(whole: nn.Module) -> dict[str, Tensor]:
    """Its state as files have it: the language part under "model.", the other beside it."""
    state = {key: value for key, value in whole.state_dict().items() if key != "lm_head.weight"}
    return {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for key, value in state.items()
    }


SEEING = replace(FAMILIES["qwen_image"], encoders={"qwen25_7b": (seeing_encoder, published)})


class Processor:
    """What brings images and texts into the form of the text encoder, without the videos, which want torchvision."""

    def __init__(self) -> None:
        self.tokenizer = for_transformers("qwen")
        self._images = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=12845056)

    def __call__(self, text: list[str], images: Any, **_: Any) -> BatchFeature:
        """A token for each state of each image, and its patches."""
        shown = self._images(images=images, return_tensors="pt")
        counts = iter((shown["image_grid_thw"].prod(-1) // 4).tolist())
        (one,) = text
        before, *parts = one.split(IMAGE_TOKEN)
        filled = before + "".join(IMAGE_TOKEN * next(counts) + part for part in parts)
        tokens = self.tokenizer([filled], return_tensors="pt")
        return BatchFeature(
            {"input_ids": tokens["input_ids"], "attention_mask": torch.ones_like(tokens["input_ids"]), **shown}
        )
