"""What a file of weights is, from its header alone. Torch-free.

Knows whether a file can be read and what it is for. What running it needs is `pool.catalog.catalog`'s business.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.pool.core.errors import MIB, CorruptFile, UnknownArchitecture, UnsafeFile, UserError
from modelpool.pool.formats.regular_file import open_regular
from modelpool.pool.formats.safetensors_file import Header
from modelpool.pool.formats.strict_json import BadJson, read_object
from modelpool.pool.formats.weights_file import SAFETENSORS_SUFFIXES
from modelpool.pool.loading.detect_family import recognise
from modelpool.pool.loading.weights_header import read_weights_header
from modelpool.pool.registry.folders import PIPELINE_FILE, Form, WeightsFile
from modelpool.pool.registry.kinds import Kind, kind_of_keys

#: published ones have 1 KiB; a file of another sort under such a name is not read into memory
MOST_PIPELINE_BYTES = 1 * MIB

#: how a model lies on the disk that is in several files, for people
_IN_WORDS: Mapping[Form, str] = {Form.SHARDED: "in {} parts", Form.ASSEMBLED: "of {} files"}

#: what training tools write about the model that a LoRA was made for
_BASE_MODEL_KEYS = ("ss_base_model_version", "modelspec.architecture")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What one file is.

    kind       as its keys say; None where they do not
    title      what it is in more words; may be empty
    tensors    how many it has; 0 of a diffusers folder
    problem    why it cannot be used; empty for a file that can be read
    is_unsafe  it was not read, or is not used, because it might do harm
    """

    kind: Kind | None
    title: str = ""
    tensors: int = 0
    problem: str = ""
    is_unsafe: bool = False

    def refusal(self, path: Path) -> CorruptFile:
        """The error to raise where the file at `path` was asked for and has a problem."""
        return (UnsafeFile if self.is_unsafe else CorruptFile)(f"{path}: {self.problem}")


def read_facts(file: WeightsFile, *, allow_pickle: bool = False) -> FileFacts:
    """Read what `file` is. Never raises for what is wrong with it: that is its `problem`, as a pickle is one that is
    not allowed."""
    try:
        if file.form is Form.FOLDER:
            return _of_folder(file)
        return _from_keys(file, read_weights_header(file.source, allow_pickle=allow_pickle))
    except UnknownArchitecture as problem:
        if file.form is not Form.ASSEMBLED:
            return FileFacts(None, problem=str(problem).removeprefix(f"{file.path}: "))
        # separate files that are no model: told when somebody wants to run it
        return FileFacts(Kind.CHECKPOINT, f"of {len(file.members)} files")
    except CorruptFile as problem:
        is_unsafe = isinstance(problem, UnsafeFile)
        return FileFacts(None, problem=str(problem).removeprefix(f"{file.path}: "), is_unsafe=is_unsafe)


def _from_keys(file: WeightsFile, header: Header) -> FileFacts:
    shapes, metadata = header.shapes, header.metadata
    if not shapes:
        raise CorruptFile(f"{file.path}: the file holds no tensors")
    try:
        title = recognise(shapes)
    except UserError:  # the keys of a known model with shapes that it cannot have: told when somebody wants to run it
        title = ""
    kind = kind_of_keys(shapes, title is not None)
    if kind is Kind.LORA:
        title = next((metadata[key] for key in _BASE_MODEL_KEYS if metadata.get(key)), None)
    words = (title, _IN_WORDS.get(file.form, "").format(len(header.files)))
    return FileFacts(kind, ", ".join(filter(None, words)), len(shapes))


def _of_folder(file: WeightsFile) -> FileFacts:
    pipeline = _json_object(file.path / PIPELINE_FILE, MOST_PIPELINE_BYTES).get("_class_name")
    if not isinstance(pipeline, str):
        raise CorruptFile(f"{file.path}: {PIPELINE_FILE} names no pipeline, expected a diffusers folder")
    if not _holds_weights(file.members):
        raise CorruptFile(f"{file.path}: a diffusers folder without .safetensors files")
    return FileFacts(Kind.CHECKPOINT, f"diffusers folder, {pipeline}")


def _holds_weights(members: Collection[Path]) -> bool:
    return any(path.name.lower().endswith(SAFETENSORS_SUFFIXES) for path in members)


def _json_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """The JSON object in the small file at `path`. Raises CorruptFile."""
    with open_regular(path, "a small JSON file") as (file, size_bytes):
        if size_bytes > most_bytes:
            raise CorruptFile(f"{path}: more than {most_bytes} bytes, expected a small JSON file")
        text = file.read(most_bytes)
    try:
        return read_object(text)
    except BadJson as error:
        raise CorruptFile(f"{path}: the file {error}") from None
