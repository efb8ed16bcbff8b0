"""A model made of separate files: which they are, and the small file in which a person says so. Torch-free.

Knows the description and where its files may lie; not what is in them (`pool.loading.assembled_checkpoint`).

A description is JSON, called `NAME.model.json`:

    {"format": 1, "diffusion_model": "unet/paint.safetensors", "vae": "vae/soft.safetensors",
     "text_encoders": ["clip/clip_l.safetensors", "clip/clip_g.safetensors"]}

Paths are relative to its folder and stay in it, as the parts of an index of shards do: a downloaded description must
not reach for other files of the machine. `checkpoint` is a whole checkpoint, whose components are used where no other
file takes their place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from modelpool.pool.core.assembly import Assembly
from modelpool.pool.core.errors import CorruptFile, UnsafeFile
from modelpool.pool.formats.containment import contained
from modelpool.pool.formats.regular_file import read_text_file
from modelpool.pool.formats.strict_json import BadJson, brief, read_object

ENDING = ".model.json"
FORMAT = 1

#: what a description says beside its format
KEYS = ("checkpoint", "diffusion_model", "low_noise", "vae", "vision_encoder", "text_encoders")


def is_description(path: str | os.PathLike[str]) -> bool:
    """Whether the name of `path` is that of a model's description."""
    name = os.path.basename(os.fspath(path)).lower()
    return name.endswith(ENDING) and name != ENDING


def read_description(path: str | os.PathLike[str]) -> Assembly:
    """The model that the description at `path` tells of. The files that it names need not be there.

    Raises CorruptFile for what is no description, UnsafeFile for a file that is not in its folder.
    """
    place = os.fspath(path)
    try:
        said = read_object(read_text_file(place, "the description of a model"))
    except BadJson as error:
        raise CorruptFile(f"{place}: the description {error}") from None
    if said.get("format") != FORMAT or isinstance(said["format"], bool):
        raise CorruptFile(f"{place}: format is {brief(said.get('format'))}, expected {FORMAT}")
    unknown = next((key for key in said if key not in ("format", *KEYS)), None)
    if unknown is not None:
        raise CorruptFile(f"{place}: has a key {brief(unknown)}, expected only format, {', '.join(KEYS)}")
    one_each = {key: "".join(_paths(place, key, [said[key]])) for key in KEYS[:-1] if key in said}
    encoders = said.get("text_encoders", [])
    if not isinstance(encoders, list):
        raise CorruptFile(f"{place}: text_encoders is {brief(encoders)}, expected a list of paths")
    return Assembly(place, **one_each, text_encoders=tuple(_paths(place, "text_encoders", encoders)))


def described(assembly: Assembly, folder: Path) -> Mapping[str, Any]:
    """What the description of `assembly` says when it lies in `folder`.

    Raises UnsafeFile naming the file that does not lie there, or leads out of it.
    """
    said: dict[str, Any] = {"format": FORMAT}
    for key, file in assembly.parts:
        place = Path(os.path.abspath(file))
        if not place.is_relative_to(os.path.abspath(folder)):
            raise UnsafeFile(f"{file}: does not lie in {folder}, expected all files of a described model there")
        contained(place, folder)
        relative = place.relative_to(os.path.abspath(folder)).as_posix()
        if key == "text_encoders":
            said.setdefault(key, []).append(relative)
        else:
            said[key] = relative
    return said


def _paths(place: str, key: str, names: list[Any]) -> Iterator[str]:
    """The files called `names` in the folder of the description at `place`, or in folders below."""
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
