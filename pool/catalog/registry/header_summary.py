"""Summarises a file of weights from its header alone. Torch-free.

Determines whether a file can be read and what it is for. `pool.catalog.catalog` knows what running it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.pool.catalog.registry.file_purpose import FileKind, kind_of_keys
from modelpool.pool.catalog.registry.folder_scan import PIPELINE_FILE, FileForm, WeightsFile
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.safetensors_file import Header
from modelpool.pool.files.formats.strict_json import BadJson, read_object
from modelpool.pool.files.formats.weights_file import SAFETENSORS_SUFFIXES
from modelpool.pool.models.loading.detect_family import recognise
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.values.core.errors import MIB, CorruptFile, UnknownArchitecture, UnsafeFile, UserError, counted

#: maximum size of an index; published ones have 1 KiB, and another kind of file under that name is not read into memory
MAX_PIPELINE_BYTES = 1 * MIB

#: titles of models in several files
_FORM_TITLES: Mapping[FileForm, str] = {FileForm.SHARDED: "in {} parts", FileForm.ASSEMBLED: "of {} files"}

#: metadata keys in which training tools write the base model of a LoRA
_BASE_MODEL_KEYS = ("ss_base_model_version", "modelspec.architecture")


@dataclass(frozen=True, slots=True)
class FileSummary:
    """The summary of one file.

    kind       according to its keys; None if they do not determine it
    title      a longer description; may be empty
    tensors    their number; 0 for a diffusers folder
    problem    why it cannot be used; empty for a readable file
    is_unsafe  it was not read, or is not used, because it might be harmful
    """

    kind: FileKind | None
    title: str = ""
    tensors: int = 0
    problem: str = ""
    is_unsafe: bool = False

    def refusal(self, path: Path) -> CorruptFile:
        """Return the error to raise if the file at `path` is requested and has a problem."""
        return (UnsafeFile if self.is_unsafe else CorruptFile)(f"{path}: {self.problem}")


def read_facts(file: WeightsFile, *, allow_pickle: bool = False) -> FileSummary:
    """Read the summary of `file`. Never raises for faults of the file: they are its `problem`, as for a pickle that is
    not allowed."""
    try:
        if file.form is FileForm.FOLDER:
            return _of_folder(file)
        return _from_keys(file, read_weights_header(file.source, allow_pickle=allow_pickle))
    except UnknownArchitecture as problem:
        if file.form is not FileForm.ASSEMBLED:
            return FileSummary(None, problem=str(problem).removeprefix(f"{file.path}: "))
        # separate files that make no model: reported when the model is run
        return FileSummary(FileKind.CHECKPOINT, f"of {counted(len(file.members), 'file')}")
    except CorruptFile as problem:
        is_unsafe = isinstance(problem, UnsafeFile)
        return FileSummary(None, problem=str(problem).removeprefix(f"{file.path}: "), is_unsafe=is_unsafe)


def _from_keys(file: WeightsFile, header: Header) -> FileSummary:
    shapes, metadata = header.shapes, header.metadata
    if not shapes:
        raise CorruptFile(f"{file.path}: the file holds no tensors")
    try:
        title = recognise(shapes)
    except UserError:  # a known model's keys with impossible shapes: reported when the model is run
        title = ""
    kind = kind_of_keys(shapes, title is not None)
    if kind is FileKind.LORA:
        title = next((metadata[key] for key in _BASE_MODEL_KEYS if metadata.get(key)), None)
    words = (title, _FORM_TITLES.get(file.form, "").format(len(header.files)))
    return FileSummary(kind, ", ".join(filter(None, words)), len(shapes))


def _of_folder(file: WeightsFile) -> FileSummary:
    pipeline = _json_object(file.path / PIPELINE_FILE, MAX_PIPELINE_BYTES).get("_class_name")
    if not isinstance(pipeline, str):
        raise CorruptFile(f"{file.path}: {PIPELINE_FILE} names no pipeline, expected a diffusers folder")
    if not _holds_weights(file.members):
        raise CorruptFile(f"{file.path}: a diffusers folder without .safetensors files")
    return FileSummary(FileKind.CHECKPOINT, f"diffusers folder, {pipeline}")


def _holds_weights(members: Collection[Path]) -> bool:
    return any(path.name.lower().endswith(SAFETENSORS_SUFFIXES) for path in members)


def _json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read the JSON object in the small file at `path`. Raises CorruptFile."""
    with open_regular(path, "a small JSON file") as (file, size_bytes):
        if size_bytes > max_bytes:
            raise CorruptFile(f"{path}: more than {max_bytes} bytes, expected a small JSON file")
        text = file.read(max_bytes)
    try:
        return read_object(text)
    except BadJson as error:
        raise CorruptFile(f"{path}: the file {error}") from None
