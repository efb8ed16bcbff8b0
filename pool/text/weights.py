"""Prompt weights: which parts of a text matter more, in the notation that people know from A1111 and ComfyUI.

    (word)        1.1 times
    ((word))      1.21 times: brackets multiply
    (word:1.3)    1.3 times; inside other brackets, multiplied with theirs
    \\( \\)         brackets that are text; a backslash before anything else is text too

Brackets that do not pair are text, and so is a number with nothing to weigh, as in `(:3)`. Torch-free; knows nothing of
tokens.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from pool.errors import unusable_field

#: what a pair of brackets without a number multiplies with
BRACKET_WEIGHT = 1.1

_SIGNIFICANT = re.compile(r"\\[()]|[()]")
_NUMBER_AT_END = re.compile(r":\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*$")


@dataclass(frozen=True, slots=True)
class Weighted:
    """A part of a prompt and how much it matters; 1 is plain."""

    text: str
    weight: float


@dataclass(slots=True)
class _Bracket:
    """An open bracket (or the whole text): finished parts, and the text since the last of them."""

    parts: list[Weighted] = field(default_factory=list)
    text: str = ""

    def finish_text(self) -> None:
        """Make the pending text a part."""
        if self.text:
            self.parts.append(Weighted(self.text, 1.0))
            self.text = ""

    def take_number(self) -> float:
        """The weight that this bracket closes with, its notation taken out of the text."""
        found = _NUMBER_AT_END.search(self.text)
        if found is None or not (self.parts or found.start()):
            return BRACKET_WEIGHT
        self.text = self.text[: found.start()]
        return float(found[1])


def parse_weights(text: str) -> tuple[Weighted, ...]:
    """The parts of `text` with their weights, in order. Neighbours differ in weight; no part is empty.

    Raises UnusableField for a weight too large to be a number.
    """
    stack = [_Bracket()]
    place = 0
    for found in _SIGNIFICANT.finditer(text):
        stack[-1].text += text[place : found.start()]
        place = found.end()
        if found[0] == "(":
            stack[-1].finish_text()
            stack.append(_Bracket())
        elif found[0] == ")" and len(stack) > 1:
            _close(stack)
        else:
            stack[-1].text += found[0][-1]
    stack[-1].text += text[place:]
    while len(stack) > 1:
        _leave_open(stack)
    stack[0].finish_text()
    return _merged(stack[0].parts)


def _close(stack: list[_Bracket]) -> None:
    """The innermost bracket ends: its parts, weighted, become parts of the one around it."""
    closed = stack.pop()
    weight = closed.take_number()
    closed.finish_text()
    stack[-1].parts.extend(Weighted(part.text, part.weight * weight) for part in closed.parts)


def _leave_open(stack: list[_Bracket]) -> None:
    """The innermost bracket never ends: it was text."""
    opened = stack.pop()
    opened.finish_text()
    stack[-1].parts.extend((Weighted("(", 1.0), *opened.parts))


def _merged(parts: list[Weighted]) -> tuple[Weighted, ...]:
    merged: list[Weighted] = []
    for part in parts:
        if not math.isfinite(part.weight):
            raise unusable_field("prompt weight", part.weight, f"a finite number for {part.text!r}")
        if merged and merged[-1].weight == part.weight:
            merged[-1] = Weighted(merged[-1].text + part.text, part.weight)
        else:
            merged.append(part)
    return tuple(merged)
