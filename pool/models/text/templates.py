"""Puts prompts into the template of an encoder that reads a text at once, truncates and pads them. Torch-free.

A prompt is tokenized as a whole, so that weights change no token: a token has the weight of its last character. Some
models read the characters of quoted text, which they are to write, as separate tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from modelpool.pool.families.parts.text_reading import (
    HEAD_TOKENS,
    IMAGE_NAME,
    Reading,
    cleaned,
    image_number,
    quoted_parts,
    spelled,
)
from modelpool.pool.models.text.chunks import Chunk, plain_words
from modelpool.pool.models.text.prompt_weights import WeightedText, parse_weights
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.prompt_tokens import Tokens


def template_tokens(tokenizer: TextTokenizer, text: str, reading: Reading, is_negative: bool = False) -> Tokens:
    """Tokenize a prompt in its template. Raises UnusableField as `parse_weights` does."""
    return _in_template(tokenizer, "".join(part.text for part in _parts(text, reading)), reading, is_negative)


def _in_template(tokenizer: TextTokenizer, plain: str, reading: Reading, is_negative: bool) -> Tokens:
    """Tokenize a prompt without weights in its template. The name of the n-th reference image is the token -n."""
    before, after = reading.around(is_negative)
    pieces = (before, *spelled(plain), after)
    if reading.names_images:
        pieces = tuple(_between_images(before + plain + after))
    elif not reading.spells_quotes:
        return tokenizer.encode(before + plain + after)
    ids: list[int] = []
    ends: list[int] = []
    start = 0
    for piece in pieces:
        number = image_number(piece) if reading.names_images else 0
        found = Tokens((-number,), (len(piece),)) if number else tokenizer.encode(piece)
        ids.extend(found.ids)
        ends.extend(start + end for end in found.ends)
        start += len(piece)
    return Tokens(tuple(ids), tuple(ends))


def _between_images(text: str) -> Iterator[str]:
    """Yield the names of reference images in `text`, and the parts between them, in order."""
    start = 0
    for found in IMAGE_NAME.finditer(text):
        yield from (text[start : found.start()], found[0])
        start = found.end()
    yield text[start:]


def whole_text(
    tokenizer: TextTokenizer, text: str, reading: Reading, *, is_negative: bool = False, tokens: Tokens | None = None
) -> Chunk:
    """Return a prompt with weights in brackets as one row of `least_tokens` to `most_tokens` tokens. `tokens` is the
    text in its template, if it is tokenized already.

    BREAK and names of embeddings, which only CLIP reads, are removed. Raises UnusableField as `parse_weights` does.
    """
    before, after = reading.around(is_negative)
    parts = _parts(text, reading)
    plain = "".join(part.text for part in parts)
    tokens = _in_template(tokenizer, plain, reading, is_negative) if tokens is None else tokens
    around = len(tokenizer.begin) + len(tokenizer.end)
    least, most = _row_tokens(tokenizer, reading, is_negative)
    room = max(0, most - around) if most else len(tokens.ids)
    places = _kept(len(tokens.ids), room, reading.kept_last)
    content = tuple(tokens.ids[place] for place in places)
    at = [1.0] * len(before) + [part.weight for part in parts for _ in part.text] + [1.0] * len(after)
    weights = [at[end - 1] if 0 < end <= len(at) else 1.0 for end in (tokens.ends[place] for place in places)]
    ids = (*tokenizer.begin, *content, *tokenizer.end)
    row = Chunk(
        token_ids=tuple(max(0, token) for token in ids),
        weights=(*(1.0 for _ in tokenizer.begin), *weights, *(1.0 for _ in tokenizer.end)),
        tokens=len(ids),
        cut=_cut(tokens, places, range(len(before) + 1, len(before) + len(plain) + 1)),
        named_images=tuple((place, -token) for place, token in enumerate(ids) if token < 0),
    )
    if reading.is_optional and not plain:
        row = replace(row, tokens=0)
    pad_id = pad_id_of(tokenizer, reading)
    row = padded(row, least, pad_id, left=reading.pads_left)
    return _with_real_pads(row, reading, pad_id) if reading.multiple else row


def quoted_rows(tokenizer: TextTokenizer, text: str, reading: Reading) -> tuple[Chunk, ...]:
    """Return the parts of a prompt in quotation marks as rows; one empty text if there is none. Raises as
    `whole_text`."""
    rows = [whole_text(tokenizer, part, reading) for part in quoted_parts(text)]
    if len(rows) % 2:
        return tuple(rows)
    # Source: `_get_glyph_embeds` of diffusers' GlmImagePipeline, which counts the texts
    wider = [padded(row, len(row.token_ids) + 1, pad_id_of(tokenizer, reading), left=True) for row in rows]
    return tuple(replace(row, first=0, tokens=row.tokens + 1) for row in wider)


def _with_real_pads(row: Chunk, reading: Reading, pad_id: int) -> Chunk:
    """Return `row` with padding that counts as real, to a multiple of tokens."""
    tokens = row.tokens + -row.tokens % reading.multiple
    return replace(padded(row, tokens, pad_id, left=reading.pads_left), first=row.first, tokens=tokens)


def _kept(tokens: int, room: int, last: int) -> Sequence[int]:
    """Return the positions of the `tokens` that fit into `room`: the first ones, and the `last` ones."""
    last = min(last, room)
    return range(tokens) if tokens <= room else (*range(room - last), *range(tokens - last, tokens))


def _cut(tokens: Tokens, places: Sequence[int], text: range) -> int:
    """Return the number of tokens that are not at the kept `places` and end in the characters of the `text`: the end
    of a template is cut off, too, but it is no part of the text."""
    if len(places) == len(tokens.ids):
        return 0
    kept = frozenset(places)
    return sum(end in text for place, end in enumerate(tokens.ends) if place not in kept)


def _row_tokens(tokenizer: TextTokenizer, reading: Reading, is_negative: bool) -> tuple[int, int]:
    """Return the least and the most tokens of a row."""
    if not reading.keeps_ends:
        return reading.least_tokens, reading.most_tokens
    tokens = end_positions(tokenizer, reading, is_negative)[-1] + 1
    return tokens, tokens


def end_positions(tokenizer: TextTokenizer, reading: Reading, is_negative: bool) -> list[int]:
    """Return the positions of read states in a row, for a reading that keeps both ends: the first one, and
    `least_tokens` less 1 from the last token of the template's beginning on."""
    before, _ = reading.around(is_negative)
    start = 1
    if before:
        start = len(tokenizer.begin) + len(tokenizer.encode(before).ids) + len(tokenizer.end) - 1
    return [0, *range(start, start + reading.least_tokens - 1)]


