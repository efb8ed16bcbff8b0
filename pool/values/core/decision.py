"""`Decision`: a chosen value with the reason in words. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A chosen value and its reason: the rest of a sentence that begins with "because"."""

    value: T
    reason: str
