"""Keys and shapes of published diffusion models, from the golden data, and small changes of them."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]

GOLDEN = Path(__file__).resolve().parents[3] / "golden"

#: what is known of each published model
FOUND: dict[str, dict[str, Any]] = json.loads((GOLDEN / "detection.json").read_text())


@functools.cache
def _keys() -> dict[str, dict[str, list[int]]]:
    loaded: dict[str, dict[str, list[int]]] = json.loads(
        gzip.decompress((GOLDEN / "detection_keys.json.gz").read_bytes())
    )
    return loaded


@functools.cache
def _maps() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = json.loads(gzip.decompress((GOLDEN / "diffusers_maps.json.gz").read_bytes()))
    return loaded


def shapes_of(model: str, prefix: str = "") -> Shapes:
    """The tensors of a published model."""
    return {prefix + key: tuple(shape) for key, shape in _keys()[model].items()}


def models_in_diffusers_naming() -> list[str]:
    """The published models whose names in diffusers are known."""
    return list(_maps())


def shapes_in_diffusers_naming(model: str) -> Shapes:
    """The same model, its tensors named and cut as diffusers does."""
    published = shapes_of(model)
    shapes: Shapes = {}
    for key, meant in _maps()[model].items():
        target, part = (meant, None) if isinstance(meant, str) else (meant[0], meant[1])
        if target in published:
            shape = list(published[target])
            if part:
                shape[part[0]] = part[2]
            shapes[key] = tuple(shape)
    return shapes


def changed(model: str, without: str = "", **shapes: tuple[int, ...]) -> Shapes:
    """A published model with other `shapes` (two underscores for a dot), and without keys that begin with `without`."""
    kept = {key: shape for key, shape in shapes_of(model).items() if not (without and key.startswith(without))}
    return {**kept, **{key.replace("__", "."): shape for key, shape in shapes.items()}}
