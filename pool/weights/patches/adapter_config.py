"""Reads the strengths of a file's adapters from the configuration that diffusers writes to its header, or PEFT to the
file next to it.

Knows the header entry `lora_adapter_metadata` (diffusers.loaders.lora_base), `adapter_config.json`, and PEFT's rules
for both; no tensors. Such files contain no alphas; without the configuration the strength of their deltas would be too
large by rank / alpha.
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

from modelpool.pool.values.core.errors import CorruptFile

#: name of the header entry
METADATA_ENTRY = "lora_adapter_metadata"
#: PEFT's file of the configuration, next to `adapter_model.safetensors` or `adapter_model.bin`
CONFIG_FILE, _CONFIGURED = "adapter_config.json", "adapter_model"
#: first part of the names in PEFT's files; patterns are for names without it
_PEFT_PREFIX = "base_model.model."
#: the kinds of adapters with a strength
_SCALED_KINDS = ("LORA", "LOHA", "LOKR")
#: terms of the series that PEFT and OneTrainer rotate with, unless a configuration says otherwise
NEUMANN_TERMS = 5
#: far larger than any configuration
_MOST_CONFIG_BYTES = 1 << 20
#: PEFT's names of alpha in configurations: of LoRA, and of LoHa and LoKr
_ALPHAS = ("lora_alpha", "alpha")
#: repeated groups can take exponential time to match, and no module name needs one
_REPEATED_GROUP = re.compile(r"\)[*+{]")


@dataclass(frozen=True, slots=True)
class SavedStrength:
    """The strength of one adapter.

    rank   of its factors
    scale  factor of the product of its factors
    """

    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class _Config:
    """PEFT's configuration of the adapters of one component.

    ranks, alphas  by patterns of module names: the first match applies, else `rank` and `alpha`
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    use_rslora: bool

    def strength(self, module: str) -> SavedStrength:
        rank = next((found for pattern, found in self.ranks.items() if _matches(pattern, module)), self.rank)
        alpha = next((found for pattern, found in self.alphas.items() if _matches(pattern, module)), self.alpha)
        # PEFT's use_rslora: divided by the square root of the rank
        return SavedStrength(rank, alpha / (math.sqrt(rank) if self.use_rslora else rank))


@dataclass(frozen=True, slots=True)
class SavedStrengths:
    """The strengths in a file's header, by component: "unet", "transformer", "text_encoder_2", or "" for a file of one
    component with names without a prefix.

    terms  of the series of PEFT's OFTs; 0 if their rotations are exact
    """

    _configs: Mapping[str, _Config]
    terms: int = NEUMANN_TERMS

    def of(self, name: str) -> SavedStrength | None:
        """Return the strength of the adapter with the base name `name`; None if the header has none."""
        for component in sorted(self._configs, key=len, reverse=True):
            prefix = f"{component}." if component else ""
            if name.startswith(prefix):
                return self._configs[component].strength(name.removeprefix(prefix).removeprefix(_PEFT_PREFIX))
        return None


def config_beside(path: Path) -> Path | None:
    """Return PEFT's configuration next to the file at `path`; None if there is none, or the file is not PEFT's."""
    config = path.parent / CONFIG_FILE
    return config if path.stem == _CONFIGURED and config.is_file() else None


def read_strengths(path: Path, metadata: Mapping[str, str]) -> SavedStrengths:
    """Read the strengths from the header `metadata` of the file at `path`, or from the configuration next to it; empty
    if it has neither.

    Raises CorruptFile, naming the file and the field, when the configuration is invalid.
    """
    if METADATA_ENTRY in metadata:
        where, what = path, f"{METADATA_ENTRY} of the header"
        fields = _parsed(f"{where}: {what}", metadata[METADATA_ENTRY])
        components = {c for key in fields for c, _, end in (key.rpartition("."),) if end in ("r", *_ALPHAS)}
    elif (config := config_beside(path)) is not None:
        where, what = config, "the configuration"
        if config.stat().st_size > _MOST_CONFIG_BYTES:
            raise CorruptFile(f"{config}: found {config.stat().st_size} bytes, expected a configuration of PEFT")
        fields = _parsed(f"{where}: {what}", config.read_text(encoding="utf-8", errors="replace"))
        if fields.get("peft_type") == "OFT":
            return SavedStrengths({}, _Reader(where, what, fields, "").terms())
        components = {""} if fields.get("peft_type", "LORA") in _SCALED_KINDS else set()
    else:
        return SavedStrengths({})
    return SavedStrengths(MappingProxyType({c: _Reader(where, what, fields, c).config() for c in components}))


def _parsed(where: str, text: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorruptFile(f"{where} is damaged: {error}, expected JSON") from error
    if not isinstance(fields, dict):
        raise CorruptFile(f"{where} is {text[:40]!r}, expected an object")
    return fields


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads and checks the fields of one component."""

    path: Path
    what: str
    fields: Mapping[str, Any]
    component: str

    def config(self) -> _Config:
        alpha = next((a for a in _ALPHAS if self._name(a) in self.fields), _ALPHAS[0])
        use_rslora = self.fields.get(self._name("use_rslora"), False)
        if not isinstance(use_rslora, bool):
            raise self._damaged("use_rslora", use_rslora, "true or false")
        return _Config(
            self._rank("r", self.fields.get(self._name("r"))),
            self._alpha(alpha, self.fields.get(self._name(alpha))),
            {key: self._rank("rank_pattern", rank) for key, rank in self._patterns("rank_pattern").items()},
            {key: self._alpha("alpha_pattern", value) for key, value in self._patterns("alpha_pattern").items()},
            use_rslora,
        )

    def terms(self) -> int:
        """The terms of the series of an OFT; 0 for exact rotations."""
        if self.fields.get("coft"):
            raise self._damaged("coft", self.fields["coft"], "false: the limit of its rotations is not supported")
        if not self.fields.get("use_cayley_neumann", True):
            return 0
        terms = self.fields.get("num_cayley_neumann_terms", NEUMANN_TERMS)
        if type(terms) is int and 1 < terms < 1 << 10:
            return terms
        raise self._damaged("num_cayley_neumann_terms", terms, "a whole number above 1")

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
            f"{self.path}: {self._name(field)!r} in {self.what} is {str(found)[:80]!r}, expected {expected}"
        )


def _matches(pattern: str, module: str) -> bool:
    """Match as PEFT does: the complete name, or its end after a dot."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
