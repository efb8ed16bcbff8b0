"""Prompts of any length as chunks of 77 tokens, which is what CLIP reads at once. Torch-free.

A chunk is a begin token, up to 75 tokens of text, an end token, and end tokens to fill it up. A word is not cut by the
end of a chunk unless it is a long one, of `LONG_WORD_TOKENS` or more; ComfyUI cuts at the same places. The word BREAK
ends a chunk that holds anything; `embedding:NAME` stands for tokens that a file of textual inversion was trained to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from modelpool.pool.core.errors import unknown_name
from modelpool.pool.text.clip_tokenizer import BEGIN_ID, END_ID, ClipTokenizer
from modelpool.pool.text.prompt_weights import parse_weights

CHUNK_TOKENS = 77
CONTENT_TOKENS = CHUNK_TOKENS - 2
#: words of so many tokens are cut where the chunk ends, so that one of them cannot waste most of a chunk
LONG_WORD_TOKENS = 8
#: what stands in the place of a learned token, until its vector does
LEARNED_ID = 0
#: of a text encoder that knows no learned tokens
NO_EMBEDDINGS: Mapping[str, int] = MappingProxyType({})

# ASCII white space only: all of it separates words for the tokenizer too, so cutting here changes no token
_SPACE = re.compile(r"[ \t\n\r\f\v]+")
_BREAK = re.compile(r"\bBREAK\b")
#: the name ends where a word or a part of a sentence does
_EMBEDDING = re.compile(r"embedding:([^\s,()]+)")


@dataclass(frozen=True, slots=True)
class Learned:
    """A token whose vector is row `row` of the embedding `name`."""

    name: str
    row: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Token ids that an encoder reads at once, 77 for CLIP, and the weight of each; the tokens around the text weigh 1.
    `tokens` of them, from `first` on, are the text with the tokens that begin and end it, the others fill it up.

    learned  the tokens that are learned ones, by their places
    cut      tokens of the text that there was no room for
    images  where the tokens of each image begin that it is shown
    """

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]
    tokens: int
    first: int = 0
    learned: tuple[tuple[int, Learned], ...] = ()
    cut: int = 0
    images: tuple[int, ...] = ()

    @property
    def is_weighted(self) -> bool:
        """Whether any token weighs other than 1."""
        return any(weight != 1.0 for weight in self.weights)

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which tokens are the text's."""
        return tuple(self.first <= i < self.first + self.tokens for i in range(len(self.token_ids)))


@dataclass(frozen=True, slots=True)
class _Token:
    id: int
    weight: float
    learned: Learned | None = None


def split_prompt(
    tokenizer: ClipTokenizer,
    text: str,
    embeddings: Mapping[str, int] = NO_EMBEDDINGS,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Chunk, ...]:
    """The chunks of a prompt with weights in brackets; one empty chunk for an empty prompt.

    `embeddings` are the learned tokens that there are: how many rows each name has. Raises UnusableField as
    `parse_weights` does, UnknownName for an embedding that is none of them.
    """
    content = chunk_tokens - 2
    chunks: list[list[_Token]] = [[]]
    for word in _words(tokenizer, text, embeddings):
        room = content - len(chunks[-1])
        if not word:
            chunks.extend([[]] if chunks[-1] else [])
            continue
        if room < len(word) < LONG_WORD_TOKENS:
            chunks.append([])
            room = content
        chunks[-1].extend(word[:room])
        chunks.extend(word[start : start + content] for start in range(room, len(word), content))
    if not chunks[-1] and len(chunks) > 1:  # BREAK was the last word
        chunks.pop()
    return tuple(_filled(tokens, chunk_tokens) for tokens in chunks)


def empty_chunk(chunk_tokens: int = CHUNK_TOKENS) -> Chunk:
    """The chunk of an empty prompt."""
    return _filled([], chunk_tokens)


def embeddings_in(text: str) -> tuple[str, ...]:
    """The names of the embeddings that a prompt asks for, each once, in order. Raises UnusableField as `parse_weights`
    does."""
    if "embedding:" not in text:
        return ()
    return tuple(dict.fromkeys(name for part in parse_weights(text) for name in _EMBEDDING.findall(part.text)))


def spelled_out(text: str, rows: Mapping[str, int]) -> str:
    """A prompt with as many plain words for each embedding as that takes tokens, for planning."""
    for name in sorted(rows, key=len, reverse=True):
        text = text.replace(f"embedding:{name}", "a " * rows[name])
    return text


def plain_words(text: str) -> str:
    """A prompt without what only CLIP understands: BREAK becomes a space, names of embeddings are left out."""
    if not (_BREAK.search(text) or _EMBEDDING.search(text)):
        return text
    return _SPACE.sub(" ", _EMBEDDING.sub("", _BREAK.sub(" ", text))).strip()


def _words(tokenizer: ClipTokenizer, text: str, embeddings: Mapping[str, int]) -> Iterator[list[_Token]]:
    """The tokens of each word; nothing at all for a BREAK."""
    for part in parse_weights(text):
        for i, section in enumerate(_BREAK.split(part.text)):
            if i:
                yield []
            for word in _SPACE.split(section):
                pieces = _EMBEDDING.split(word)  # text, name, text, name, ..., text
                for place, piece in enumerate(pieces):
                    tokens = (
                        _learned(piece, embeddings, part.weight)
                        if place % 2
                        else [_Token(token_id, part.weight) for token_id in tokenizer.encode(piece)]
                    )
                    if tokens:
                        yield tokens


def _learned(name: str, embeddings: Mapping[str, int], weight: float) -> list[_Token]:
    if name not in embeddings:
        raise unknown_name("embedding", name, embeddings)
    return [_Token(LEARNED_ID, weight, Learned(name, row)) for row in range(embeddings[name])]


def _filled(tokens: list[_Token], chunk_tokens: int) -> Chunk:
    rest = chunk_tokens - 1 - len(tokens)
    return Chunk(
        token_ids=(BEGIN_ID, *(t.id for t in tokens), *(END_ID,) * rest),
        weights=(1.0, *(t.weight for t in tokens), *(1.0,) * rest),
        tokens=len(tokens) + 2,
        learned=tuple((place, t.learned) for place, t in enumerate(tokens, start=1) if t.learned),
    )
