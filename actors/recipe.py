"""All that a picture depends on, resolved: the names made hashes, the defaults made numbers.

Values only. Two pictures with equal recipes have equal pixels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RecipeLora:
    """A LoRA as it was used."""

    name: str
    sha256: str
    strength: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to do again to get the same picture. `versions` and `warnings` are told, and not part of the digest."""

    model: str
    model_sha256: str
    prompt: str
    negative: str
    loras: tuple[RecipeLora, ...]
    steps: int
    cfg: float
    sampler: str
    schedule: str
    width: int
    height: int
    seed: int
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`."""
        return dataclasses.asdict(self)

    @property
    def digest(self) -> str:
        """20 hexadecimal digits that name the picture."""
        content = {k: v for k, v in self.as_json().items() if k not in ("versions", "warnings")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]
