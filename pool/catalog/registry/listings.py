"""The models and LoRAs of the registry, each with its facts or its problem. Torch-free; reads headers."""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.catalog.registry.folder_scan import FileForm, WeightsFile
from modelpool.pool.models.loading.describe import describe, describe_lora
from modelpool.pool.models.loading.trigger_words import trigger_words
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.node_listing import NodeListing


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One checkpoint in the folders; `file_bytes` is the total of its files. `problem` is why it cannot be used; width
    and height are then 0."""

    name: str
    path: str
    family: str
    file_bytes: int
    width: int = 0
    height: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LoraListing:
    """One LoRA file in the folders. `trigger_words` come from its metadata (`pool.models.loading.trigger_words`)."""

    name: str
    path: str
    file_bytes: int
    modules: int = 0
    ranks: tuple[int, ...] = ()
    problem: str = ""
    trigger_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileNames:
    """The names of the usable files in the folders that requests name besides models and LoRAs, sorted."""

    controlnets: tuple[str, ...] = ()
    upscalers: tuple[str, ...] = ()
    image_prompts: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    #: the nodes of users that the operator permits
    nodes: tuple[NodeListing, ...] = ()
    gligens: tuple[str, ...] = ()

    @property
    def all(self) -> frozenset[str]:
        """All of them."""
        found = (self.controlnets, self.upscalers, self.image_prompts, self.embeddings, self.gligens)
        return frozenset(name for names in found for name in names)


def list_model(name: str, file: WeightsFile, allow_pickle: bool) -> ModelListing:
    """Return the facts of the checkpoint in `file`; never raises for faults of the file."""
    path, size_bytes = str(file.path), file.fingerprint.size_bytes
    try:
        info = describe(file.source, allow_pickle=allow_pickle)
    except UserError as problem:
        return ModelListing(name, path, "", size_bytes, problem=str(problem))
    return ModelListing(name, path, info.title, size_bytes, info.width, info.height)


def check_runs(file: WeightsFile, allow_pickle: bool) -> None:
    """Raise a UserError with the reason for a model in several files that this version does not run, before all of them
    are read, which takes long."""
    if file.form in (FileForm.FOLDER, FileForm.ASSEMBLED):
        describe(file.source, allow_pickle=allow_pickle)


def list_lora(name: str, file: WeightsFile, allow_pickle: bool) -> LoraListing:
    """Return the facts of the LoRA in `file`; never raises for faults of the file."""
    path, size_bytes = str(file.path), file.fingerprint.size_bytes
    try:
        info = describe_lora(file.path, allow_pickle=allow_pickle)
    except UserError as problem:
        return LoraListing(name, path, size_bytes, problem=str(problem))
    ranks, words = tuple(sorted(info.ranks)), trigger_words(info.metadata)
    return LoraListing(name, path, size_bytes, sum(info.modules.values()), ranks, trigger_words=words)
