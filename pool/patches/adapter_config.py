"""How strong the adapters of a file are by the configuration that diffusers keeps in its header.

Knows the header entry `lora_adapter_metadata` (diffusers.loaders.lora_base) and PEFT's rules for it. Does not know
tensors. Files that it is in carry no alphas; without it their deltas would have the strength rank / alpha.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from modelpool.pool.core.errors import CorruptFile

#: name of the entry of the header
METADATA_ENTRY = "lora_adapter_metadata"
#: what PEFT calls alpha: in a LoRA's configuration, and in those of LoHa and LoKr
_ALPHAS = ("lora_alpha", "alpha")
#: a group that repeats can take for ever to match, and no name of a module needs one
_REPEATED_GROUP = re.compile(r"\)[*+{]")


@dataclass(frozen=True, slots=True)
class SavedStrength:
    """The strength of one adapter.

    rank   of its factors
    scale  what the product of its factors is multiplied with
    """

    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class _Config:
    """PEFT's configuration of the adapters of one component.

    ranks, alphas  by patterns of names of modules: the first that fits counts, before `rank` and `alpha`
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    by_root: bool

    def strength(self, module: str) -> SavedStrength:
        rank = next((found for pattern, found in self.ranks.items() if _fits(pattern, module)), self.rank)
        alpha = next((found for pattern, found in self.alphas.items() if _fits(pattern, module)), self.alpha)
        # PEFT's use_rslora: over the root of the rank
        return SavedStrength(rank, alpha / (math.sqrt(rank) if self.by_root else rank))


@dataclass(frozen=True, slots=True)
class SavedStrengths:
    """The strengths that a file's header tells, by component: "unet", "transformer", "text_encoder_2", or "" for a file
    of one component whose names have no prefix."""

    _configs: Mapping[str, _Config]

    def of(self, name: str) -> SavedStrength | None:
        """The strength of the adapter with the base name `name`; None when the header says nothing about it."""
        for component in sorted(self._configs, key=len, reverse=True):
            prefix = f"{component}." if component else ""
            if name.startswith(prefix):
                return self._configs[component].strength(name.removeprefix(prefix))
        return None


def read_strengths(path: Path, metadata: Mapping[str, str]) -> SavedStrengths:
    """What the header `metadata` of the file at `path` tells of strengths; nothing when it has no such entry.

    Raises CorruptFile, naming the file and the field, when the entry is there and cannot be understood.
    """
    text = metadata.get(METADATA_ENTRY)
    if text is None:
        return SavedStrengths({})
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorruptFile(f"{path}: {METADATA_ENTRY} of the header is damaged: {error}, expected JSON") from error
    if not isinstance(fields, dict):
        raise CorruptFile(f"{path}: {METADATA_ENTRY} of the header is {text[:40]!r}, expected an object")
    components = {c for key in fields for c, _, end in (key.rpartition("."),) if end in ("r", *_ALPHAS)}
    return SavedStrengths(MappingProxyType({c: _Reader(path, fields, c).config() for c in components}))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Fields of one component, made sure of."""

    path: Path
    fields: Mapping[str, Any]
    component: str

    def config(self) -> _Config:
        alpha = next((a for a in _ALPHAS if self._name(a) in self.fields), _ALPHAS[0])
        by_root = self.fields.get(self._name("use_rslora"), False)
        if not isinstance(by_root, bool):
            raise self._damaged("use_rslora", by_root, "true or false")
        return _Config(
            self._rank("r", self.fields.get(self._name("r"))),
            self._alpha(alpha, self.fields.get(self._name(alpha))),
            {key: self._rank("rank_pattern", rank) for key, rank in self._patterns("rank_pattern").items()},
            {key: self._alpha("alpha_pattern", value) for key, value in self._patterns("alpha_pattern").items()},
            by_root,
        )

    def _name(self, field: str) -> str:
        return f"{self.component}.{field}" if self.component else field

    def _patterns(self, field: str) -> Mapping[str, Any]:
        found = self.fields.get(self._name(field)) or {}
        if not isinstance(found, dict):
            raise self._damaged(field, found, "an object")
        for pattern in found:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError):
                raise self._damaged(field, pattern, "regular expressions") from None
            if _REPEATED_GROUP.search(pattern):
                raise self._damaged(field, pattern, "regular expressions without repeated groups")
        return found

    def _rank(self, field: str, found: Any) -> int:
        if type(found) is int and 0 < found < 1 << 31:
            return found
        raise self._damaged(field, found, "a whole number above 0")

    def _alpha(self, field: str, found: Any) -> float:
        if type(found) in (int, float) and abs(found) < 1e30:
            return float(found)
        raise self._damaged(field, found, "a finite number")

    def _damaged(self, field: str, found: Any, expected: str) -> CorruptFile:
        return CorruptFile(
            f"{self.path}: {self._name(field)!r} in {METADATA_ENTRY} of the header is {str(found)[:80]!r}, "
            f"expected {expected}"
        )


def _fits(pattern: str, module: str) -> bool:
    """As PEFT matches: the whole name, or the end of it that begins after a dot."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
