"""Splits prompts of any length into chunks of 77 tokens, the input length of CLIP. Torch-free.

A chunk is a begin token, up to 75 text tokens, an end token, and end tokens as padding. A word is not split at the end
of a chunk unless it has `LONG_WORD_TOKENS` or more; ComfyUI splits at the same places. The word BREAK ends a chunk that
is not empty; `embedding:NAME` stands for the tokens of a textual inversion file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from modelpool.pool.models.text.clip_tokenizer import BEGIN_ID, END_ID, ClipTokenizer
from modelpool.pool.models.text.prompt_weights import parse_weights
from modelpool.pool.values.core.errors import unknown_name
from modelpool.pool.values.core.prompt_tokens import ClipTokens

CHUNK_TOKENS = 77
CONTENT_TOKENS = CHUNK_TOKENS - 2
#: words of this many tokens are split at the end of a chunk, so that they do not waste most of a chunk
LONG_WORD_TOKENS = 8
#: placeholder id of a learned token; its vector is inserted later
LEARNED_ID = 0
#: for text encoders without learned tokens
NO_EMBEDDINGS: Mapping[str, int] = MappingProxyType({})

# ASCII white space only: the tokenizer separates words at all of it, so splitting here changes no token
_SPACE = re.compile(r"[ \t\n\r\f\v]+")
_BREAK = re.compile(r"\bBREAK\b")
#: the name ends at the end of a word, or at punctuation of the prompt syntax
_EMBEDDING = re.compile(r"embedding:([^\s,()]+)")


@dataclass(frozen=True, slots=True)
class LearnedToken:
    """A token with row `row` of the embedding `name` as its vector."""

    name: str
    row: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Token ids that an encoder reads at once, 77 for CLIP, and their weights; begin, end and padding have weight 1.
    `tokens` of them, from `first` on, are the text with its begin and end token, the others are padding.

    learned  learned tokens, by position
    cut      text tokens that were truncated
    images  start positions of the tokens of each image
    named_images  position and number of each name of a reference image
    """

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]
    tokens: int
    first: int = 0
    learned: tuple[tuple[int, LearnedToken], ...] = ()
    cut: int = 0
    images: tuple[int, ...] = ()
    named_images: tuple[tuple[int, int], ...] = ()

    @property
    def is_weighted(self) -> bool:
        """Whether any token has a weight other than 1."""
        return any(weight != 1.0 for weight in self.weights)

    @property
    def mask(self) -> tuple[bool, ...]:
        """The attention mask: True for tokens of the text."""
        return tuple(self.first <= i < self.first + self.tokens for i in range(len(self.token_ids)))


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    weight: float
    is_name: bool


@dataclass(frozen=True, slots=True)
class _Token:
    id: int
    weight: float
    learned: LearnedToken | None = None


def split_prompt(
    tokenizer: ClipTokenizer,
    text: str,
    embeddings: Mapping[str, int] = NO_EMBEDDINGS,
    chunk_tokens: int = CHUNK_TOKENS,
    tokens: ClipTokens | None = None,
) -> tuple[Chunk, ...]:
    """Return the chunks of a prompt with weights in brackets; one empty chunk for an empty prompt.

    `embeddings` are the known textual inversions: the number of rows of each name. `tokens` are the tokens of the text,
    if it is tokenized already. Raises UnusableField as `parse_weights` does, and UnknownName for an unknown embedding.
    """
    content = chunk_tokens - 2
    chunks: list[list[_Token]] = [[]]
    pieces = iter((clip_tokens(tokenizer, text) if tokens is None else tokens).pieces)
    for word in _words(pieces, text, embeddings):
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


def clip_tokens(tokenizer: ClipTokenizer, text: str) -> ClipTokens:
    """Tokenize a prompt. Raises UnusableField as `parse_weights` does."""
    known: dict[str, tuple[int, ...]] = {}  # a long text repeats its words
    found = []
    for piece in _pieces(text):
        if piece is None or piece.is_name:
            continue
        ids = known.get(piece.text)
        if ids is None:
            ids = known[piece.text] = tuple(tokenizer.encode(piece.text))
        found.append(ids)
    return ClipTokens(tuple(found))


def empty_chunk(chunk_tokens: int = CHUNK_TOKENS) -> Chunk:
    """Return the chunk of an empty prompt."""
    return _filled([], chunk_tokens)


def embeddings_in(text: str) -> tuple[str, ...]:
    """Return the names of the embeddings in a prompt, each once, in order. Raises UnusableField as `parse_weights`
    does."""
    if "embedding:" not in text:
        return ()
    return tuple(dict.fromkeys(name for part in parse_weights(text) for name in _EMBEDDING.findall(part.text)))


def plain_words(text: str) -> str:
    """Return a prompt without CLIP's syntax: BREAK becomes a space, names of embeddings are removed."""
    if not (_BREAK.search(text) or _EMBEDDING.search(text)):
        return text
    return _SPACE.sub(" ", _EMBEDDING.sub("", _BREAK.sub(" ", text))).strip()


def _pieces(text: str) -> Iterator[_Piece | None]:
    """Yield the pieces of a prompt that are tokenized alone and the names of embeddings, in order; None for BREAK."""
    for part in parse_weights(text):
        for i, section in enumerate(_BREAK.split(part.text)):
            if i:
                yield None
            for word in _SPACE.split(section):
                # text, name, text, name, ..., text
                for place, piece in enumerate(_EMBEDDING.split(word)):
                    if piece:
                        yield _Piece(piece, part.weight, is_name=place % 2 == 1)


def _words(tokens: Iterator[tuple[int, ...]], text: str, embeddings: Mapping[str, int]) -> Iterator[list[_Token]]:
    """Yield the tokens of each word, with `tokens` for its pieces; an empty list for BREAK."""
    for piece in _pieces(text):
        if piece is None:
            yield []
            continue
        if piece.is_name:
            word = _learned(piece.text, embeddings, piece.weight)
        else:
            word = [_Token(token_id, piece.weight) for token_id in next(tokens)]
        if word:
            yield word


def _learned(name: str, embeddings: Mapping[str, int], weight: float) -> list[_Token]:
    if name not in embeddings:
        raise unknown_name("embedding", name, embeddings)
    return [_Token(LEARNED_ID, weight, LearnedToken(name, row)) for row in range(embeddings[name])]


def _filled(tokens: list[_Token], chunk_tokens: int) -> Chunk:
    rest = chunk_tokens - 1 - len(tokens)
    return Chunk(
        token_ids=(BEGIN_ID, *(t.id for t in tokens), *(END_ID,) * rest),
        weights=(1.0, *(t.weight for t in tokens), *(1.0,) * rest),
        tokens=len(tokens) + 2,
        learned=tuple((place, t.learned) for place, t in enumerate(tokens, start=1) if t.learned),
    )
