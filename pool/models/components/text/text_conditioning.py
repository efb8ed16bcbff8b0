"""Assemble the text conditioning of a diffusion model from the states of its text encoders.

Names are as in `pool.models.components.diffusion.architecture`: context, context_mask, context_2,
context_2_mask, pooled. Legend: B texts (1), L tokens, D width of a token's state, V width of the pooled text, S states
of a token.

Knows what replaces a missing encoder. Runs no encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.families.parts.text_join import Joined
from modelpool.pool.families.parts.text_reading import MaskMode, Pooled, Reading
from modelpool.pool.families.text_readings import JOINS, OPTIONAL_ENCODERS, READINGS, ROW_OF
from modelpool.pool.models.text.encode import ReadText
from modelpool.pool.values.core.errors import UnknownArchitecture, counted, unknown_name

Read: TypeAlias = Sequence[ReadText | None]
#: length of a text if no CLIP reads it
_CLIP_TOKENS = 77
_NO_WIDTHS: Mapping[str, int] = MappingProxyType({})


def text_kwargs(family: str, read: Read, widths: Mapping[str, int] = _NO_WIDTHS) -> dict[str, Tensor]:
    """Return the text inputs of a model of `family` (or of a set of text encoders) from the encoder outputs `read`, in
    the order of `readings_of(family)`; each tensor with a batch of one.

    Zeros replace a missing encoder (None) if the model runs without it; `widths` by encoder override the published
    widths.

    Raises UnknownName for a family without readings, UnknownArchitecture for a missing required encoder.
    """
    if family not in ROW_OF:
        raise unknown_name("family of text encoders", family, READINGS)
    row = ROW_OF[family]
    readings = READINGS[row]
    assert len(read) == len(readings), f"{row}: read by {counted(len(read), 'encoder')}, expected {len(readings)}"
    whole = _with_zeros(row, read, readings, widths)
    joined = JOINS[row].join(whole) if row in JOINS else _as_read(readings, whole)
    return {name: tensor.unsqueeze(0) for name, tensor in joined.items() if tensor is not None}


def _with_zeros(row: str, read: Read, readings: Sequence[Reading], widths: Mapping[str, int]) -> list[ReadText]:
    present = [text for text in read if text is not None]
    # one that writes tokens has no states
    required = [
        (reading.encoder, text) for reading, text in zip(readings, read, strict=True) if not reading.writes_tokens
    ]
    missing = [encoder for encoder, text in required if text is None]
    if missing and (row not in OPTIONAL_ENCODERS or not present or not OPTIONAL_ENCODERS[row].issuperset(missing)):
        raise UnknownArchitecture(f"{row}: found no text encoder {', '.join(missing)}, expected it with the others")
    like = present[0].context_LD
    clip_tokens = max(
        (t.context_LD.shape[0] for r, t in zip(readings, read, strict=True) if t is not None and r.is_clip),
        default=_CLIP_TOKENS,
    )
    whole = []
    for reading, text in zip(readings, read, strict=True):
        width = widths.get(reading.encoder, reading.width)
        tokens = clip_tokens if reading.is_clip else reading.least_tokens
        pooled = None if reading.pooled is Pooled.NONE else like.new_zeros(width)
        has_mask = reading.mask is not MaskMode.NOTHING
        mask = torch.zeros(tokens, dtype=torch.bool, device=like.device) if has_mask else None
        whole.append(text or ReadText(like.new_zeros(tokens, width), pooled, mask))
    return whole


def _as_read(readings: Sequence[Reading], read: Sequence[ReadText]) -> Joined:
    """Return the states that are read of each encoder, in order (context, context_2), and the one pooled vector."""
    texts = list(zip(readings, read, strict=True))
    joined: dict[str, Tensor | None] = {}
    for place, text in enumerate((text for reading, text in texts if reading.reads_states), start=1):
        name = "context" if place == 1 else f"context_{place}"
        joined |= {name: text.context_LD, f"{name}_mask": text.mask_L}
        if text.image_places_K2 is not None:
            joined["image_places"] = text.image_places_K2
    pooled = [text.pooled_V for reading, text in texts if reading.pooled is not Pooled.NONE]
    assert len(pooled) <= 1, "several pooled vectors, which only the family can join"
    return joined | {"pooled": pooled[0] if pooled else None}
