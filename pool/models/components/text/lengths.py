"""Lengths of the text states that models read, and valueless tensors of that size for planning. Reads no weights.

Knows how the lengths of several encoders combine; `pool.models.components.text.text_conditioning` combines the states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.families.parts.text_reading import Padding, Pooled, Reading
from modelpool.pool.families.text_readings import JOINS, ROW_OF, readings_of
from modelpool.pool.models.components.text.connectors import connected_width
from modelpool.pool.models.components.text.text_conditioning import text_kwargs
from modelpool.pool.models.text.chunks import NO_EMBEDDINGS, split_prompt
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.models.text.encode import AnyTokenizer, ReadText, text_with_images
from modelpool.pool.models.text.templates import quoted_rows, real_positions, state_positions
from modelpool.pool.values.core.prompt_tokens import ClipTokens, PromptTokens, Tokens

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class ReadLength:
    """The properties of a text that determine the cost of one text encoder. Equal values share their counts.

    tokens      length of its states
    weighted    some token has a weight other than 1: the empty text is encoded too
    filled      some tokens are padding: a mask tells which
    row_tokens  length of what the encoder reads, with template and padding, which differs between tokenizers; 0 for
                CLIP: its chunks have one length
    rows        rows of that length for one text
    cut         tokens at the end of the text that do not fit into a row: they cost nothing
    """

    tokens: int
    weighted: bool = False
    filled: bool = False
    row_tokens: int = 0
    rows: int = 1
    cut: int = field(default=0, compare=False)


def length_read(
    reading: Reading,
    tokenizer: AnyTokenizer,
    text: str,
    counts: Sequence[int] = (),
    tokens: PromptTokens | None = None,
    embeddings: Mapping[str, int] = NO_EMBEDDINGS,
    is_negative: bool = False,
) -> ReadLength:
    """Return how an encoder reads `text`, with images of `counts` states, and `embeddings` of some rows. `tokens` are
    the text's, if it is tokenized already. Raises UnusableField as `parse_weights` does."""
    if isinstance(tokenizer, ClipTokenizer):
        known = tokens if isinstance(tokens, ClipTokens) else None
        chunks = split_prompt(tokenizer, text, embeddings, reading.chunk_tokens, known)
        if not reading.reads_states:
            return ReadLength(reading.chunk_tokens)
        return ReadLength(reading.chunk_tokens * len(chunks), any(chunk.is_weighted for chunk in chunks))
    if reading.quotes_apart:
        parts = quoted_rows(tokenizer, text, reading)
        longest, length = max(len(row.token_ids) for row in parts), sum(row.tokens for row in parts)
        weighted = any(row.is_weighted for row in parts)
        return ReadLength(length, weighted, length < longest * len(parts), longest, len(parts))
    own = tokens if isinstance(tokens, Tokens) else None
    row = text_with_images(tokenizer, text, reading, counts, is_negative, own)
    length = len(row.token_ids) - reading.dropped_tokens
    if reading.images_every:
        length = len(state_positions(row, reading, tokenizer, counts))
    elif reading.keeps_ends:
        length = reading.least_tokens
    elif reading.padding is Padding.DROPPED:
        length = len(list(real_positions(row, reading.dropped_tokens)))
    return ReadLength(length, row.is_weighted, not all(row.mask), len(row.token_ids), cut=row.cut)


def context_tokens(text_set: str, lengths: Sequence[int]) -> int:
    """Return the length of the text that a model reads, from the lengths of its encoders; 0 for a missing one (see
    `text_kwargs`)."""
    readings = readings_of(text_set)
    assert readings is not None, f"{text_set}: no text readings are defined"
    if _is_appended(text_set):
        *clips, last = lengths
        return max(clips) + (last or readings[-1].least_tokens)
    return lengths[_place_of_context(readings)]


def _is_appended(text_set: str) -> bool:
    """Return whether the last encoder's states follow the others' states."""
    join = JOINS.get(ROW_OF[text_set])
    return join is not None and join.is_appended


def _place_of_context(readings: Sequence[Reading]) -> int:
    """Return the place of the first encoder with states to read; encoders before it give only a pooled vector."""
    return next(place for place, reading in enumerate(readings) if reading.reads_states)


def empty_text_kwargs(text_set: str, encoders: Mapping[int, nn.Module], tokens: int) -> dict[str, Tensor]:
    """Return the text inputs of a model for `tokens` tokens, on the meta device, with a batch of one. `encoders` by
    their position among the readings of `text_set`."""
    readings = readings_of(text_set)
    assert readings is not None, f"{text_set}: no text readings are defined"
    read = [
        _empty(reading, encoders[place], tokens) if place in encoders else None
        for place, reading in enumerate(readings)
    ]
    kwargs = text_kwargs(text_set, read)
    context = kwargs["context"]
    if context.shape[1] != tokens and not _has_one_length(text_set, readings):
        kwargs["context"] = context.new_empty((1, tokens, context.shape[-1]))
        if any(reading.images_every for reading in readings):  # their texts are padded
            kwargs["context_mask"] = context.new_empty((1, tokens), dtype=torch.bool)
    return kwargs


def _has_one_length(text_set: str, readings: Sequence[Reading]) -> bool:
    """Return whether all texts that a model reads are equally long."""
    own = readings[_place_of_context(readings)]
    is_fixed = own.least_tokens == own.most_tokens > 0 and own.padding is not Padding.DROPPED
    return not _is_appended(text_set) and not own.is_clip and is_fixed and not own.images_every


def _empty(reading: Reading, encoder: nn.Module, tokens: int) -> ReadText:
    if reading.connects:
        return ReadText(torch.empty((reading.least_tokens or tokens, connected_width(encoder)), device=META))
    config: Any = encoder.config  # transformers is not typed
    config = getattr(config, "text_config", config)
    width = int(getattr(config, "hidden_size", 0) or config.d_model) * max(1, len(reading.layers))
    kwargs = max(0, reading.least_tokens - reading.dropped_tokens) or tokens
    length = reading.chunk_tokens if reading.is_clip else kwargs
    layers = (int(config.num_hidden_layers) + reading.first_state,) if reading.every_layer else ()
    pooled = None
    if reading.pooled is not Pooled.NONE:
        projected = int(getattr(config, "projection_dim", 0) or width)
        has_projection = reading.pooled is Pooled.PROJECTED and hasattr(encoder, "text_projection")
        pooled = torch.empty(projected if has_projection else width, device=META)
    mask = None
    return ReadText(torch.empty((*layers, length, width), device=META), pooled, mask)
