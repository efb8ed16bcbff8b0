"""Prompts for encoders that read a text at once: in their template, cut to what they read, filled up. Torch-free.

A prompt is tokenized as a whole, so that weights change no token: a token weighs what its last character weighs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from modelpool.pool.text.chunks import Chunk, plain_words
from modelpool.pool.text.prompt_weights import parse_weights
from modelpool.pool.text.reading import HEAD_TOKENS, Reading, cleaned
from modelpool.pool.text.text_tokenizer import TextTokenizer


def whole_text(tokenizer: TextTokenizer, text: str, reading: Reading, *, is_negative: bool = False) -> Chunk:
    """A prompt with weights in brackets as one row of tokens, `least_tokens` long at least and `most_tokens` at most.

    BREAK and names of embeddings, which are CLIP's, are left out. Raises UnusableField as `parse_weights` does.
    """
    before, after = reading.around(is_negative)
    parts = parse_weights(plain_words(cleaned(text, reading.cleaning)))
    plain = "".join(part.text for part in parts)
    tokens = tokenizer.encode(before + plain + after)
    around = len(tokenizer.begin) + len(tokenizer.end)
    room = max(0, reading.most_tokens - around) if reading.most_tokens else len(tokens.ids)
    content = tokens.ids[:room]
    at = [1.0] * len(before) + [part.weight for part in parts for _ in part.text] + [1.0] * len(after)
    weights = [at[end - 1] if 0 < end <= len(at) else 1.0 for end in tokens.ends[:room]]
    ids = (*tokenizer.begin, *content, *tokenizer.end)
    row = Chunk(
        token_ids=ids,
        weights=(*(1.0 for _ in tokenizer.begin), *weights, *(1.0 for _ in tokenizer.end)),
        tokens=len(ids),
        cut=len(tokens.ids) - len(content),
    )
    if reading.is_optional and not plain:
        row = replace(row, tokens=0)
    return filled_up(row, reading.least_tokens, pad_of(tokenizer, reading), left=reading.fills_left)


def filled_up(row: Chunk, tokens: int, pad_id: int, *, left: bool = False) -> Chunk:
    """`row` with `pad_id` after it (or before it) until it has so many tokens; as it is when it has."""
    rest = tokens - len(row.token_ids)
    if rest <= 0:
        return row
    pads, ones = (pad_id,) * rest, (1.0,) * rest
    if left:
        return replace(row, token_ids=pads + row.token_ids, weights=ones + row.weights, first=row.first + rest)
    return replace(row, token_ids=row.token_ids + pads, weights=row.weights + ones)


def cut_down(row: Chunk, tokens: int) -> Chunk:
    """The first `tokens` of `row`."""
    real = max(0, min(row.first + row.tokens, tokens) - row.first)
    return replace(row, token_ids=row.token_ids[:tokens], weights=row.weights[:tokens], tokens=real)


def pad_of(tokenizer: TextTokenizer, reading: Reading) -> int:
    """The token that fills texts up: that of the reading where it names one."""
    return tokenizer.id_of(reading.pad) if reading.pad else tokenizer.pad_id


def told_mask(row: Chunk, extra: int = 0) -> tuple[bool, ...]:
    """Which tokens are real, and `extra` of those after them."""
    return tuple(row.first <= i < row.first + row.tokens + extra for i in range(len(row.token_ids)))


def told_places(row: Chunk, reading: Reading, tokenizer: TextTokenizer, counts: Sequence[int]) -> list[int]:
    """The places of `row` whose states are told, in their order, by a reading that tells those of images first; they
    have so many states each (`counts`). In a text that was cut there is no head of a last turn: its end is left out."""
    images = [
        place
        for start, count in zip(row.images, counts, strict=True)
        for place in range(start, start + count, reading.images_every)
    ]
    begin, length = reading.dropped_tokens + sum(counts) - len(counts), len(row.token_ids)
    head, heads = tokenizer.id_of(reading.last_head), reading.template.count(reading.last_head)
    ends = [place for place, token in enumerate(row.token_ids) if token == head]
    last = ends[-1] if len(ends) >= heads else length - 1
    text = (place for place in range(begin, length) if not last - HEAD_TOKENS < place <= last)
    return [*images, *text]


def kept_places(row: Chunk, dropped: int) -> Iterator[int]:
    """The places of real tokens after the first `dropped`."""
    return (place for place, real in enumerate(row.mask) if real and place >= dropped)
