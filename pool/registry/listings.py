"""The models and LoRAs that can be named, each with what it is or what is wrong with it. Torch-free; reads headers."""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.core.errors import UserError
from modelpool.pool.loading.describe import describe, describe_lora
from modelpool.pool.registry.folders import Form, WeightsFile


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One checkpoint in the folders, `file_bytes` in all of its files. `problem` says why it cannot be used; width and
    height are then 0."""

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


def list_model(name: str, file: WeightsFile, allow_pickle: bool) -> ModelListing:
    """What the checkpoint in `file` is; never raises for what is wrong with it."""
    path, size_bytes = str(file.path), file.fingerprint.size_bytes
    try:
        info = describe(file.source, allow_pickle=allow_pickle)
    except UserError as problem:
        return ModelListing(name, path, "", size_bytes, problem=str(problem))
    return ModelListing(name, path, info.title, size_bytes, info.width, info.height)


def check_runs(file: WeightsFile, allow_pickle: bool) -> None:
    """Raise the UserError that says why not, for a model in several files that this version does not run: it takes long
    to read all of them."""
    if file.form in (Form.FOLDER, Form.ASSEMBLED):
        describe(file.source, allow_pickle=allow_pickle)


def list_lora(name: str, file: WeightsFile, allow_pickle: bool) -> LoraListing:
    """What the LoRA in `file` is, in the same way."""
    path, size_bytes = str(file.path), file.fingerprint.size_bytes
    try:
        info = describe_lora(file.path, allow_pickle=allow_pickle)
    except UserError as problem:
        return LoraListing(name, path, size_bytes, problem=str(problem))
    return LoraListing(name, path, size_bytes, sum(info.modules.values()), tuple(sorted(info.ranks)))
