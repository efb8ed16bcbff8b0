"""What a file of weights is, from its header alone. Torch-free.

Knows whether a file can be read and what it is for. What running it needs is `pool.catalog`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pool.checkpoints.detect import recognise
from pool.checkpoints.safetensors_file import read_header
from pool.errors import MIB, CorruptFile, UserError
from pool.registry.folders import INDEX_ENDING, PIPELINE_FILE, Form, WeightsFile
from pool.registry.kinds import Kind, kind_of_keys

#: published ones have 1 KiB and 300 KiB; a file of another sort under such a name is not read into memory
MOST_PIPELINE_BYTES = 1 * MIB
MOST_INDEX_BYTES = 64 * MIB

#: what training tools write about the model that a LoRA was made for
_BASE_MODEL_KEYS = ("ss_base_model_version", "modelspec.architecture")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What one file is.

    kind     as its keys say; None where they do not
    title    what it is in more words; may be empty
    tensors  how many it has; 0 of a diffusers folder
    problem  why it cannot be used; empty for a file that can be read
    """

    kind: Kind | None
    title: str = ""
    tensors: int = 0
    problem: str = ""


def read_facts(file: WeightsFile) -> FileFacts:
    """Read what `file` is. Never raises for what is wrong with it: that is its `problem`."""
    try:
        match file.form:
            case Form.FILE:
                header = read_header(file.path)
                return _from_keys(file, header.shapes, header.metadata)
            case Form.SHARDED:
                return _of_index(file)
            case Form.FOLDER:
                return _of_folder(file)
    except CorruptFile as problem:
        return FileFacts(None, problem=str(problem).removeprefix(f"{file.path}: "))


def _from_keys(file: WeightsFile, shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> FileFacts:
    if not shapes:
        raise CorruptFile(f"{file.path}: the file holds no tensors")
    try:
        title = recognise(shapes)
    except UserError:  # the keys of a known model with shapes that it cannot have: told when somebody wants to run it
        title = ""
    kind = kind_of_keys(shapes, title is not None)
    if kind is Kind.LORA:
        title = next((metadata[key] for key in _BASE_MODEL_KEYS if metadata.get(key)), None)
    return FileFacts(kind, title or "", len(shapes))


def _of_index(file: WeightsFile) -> FileFacts:
    """Of a file in parts: its index names the keys, not their shapes."""
    weight_map = _json_object(file.path, MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(part, str) for part in weight_map.values()):
        raise CorruptFile(f"{file.path}: no weight_map, expected the file of each tensor")
    there = {member.name for member in file.members}
    missing = sorted(set(weight_map.values()) - there)
    if missing:
        raise CorruptFile(f"{file.path}: {len(missing)} of its parts are missing, the first is {missing[0]}")
    kind = kind_of_keys(weight_map, is_diffusion_model=False)
    parts = len(file.members) - 1
    return FileFacts(kind, f"in {parts} parts", len(weight_map))


def _of_folder(file: WeightsFile) -> FileFacts:
    pipeline = _json_object(file.path / PIPELINE_FILE, MOST_PIPELINE_BYTES).get("_class_name")
    if not isinstance(pipeline, str):
        raise CorruptFile(f"{file.path}: {PIPELINE_FILE} names no pipeline, expected a diffusers folder")
    if not _holds_weights(file.members):
        raise CorruptFile(f"{file.path}: a diffusers folder without .safetensors files")
    return FileFacts(Kind.CHECKPOINT, f"diffusers folder, {pipeline}")


def _holds_weights(members: Collection[Path]) -> bool:
    return any(path.suffix == ".safetensors" and not path.name.endswith(INDEX_ENDING) for path in members)


def _json_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """The JSON object in the small file at `path`. Raises CorruptFile."""
    try:
        with path.open("rb") as file:
            text = file.read(most_bytes + 1)
        if len(text) > most_bytes:
            raise CorruptFile(f"{path}: more than {most_bytes} bytes, expected a small JSON file")
        found = json.loads(text)
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CorruptFile):
            raise
        raise CorruptFile(f"{path}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptFile(f"{path}: a JSON {type(found).__name__}, expected an object")
    return found
