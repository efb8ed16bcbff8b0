"""How long the texts are that models read, and tensors of that size without values, for planning. Reads no weights.

Knows how lengths of several encoders' states make one; `pool.models.text.text_conditioning` puts the states themselves
together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.families.text_readings import ROW_OF, readings_of
from modelpool.pool.models.text.text_conditioning import told_of
from modelpool.pool.text.chunks import split_prompt
from modelpool.pool.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.text.encode import AnyTokenizer, ReadText, seeing_text
from modelpool.pool.text.reading import Padding, Pooled, Reading
from modelpool.pool.text.templates import kept_places, told_places

META = torch.device("meta")
#: rows of the table of readings whose encoders' states follow each other
_FOLLOWING = frozenset({"sd3"})
#: those whose first encoder tells nothing but a vector
_SECOND_TELLS = frozenset({"flux", "hunyuan_video", "hunyuan_video_i2v"})
#: and those whose third does
_THIRD_TELLS = frozenset({"hidream"})


@dataclass(frozen=True, slots=True)
class ReadLength:
    """What one text encoder's work at a text depends on.

    tokens    the states that are told of it
    weighted  some token weighs other than 1: the empty text is read with it
    filled    not all tokens are the text's: a mask says which are
    """

    tokens: int
    weighted: bool = False
    filled: bool = False


def length_read(reading: Reading, tokenizer: AnyTokenizer, text: str, counts: Sequence[int] = ()) -> ReadLength:
    """How an encoder reads `text`, with images of so many states. Raises UnusableField as `parse_weights` does."""
    if isinstance(tokenizer, ClipTokenizer):
        chunks = split_prompt(tokenizer, text, chunk_tokens=reading.chunk_tokens)
        if not reading.tells_states:
            return ReadLength(reading.chunk_tokens)
        return ReadLength(reading.chunk_tokens * len(chunks), any(chunk.is_weighted for chunk in chunks))
    row = seeing_text(tokenizer, text, reading, counts)
    tokens = len(row.token_ids) - reading.dropped_tokens
    if reading.images_every:
        tokens = len(told_places(row, reading, tokenizer, counts))
    elif reading.padding is Padding.DROPPED:
        tokens = len(list(kept_places(row, reading.dropped_tokens)))
    return ReadLength(tokens, row.is_weighted, not all(row.mask))


def context_tokens(text_set: str, lengths: Sequence[int]) -> int:
    """The length of the text that a model reads, of those of what each of its encoders read; 0 for one that is missing
    (see `told_of`)."""
    row = ROW_OF[text_set]
    if row in _FOLLOWING:
        *clips, last = lengths
        readings = readings_of(text_set)
        assert readings is not None
        return max(clips) + (last or readings[-1].least_tokens)
    return lengths[1 if row in _SECOND_TELLS else 2 if row in _THIRD_TELLS else 0]


def empty_told(text_set: str, encoders: Mapping[int, nn.Module], tokens: int) -> dict[str, Tensor]:
    """What a model is told of a text of so many `tokens`, on the meta device, with a batch of one. `encoders` by their
    places among the readings of `text_set`."""
    readings = readings_of(text_set)
    assert readings is not None, f"nothing says how the texts of {text_set} are read"
    read = [
        _empty(reading, encoders[place], tokens) if place in encoders else None
        for place, reading in enumerate(readings)
    ]
    told = told_of(text_set, read)
    context = told["context"]
    if context.shape[1] != tokens and not _has_one_length(text_set, readings):
        told["context"] = context.new_empty((1, tokens, context.shape[-1]))
        if any(reading.images_every for reading in readings):  # their texts are filled up
            told["context_mask"] = context.new_empty((1, tokens), dtype=torch.bool)
    return told


def _has_one_length(text_set: str, readings: Sequence[Reading]) -> bool:
    """Whether all texts that a model reads are equally long."""
    row = ROW_OF[text_set]
    own = readings[1 if row in _SECOND_TELLS else 2 if row in _THIRD_TELLS else 0]
    is_fixed = own.least_tokens == own.most_tokens > 0 and own.padding is not Padding.DROPPED
    return row not in _FOLLOWING and not own.is_clip and is_fixed and not own.images_every


def _empty(reading: Reading, encoder: nn.Module, tokens: int) -> ReadText:
    config: Any = encoder.config  # transformers is not typed
    config = getattr(config, "text_config", config)
    width = int(getattr(config, "hidden_size", 0) or config.d_model) * max(1, len(reading.layers))
    told = max(0, reading.least_tokens - reading.dropped_tokens) or tokens
    length = reading.chunk_tokens if reading.is_clip else told
    layers = (int(config.num_hidden_layers),) if reading.every_layer else ()
    pooled = None
    if reading.pooled is not Pooled.NONE:
        projected = int(getattr(config, "projection_dim", 0) or width)
        has_projection = reading.pooled is Pooled.PROJECTED and hasattr(encoder, "text_projection")
        pooled = torch.empty(projected if has_projection else width, device=META)
    mask = None
    return ReadText(torch.empty((*layers, length, width), device=META), pooled, mask)