def _parts(text: str, reading: Reading) -> tuple[WeightedText, ...]:
    if not reading.has_weights:
        return (WeightedText(text, 1.0),)
    return parse_weights(plain_words(cleaned(text, reading.cleaning)))


def padded(row: Chunk, tokens: int, pad_id: int, *, left: bool = False) -> Chunk:
    """Pad `row` with `pad_id` on the right (or left) to `tokens` tokens; unchanged if it has as many."""
    rest = tokens - len(row.token_ids)
    if rest <= 0:
        return row
    pads, ones = (pad_id,) * rest, (1.0,) * rest
    if left:
        return replace(row, token_ids=pads + row.token_ids, weights=ones + row.weights, first=row.first + rest)
    return replace(row, token_ids=row.token_ids + pads, weights=row.weights + ones)


def truncate(row: Chunk, tokens: int) -> Chunk:
    """Return the first `tokens` of `row`."""
    real = max(0, min(row.first + row.tokens, tokens) - row.first)
    return replace(row, token_ids=row.token_ids[:tokens], weights=row.weights[:tokens], tokens=real)


def pad_id_of(tokenizer: TextTokenizer, reading: Reading) -> int:
    """Return the padding token: the reading's if it names one."""
    return tokenizer.id_of(reading.pad) if reading.pad else tokenizer.pad_id


def token_mask(row: Chunk, extra: int = 0) -> tuple[bool, ...]:
    """Return the mask of real tokens, including `extra` padding tokens after them."""
    return tuple(row.first <= i < row.first + row.tokens + extra for i in range(len(row.token_ids)))


def state_positions(row: Chunk, reading: Reading, tokenizer: TextTokenizer, counts: Sequence[int]) -> list[int]:
    """Return the positions of read states in `row`, in order, for a reading that puts images first; these have
    `counts` states each. A truncated text has no header of a last turn; its end is dropped instead."""
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


def real_positions(row: Chunk, dropped: int) -> Iterator[int]:
    """Yield the positions of real tokens after the first `dropped`."""
    return (place for place, real in enumerate(row.mask) if real and place >= dropped)
