"""Edits of encoded texts: zero, one behind another, average.

An `Encoded` is one text. Areas, masks and ranges of steps are no tensors: they are fields of a request.

Shape legend: L tokens, D text width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from modelpool.pool.inference.operations.image_edits import NoSettings
from modelpool.pool.inference.operations.operation import ENCODED, Inputs, Operation, Size, Sizes, need, no_size
from modelpool.pool.values.core.errors import UnusableField, counted
from modelpool.pool.values.core.stage_params import Encoded

#: the marks of the tokens that a model reads, among the further states of a text; and the most padding
_MARKS, _MOST_PADDING = "context_mask", 10_000


@dataclass(frozen=True, slots=True)
class Average:
    """The share of the first text."""

    strength: float


@dataclass(frozen=True, slots=True)
class Encoders:
    """Of which text encoders a text has states: of both CLIP, and of the third one."""

    has_clip: bool = True
    has_third: bool = True


@dataclass(frozen=True, slots=True)
class TokenPadding:
    """The least padding tokens that a model reads behind a text, and the least tokens that it reads at all."""

    least_padding: int
    least_tokens: int


def _padding_size(params: TokenPadding, sizes: Sizes) -> Size:
    need("least_padding", params.least_padding, 0, _MOST_PADDING)
    need("least_tokens", params.least_tokens, 0, _MOST_PADDING)
    return no_size(params, sizes)


def _padded(params: TokenPadding, inputs: Inputs) -> Encoded:
    """Return a text with other marks of the tokens that a model reads: its own, with `least_padding` behind them, and
    at least `least_tokens`, as far as it has any. It has one padding token that is marked: of Chroma."""
    text: Encoded = inputs["text"]
    tokens = len(text.context_LD)
    marks_L = text.others.get(_MARKS)
    own = tokens  # a text that fills all its places has no marks
    if marks_L is not None:
        marked = int(marks_L.sum())
        if not marks_L[:marked].all():
            raise UnusableField("text: found padding before or between its tokens, expected it behind them")
        own = marked - 1
    count = min(tokens, max(own + params.least_padding, params.least_tokens))
    marks = {_MARKS: np.arange(tokens) < count} if count < tokens else {}
    return replace(text, others={**{name: each for name, each in text.others.items() if name != _MARKS}, **marks})


def _zero(params: NoSettings, inputs: Inputs) -> Encoded:
    """Return zeros instead of the states, the pooled embedding and further states; marks of tokens stay."""
    text: Encoded = inputs["text"]
    others = {name: np.zeros_like(value) if value.dtype.kind == "f" else value for name, value in text.others.items()}
    pooled_V = None if text.pooled_V is None else np.zeros_like(text.pooled_V)
    return Encoded(np.zeros_like(text.context_LD), pooled_V, others)


def _check(first: Encoded, second: Encoded) -> None:
    if first.others or second.others:
        names = ", ".join(sorted({*first.others, *second.others}))
        raise UnusableField(f"first, second: found texts with {names}, expected texts of states and a pooled embedding")
    if first.context_LD.shape[1:] != second.context_LD.shape[1:]:
        found, expected = second.context_LD.shape[-1], first.context_LD.shape[-1]
        raise UnusableField(f"second: found a text of width {found}, expected {expected}: the same text encoder")


def _joined(params: NoSettings, inputs: Inputs) -> Encoded:
    """Return the states of the first text, then of the second one. The pooled embedding of the first one stays."""
    first, second = inputs["first"], inputs["second"]
    _check(first, second)
    return Encoded(np.concatenate([first.context_LD, second.context_LD]), first.pooled_V)


def _pooled_of(params: NoSettings, inputs: Inputs) -> Encoded:
    """Return the states of the first text with the pooled embedding of the second one: of models that read the states
    of one text encoder, and the pooled embedding of another."""
    first: Encoded = inputs["first"]
    return replace(first, pooled_V=inputs["second"].pooled_V)


def _of_two_encoders(params: NoSettings, inputs: Inputs) -> Encoded:
    """Return the columns of the first text encoder from the first text, and the columns of the second one, which are as
    many as its pooled embedding has, from the second text, with that embedding: the two CLIP of Stable Diffusion XL.
    The shorter text is continued with zeros."""
    first, second = inputs["first"], inputs["second"]
    _check(first, second)
    width = first.context_LD.shape[-1] - _pooled_width(second)
    tokens = max(len(first.context_LD), len(second.context_LD))
    context_LD = np.zeros((tokens, first.context_LD.shape[-1]), first.context_LD.dtype)
    context_LD[: len(first.context_LD), :width] = first.context_LD[:, :width]
    context_LD[: len(second.context_LD), width:] = second.context_LD[:, width:]
    return Encoded(context_LD, second.pooled_V)


def _of_three_encoders(params: Encoders, inputs: Inputs) -> Encoded:
    """Return the rows of CLIP from the first two texts, and the rows behind them from the third: Stable Diffusion 3.
    The pooled embedding joins the embeddings of both CLIP; rows of CLIP have zeros behind as many columns. Without
    CLIP, the pooled embedding is zero; without all three, there are as many rows of zeros as CLIP would have."""
    first, second, third = (inputs[name] for name in ("first", "second", "third"))
    _check(first, second)
    _check(first, third)
    both = _pooled_width(first)
    rows = [int(np.argmax(np.append(each.context_LD[:, both:].any(-1), True))) for each in (first, second, third)]
    if rows[0] != rows[1]:
        found = " and ".join(counted(count, "token") for count in rows[:2])
        raise UnusableField(f"first, second: found {found} of CLIP, expected equally many")
    width = _first_width(first.context_LD[: rows[0]], second.context_LD[: rows[0]], both)
    clip_LD = first.context_LD[: rows[0]].copy()
    clip_LD[:, width:] = second.context_LD[: rows[0], width:]
    assert first.pooled_V is not None, "it has a width"
    pooled_V = np.concatenate([first.pooled_V[:width], _pooled(second)[width:]])
    parts = [clip_LD] * params.has_clip + [third.context_LD[rows[2] :]] * params.has_third or [np.zeros_like(clip_LD)]
    return Encoded(np.concatenate(parts), pooled_V if params.has_clip else np.zeros_like(pooled_V))


def _first_width(first_LD: npt.NDArray[np.float32], second_LD: npt.NDArray[np.float32], both: int) -> int:
    """Return the columns of CLIP-L next to the columns of CLIP-G: 768 of 2048, in tiny models half of them."""
    return both * 768 // 2048 if both == 2048 else both // 2


def _pooled(text: Encoded) -> npt.NDArray[np.float32]:
    if text.pooled_V is None:
        raise UnusableField("first, second: found a text without a pooled embedding, expected one of CLIP")
    return text.pooled_V


def _pooled_width(text: Encoded) -> int:
    return int(_pooled(text).shape[-1])


def _average_size(params: Average, sizes: Sizes) -> Size:
    need("strength", params.strength, 0, 1)
    return no_size(params, sizes)


def _averaged(params: Average, inputs: Inputs) -> Encoded:
    """Return first * strength + second * (1 - strength), states and pooled embedding. The second text is cut off, or
    continued with zeros, to the tokens of the first; a pooled embedding that only one has is taken from it."""
    first, second = inputs["first"], inputs["second"]
    _check(first, second)
    tokens = len(first.context_LD)
    other_LD = np.zeros_like(first.context_LD)
    other_LD[: len(second.context_LD)] = second.context_LD[:tokens]
    one_V, other_V = first.pooled_V, second.pooled_V
    pooled_V = other_V if one_V is None else one_V
    if one_V is not None and other_V is not None:
        pooled_V = _mixed(one_V, other_V, params.strength)
    return Encoded(_mixed(first.context_LD, other_LD, params.strength), pooled_V)


def _mixed(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32], share: float) -> npt.NDArray[np.float32]:
    return one * np.float32(share) + other * np.float32(1 - share)


def _row(name: str, params: type[Any], inputs: tuple[str, ...], run: Any, size: Any = no_size) -> Operation:
    return Operation(name, params, dict.fromkeys(inputs, ENCODED), ENCODED, run, size)


_TWO = ("first", "second")
ENCODED_EDITS = (
    _row("encoded_zero", NoSettings, ("text",), _zero),
    _row("encoded_concat", NoSettings, _TWO, _joined),
    _row("encoded_pooled_of", NoSettings, _TWO, _pooled_of),
    _row("encoded_of_two", NoSettings, _TWO, _of_two_encoders),
    _row("encoded_of_three", Encoders, (*_TWO, "third"), _of_three_encoders),
    _row("encoded_average", Average, _TWO, _averaged, _average_size),
    _row("encoded_padding", TokenPadding, ("text",), _padded, _padding_size),
)
