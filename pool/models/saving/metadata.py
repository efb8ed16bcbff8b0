"""Metadata of a saved file: its source and what was merged, for programs and users. Torch-free.

`modelspec.merged_from` is the key of the ModelSpec standard for titles; `modelpool.merged` has the exact values, as
JSON, and `modelpool.source` the file that was changed. A file that was merged before keeps its history. Hashes of
changed contents are removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MERGED_KEY = "modelpool.merged"
SOURCE_KEY = "modelpool.source"
MERGED_FROM_KEY = "modelspec.merged_from"
#: hashes of the original tensors: ModelSpec's, and the two of kohya's trainers
_CONTENT_HASHES = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")


@dataclass(frozen=True, slots=True)
class Merged:
    """A LoRA or patch set that was merged into a model.

    name      of the LoRA; of the component for patches that come from no file
    sha256    of the LoRA's file; of patches from no file, their digest
    strength  its strength
    noise     "high" or "low" if it was merged into only one of two experts
    """

    name: str
    sha256: str
    strength: float
    noise: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it as stored in files."""
        return {key: value for key, value in asdict(self).items() if value or key != "noise"}


@dataclass(frozen=True, slots=True)
class Source:
    """The file that something was merged into."""

    name: str
    sha256: str | None


def with_facts(
    kept: Mapping[str, str],
    source: Source,
    merged: Sequence[Merged],
    is_converted: bool,
    overrides: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the metadata of a file made from `source`, which has metadata `kept`; `overrides` replace all others.

    is_converted  weights have other values or dtypes than in the source, with nothing merged
    """
    facts = dict(kept)
    if merged or is_converted:
        for key in _CONTENT_HASHES:
            facts.pop(key, None)
    if merged:
        earlier = _listed(facts.get(MERGED_KEY))
        facts[MERGED_KEY] = json.dumps([*earlier, *(each.as_json() for each in merged)])
        if not earlier or SOURCE_KEY not in facts:  # the first of a series of merges
            facts[SOURCE_KEY] = json.dumps(asdict(source))
        titles = [facts[MERGED_FROM_KEY]] if facts.get(MERGED_FROM_KEY) else [source.name]
        facts[MERGED_FROM_KEY] = ", ".join([*titles, *(each.name for each in merged)])
    facts.update(overrides or {})
    return facts


def _listed(text: str | None) -> list[Any]:
    """Return what was merged before; empty if the entry is invalid."""
    try:
        found = json.loads(text or "[]")
    except (json.JSONDecodeError, RecursionError):
        return []
    return found if isinstance(found, list) else []
