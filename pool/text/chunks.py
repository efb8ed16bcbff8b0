"""Prompts of any length as chunks of 77 tokens, which is what CLIP reads at once. Torch-free.

A chunk is a begin token, up to 75 tokens of text, an end token, and end tokens to fill it up. A word is not cut by the
end of a chunk unless it is a long one, of `LONG_WORD_TOKENS` or more; ComfyUI cuts at the same places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pool.text.tokenizer import BEGIN_ID, END_ID, ClipTokenizer
from pool.text.weights import parse_weights

CHUNK_TOKENS = 77
CONTENT_TOKENS = CHUNK_TOKENS - 2
#: words of so many tokens are cut where the chunk ends, so that one of them cannot waste most of a chunk
LONG_WORD_TOKENS = 8

# ASCII white space only: all of it separates words for the tokenizer too, so cutting here changes no token
_SPACE = re.compile(r"[ \t\n\r\f\v]+")


@dataclass(frozen=True, slots=True)
class Chunk:
    """77 token ids and the weight of each; the tokens around the text weigh 1. `tokens` of them are the text with the
    token that begins it and the one that ends it, the others fill it up."""

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]
    tokens: int

    @property
    def is_weighted(self) -> bool:
        """Whether any token weighs other than 1."""
        return any(weight != 1.0 for weight in self.weights)


@dataclass(frozen=True, slots=True)
class _Token:
    id: int
    weight: float


def split_prompt(tokenizer: ClipTokenizer, text: str) -> tuple[Chunk, ...]:
    """The chunks of a prompt with weights in brackets; one empty chunk for an empty prompt.

    Raises UnusableField as `parse_weights` does.
    """
    chunks: list[list[_Token]] = [[]]
    for word in _words(tokenizer, text):
        room = CONTENT_TOKENS - len(chunks[-1])
        if room < len(word) < LONG_WORD_TOKENS:
            chunks.append([])
            room = CONTENT_TOKENS
        chunks[-1].extend(word[:room])
        chunks.extend(word[start : start + CONTENT_TOKENS] for start in range(room, len(word), CONTENT_TOKENS))
    return tuple(_filled(tokens) for tokens in chunks)


def empty_chunk() -> Chunk:
    """The chunk of an empty prompt."""
    return _filled([])


def _words(tokenizer: ClipTokenizer, text: str) -> Iterator[list[_Token]]:
    for part in parse_weights(text):
        for word in _SPACE.split(part.text):
            tokens = [_Token(token_id, part.weight) for token_id in tokenizer.encode(word)]
            if tokens:
                yield tokens


def _filled(tokens: list[_Token]) -> Chunk:
    rest = CHUNK_TOKENS - 1 - len(tokens)
    return Chunk(
        token_ids=(BEGIN_ID, *(t.id for t in tokens), *(END_ID,) * rest),
        weights=(1.0, *(t.weight for t in tokens), *(1.0,) * rest),
        tokens=len(tokens) + 2,
    )
