"""The models and LoRAs that can be named, each with what it is or what is wrong with it. Torch-free; reads headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pool.checkpoints.describe import describe, describe_lora
from pool.errors import UserError


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One checkpoint in the folders. `problem` says why it cannot be used; the sizes are then 0."""

    name: str
    path: str
    family: str
    file_bytes: int
    width: int = 0
    height: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LoraListing:
    """One LoRA file in the folders."""

    name: str
    path: str
    file_bytes: int
    modules: int = 0
    ranks: tuple[int, ...] = ()
    problem: str = ""


def list_model(name: str, path: Path) -> ModelListing:
    """What the checkpoint at `path` is; never raises for what is wrong with it."""
    try:
        info = describe(path)
    except UserError as problem:
        return ModelListing(name, str(path), "", path.stat().st_size, problem=str(problem))
    return ModelListing(name, str(path), info.title, path.stat().st_size, info.width, info.height)


def list_lora(name: str, path: Path) -> LoraListing:
    """What the LoRA at `path` is, in the same way."""
    try:
        info = describe_lora(path)
    except UserError as problem:
        return LoraListing(name, str(path), path.stat().st_size, problem=str(problem))
    return LoraListing(name, str(path), path.stat().st_size, sum(info.modules.values()), tuple(sorted(info.ranks)))
