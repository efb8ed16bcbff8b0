"""Writes the files of tokenizers other than CLIP's as in diffusers folders, from the tokenizer of the checkpoint's text
encoder, in its file or next to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelpool.pool.families.parts.text_reading import Reading
from modelpool.pool.models.text.text_tokenizer import TextTokenizer

#: the transformers class that reads any tokenizer.json, and the one of byte tokens, which needs no file
CLASS, BYTES_CLASS = "PreTrainedTokenizerFast", "ByT5Tokenizer"


def tokenizer_class(tokenizer: TextTokenizer) -> str:
    """Return the transformers class that reads the output of `write_text_tokenizer`."""
    return BYTES_CLASS if tokenizer.is_of_bytes else CLASS


def write_text_tokenizer(folder: Path, tokenizer: TextTokenizer, reading: Reading) -> None:
    """Write `tokenizer`, which reads texts according to `reading`, to a new `folder`.

    `from_pretrained` of `tokenizer_class` reads it, and a pipeline that formats prompts as a chat gets the template of
    `reading`, or the part of it that the pipeline does not add itself.
    """
    folder.mkdir()
    settings: dict[str, Any] = {
        "tokenizer_class": tokenizer_class(tokenizer),
        "model_max_length": reading.most_tokens,
        "padding_side": "left" if reading.pads_left else "right",
        "pad_token": reading.pad or tokenizer.pad,
    }
    facts, end = tokenizer.facts, tokenizer.facts.end or reading.pad
    settings |= {"bos_token": facts.begin} if len(facts.begin.split()) == 1 else {}
    settings |= {"eos_token": end} if end else {}
    chat = replace(reading, template=reading.chat_template or reading.template)
    before, after = chat.around()
    if before or after:
        settings["chat_template"] = _template("".join(facts.begin.split()) + before, after)
    if not tokenizer.is_of_bytes:
        (folder / "tokenizer.json").write_text(tokenizer.as_json(), encoding="utf-8", newline="\n")
    _write(folder / "tokenizer_config.json", settings)


def _template(before: str, after: str) -> str:
    """Return a Jinja chat template that contains only the last message, between these."""
    last = "{%- set said = messages[-1]['content'] -%}"
    word = "{{- said if said is string else said[0]['text'] -}}"
    return f"{last}{{{{- {json.dumps(before)} -}}}}{word}{{{{- {json.dumps(after)} -}}}}"


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8", newline="\n")
