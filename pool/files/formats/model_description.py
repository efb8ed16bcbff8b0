"""Reads and writes model descriptions: small JSON files that list the separate files of a model. Torch-free.

Knows the description and where its files may be; not their contents (`pool.models.loading.assembled_checkpoint`).

A description is JSON, named `NAME.model.json`:

    {"format": 1, "diffusion_model": "unet/paint.safetensors", "vae": "vae/soft.safetensors",
     "text_encoders": ["clip/clip_l.safetensors", "clip/clip_g.safetensors"]}

Paths are relative to its folder and must stay in it, as the files of a shard index must: a downloaded description must
not reach other files of the machine. `checkpoint` is a complete checkpoint: its components are used where no other
file replaces them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from modelpool.pool.files.formats.containment import contained
from modelpool.pool.files.formats.regular_file import read_text_file
from modelpool.pool.files.formats.strict_json import BadJson, brief, read_object
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import CorruptFile, UnsafeFile

ENDING = ".model.json"
FORMAT = 1

#: keys of a description besides its format
KEYS = ("checkpoint", "diffusion_model", "low_noise", "unconditional", "vae", "vision_encoder", "text_encoders")


def is_description(path: str | os.PathLike[str]) -> bool:
    """Whether `path` has the file name of a model description."""
    name = os.path.basename(os.fspath(path)).lower()
    return name.endswith(ENDING) and name != ENDING


def read_description(path: str | os.PathLike[str]) -> Assembly:
    """Read the description at `path`. The files that it names need not exist.

    Raises CorruptFile for an invalid description, UnsafeFile for a file outside its folder.
    """
    place = os.fspath(path)
    try:
        description = read_object(read_text_file(place, "the description of a model"))
    except BadJson as error:
        raise CorruptFile(f"{place}: the description {error}") from None
    if description.get("format") != FORMAT or isinstance(description["format"], bool):
        raise CorruptFile(f"{place}: format is {brief(description.get('format'))}, expected {FORMAT}")
    unknown = next((key for key in description if key not in ("format", *KEYS)), None)
    if unknown is not None:
        raise CorruptFile(f"{place}: has a key {brief(unknown)}, expected only format, {', '.join(KEYS)}")
    single_files = {key: "".join(_paths(place, key, [description[key]])) for key in KEYS[:-1] if key in description}
    encoders = description.get("text_encoders", [])
    if not isinstance(encoders, list):
        raise CorruptFile(f"{place}: text_encoders is {brief(encoders)}, expected a list of paths")
    return Assembly(place, **single_files, text_encoders=tuple(_paths(place, "text_encoders", encoders)))


def description_of(assembly: Assembly, folder: Path) -> Mapping[str, Any]:
    """Return the description of `assembly` for a file in `folder`.

    Raises UnsafeFile naming a file that is not in `folder`, or leads out of it.
    """
    description: dict[str, Any] = {"format": FORMAT}
    for key, file in assembly.parts:
        place = Path(os.path.abspath(file))
        if not place.is_relative_to(os.path.abspath(folder)):
            raise UnsafeFile(f"{file}: is not in {folder}, expected all files of a described model there")
        contained(place, folder)
        relative = place.relative_to(os.path.abspath(folder)).as_posix()
        if key == "text_encoders":
            description.setdefault(key, []).append(relative)
        else:
            description[key] = relative
    return description


def _paths(place: str, key: str, names: list[Any]) -> Iterator[str]:
    """Return the files `names` in the folder of the description at `place`, or in folders below."""
    folder = os.path.dirname(os.path.abspath(place))
    for name in names:
        if not isinstance(name, str) or not name or "\0" in name:
            raise CorruptFile(f"{place}: {key} is {brief(name)}, expected the path of a file")
        windows, plain = PureWindowsPath(name), PurePosixPath(name)
        if windows.drive or windows.root or plain.is_absolute() or ".." in (*windows.parts, *plain.parts):
            raise UnsafeFile(f"{place}: {key} names {brief(name)}, expected a path below the folder of the description")
        path = Path(folder, *plain.parts)
        contained(path, Path(folder))
        yield str(path)
