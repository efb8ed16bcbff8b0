"""Tokenizers as the entries of GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def entries_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a GGUF file says of `tokenizer`."""
    said = json.loads(tokenizer.to_str())
    model, added = said["model"], {token["content"] for token in said["added_tokens"]}
    if model["type"] == "Unigram":
        tokens = [token for token, _ in model["vocab"]]
        kinds = [CONTROL if t in added - {"<unk>"} else UNKNOWN if t == "<unk>" else NORMAL for t in tokens]
        return {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [float(score) for _, score in model["vocab"]],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.add_space_prefix": True,
        }
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    tokens = [token for token, _ in ids]
    assert [number for _, number in ids] == list(range(len(tokens)))
    if model["byte_fallback"]:  # SentencePiece's pairs
        kinds = [CONTROL if token in added - {"<unk>"} else _kind(token) for token in tokens]
        return {
            "tokenizer.ggml.model": "llama",
            # what was added to SentencePiece's own has one score for all, and is written with spaces
            "tokenizer.ggml.tokens": [t.replace("\u2581", " ") if _are_spaces(t) else t for t in tokens],
            "tokenizer.ggml.scores": [-1000.0 if _are_spaces(t) else -float(i) for i, t in enumerate(tokens)],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.add_space_prefix": False,
        }
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if t in added else NORMAL for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    }


def _kind(token: str) -> int:
    if token == "<unk>":
        return UNKNOWN
    if token.startswith("<0x") and token.endswith(">"):
        return BYTE
    return USER_DEFINED if _are_spaces(token) else NORMAL


def _are_spaces(token: str) -> bool:
    return len(token) > 1 and not token.strip("\u2581")
