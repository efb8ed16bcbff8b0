"""`Choice`: something that was decided, with the reason in words. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """What was chosen, and why this and nothing else: the rest of a sentence that begins with "because"."""

    value: T
    reason: str
