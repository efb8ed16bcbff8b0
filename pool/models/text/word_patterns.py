"""Regular expressions that split a text into words before byte-level BPE. Pure.

Source: tokenization_qwen2.py of transformers, the tokenizer.json of meta-llama/Llama-3.1-8B-Instruct, and the
tekken.json of mistralai/Mistral-Small-3.2-24B-Instruct-2506.
"""

from __future__ import annotations

from typing import Final

_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
#: each digit is a word
QWEN_WORDS: Final = rf"{_LETTERS}|\p{{N}}|{_SIGNS_AND_SPACES}"
#: up to three digits are a word
LLAMA_WORDS: Final = rf"{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}"
#: a capital letter starts a word
MISTRAL_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
