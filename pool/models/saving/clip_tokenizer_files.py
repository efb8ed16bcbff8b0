"""Writes the files of CLIP's tokenizer as in diffusers folders, from the bundled vocabulary. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.models.text.clip_tokenizer import BEGIN_TOKEN, END_TOKEN, build_vocabulary, read_merges
from modelpool.pool.values.core.family_facts import CLIP_END_ID

#: maximum number of tokens that CLIP reads, including begin and end
MAX_TOKENS = 77


@dataclass(frozen=True, slots=True)
class VocabularyTexts:
    """The two large files of a tokenizer, and its tokens by id."""

    vocabulary: str
    merges: str
    tokens: tuple[str, ...]


def vocabulary_texts() -> VocabularyTexts:
    """Return the contents of `vocab.json` and `merges.txt`, which are equal for all CLIP text models."""
    merges = read_merges()
    vocabulary = build_vocabulary(merges)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    return VocabularyTexts(json.dumps(vocabulary), "\n".join(lines), tuple(vocabulary))


def write_clip_tokenizer(folder: Path, pad_id: int) -> None:
    """Write the tokenizer of a CLIP text model that pads texts with the token `pad_id` to a new `folder`.

    `transformers.CLIPTokenizer.from_pretrained` reads it.
    """
    folder.mkdir()
    texts = vocabulary_texts()
    pad = END_TOKEN if pad_id == CLIP_END_ID else texts.tokens[pad_id]
    special = {"bos_token": BEGIN_TOKEN, "eos_token": END_TOKEN, "pad_token": pad, "unk_token": END_TOKEN}
    settings = {
        **special,
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": MAX_TOKENS,
        "tokenizer_class": "CLIPTokenizer",
    }
    _write(folder / "vocab.json", texts.vocabulary)
    _write(folder / "merges.txt", texts.merges)
    _write(folder / "special_tokens_map.json", json.dumps(special, indent=2))
    _write(folder / "tokenizer_config.json", json.dumps(settings, indent=2))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
