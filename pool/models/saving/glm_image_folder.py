"""Saves the language model of GLM-Image as one folder: its language part and its vision part, which are two components
here; and its processor, which has the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GlmImageConfig, GlmImageForConditionalGeneration

from modelpool.pool.families.parts.written_image import (
    IMAGE_END,
    IMAGE_START,
    LEAST_SIDE,
    MOST_SIDE,
    REFERENCE_TOKEN,
)
from modelpool.pool.models.components.common.library_names import image_processor
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.models.text.token_writer import TEMPERATURE, TOP_P

#: the class of the processor
PROCESSOR_CLASS = "GlmImageProcessor"
#: settings of its image processor. Source: processor/preprocessor_config.json of zai-org/GLM-Image
_IMAGES = {
    "size": {"shortest_edge": LEAST_SIDE**2, "longest_edge": MOST_SIDE**2}, "patch_size": 16, "temporal_patch_size": 1,
    "merge_size": 1, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
#: the images of a message, then its text
_CHAT = (
    "{%- for message in messages -%}{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}"
    f"{{{{- {json.dumps(IMAGE_START + REFERENCE_TOKEN + IMAGE_END)} -}}}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endfor -%}"
)
#: token ids of the published vocabulary
_START_ID, _REFERENCE_ID = 16384, 167855


def is_glm_image(module: nn.Module) -> bool:
    """Whether `module` is a result of `glm_image`."""
    return isinstance(module, GlmImageForConditionalGeneration)


def glm_image(text: Any, vision: Any, tokenizer: TextTokenizer | None = None) -> nn.Module:
    """Return the class of both parts, without weights. Sizes are the parts', token ids the `tokenizer`'s, else the
    published one's."""
    named = {"image_start_token_id": IMAGE_START, "image_end_token_id": IMAGE_END, "image_token_id": REFERENCE_TOKEN}
    published = {
        "image_start_token_id": _START_ID, "image_end_token_id": _START_ID + 1, "image_token_id": _REFERENCE_ID,
    }  # fmt: skip
    ids = published if tokenizer is None else {key: tokenizer.id_of(token) for key, token in named.items()}
    parts = {"vision_config": vision.visual.config, "vq_config": vision.vqmodel.config}
    text_config = {**text.config.to_dict(), "eos_token_id": ids["image_end_token_id"]}
    with torch.device("meta"):
        config = GlmImageConfig(
            text_config=text_config, **{name: each.to_dict() for name, each in parts.items()}, **ids
        )
        module: Any = GlmImageForConditionalGeneration(config)
    module.generation_config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_p=TOP_P, top_k=text.config.vision_vocab_size,
        eos_token_id=ids["image_end_token_id"], pad_token_id=ids["image_token_id"],
    )  # fmt: skip
    found: nn.Module = module
    return found


def write_writer_processor(folder: Path, tokenizer: TextTokenizer) -> None:
    """Write the processor with this `tokenizer` to a new `folder`."""
    image_processor("GlmImageImageProcessor")(**_IMAGES).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.as_json(), encoding="utf-8", newline="\n")
    (folder / "chat_template.jinja").write_text(_CHAT, encoding="utf-8", newline="\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": PROCESSOR_CLASS,
        "padding_side": "left",
        "bos_token": IMAGE_START,
        "eos_token": IMAGE_END,
        "pad_token": tokenizer.pad,
        "image_token": REFERENCE_TOKEN,
        "grid_bos_token": "<sop>",
        "grid_eos_token": "<eop>",
    }
    for name, values in (
        ("tokenizer_config.json", settings),
        ("processor_config.json", {"processor_class": PROCESSOR_CLASS}),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8", newline="\n")
