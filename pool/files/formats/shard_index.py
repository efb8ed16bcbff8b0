"""Reads a checkpoint in several files as one `Header`, through the index that names them. Torch-free.

Knows the `*.safetensors.index.json` that diffusers and transformers write next to their shards. Index and shards must
agree: every tensor in the file that the index names, none in two files, none missing from the index.
Source: `save_pretrained` in diffusers 0.42 and transformers 5.23.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelpool.pool.files.formats.containment import contained, plain_name
from modelpool.pool.files.formats.regular_file import read_text_file
from modelpool.pool.files.formats.safetensors_file import Header
from modelpool.pool.files.formats.strict_json import BadJson, brief, read_object
from modelpool.pool.values.core.errors import CorruptFile, counted

MAX_SHARDS = 4096

#: a variant ("fp16") is before or after "index": both libraries have written both
_INDEX = re.compile(r"\.(safetensors|bin)(\.\w+)?\.index(\.\w+)?\.json$")


def is_index(path: str | os.PathLike[str]) -> bool:
    """Whether `path` has the file name of a shard index."""
    return _INDEX.search(os.path.basename(os.fspath(path))) is not None


def shard_names(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the file of each tensor, from the index at `path`.

    Raises CorruptFile for a damaged index, UnsafeFile for a file that is not in the folder of the index.
    """
    place = os.fspath(path)
    try:
        index = read_object(read_text_file(place, "an index of shards"))
    except BadJson as error:
        raise CorruptFile(f"{place}: the index {error}") from None
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CorruptFile(f"{place}: weight_map is {brief(files)}, expected the file of each tensor")
    names = {name: plain_name(name, place) for name in _distinct(place, files)}
    for name in names:
        contained(Path(place).parent / name, Path(place).parent)
    return dict(files)


def read_index(path: str | os.PathLike[str], read_shard: Callable[[str], Header]) -> Header:
    """Read all shards of the index at `path` as one header; `read_shard` reads one.

    The metadata are the pairs that all shards have in common. Raises CorruptFile, naming index, shard and tensor, when
    a shard is missing or disagrees with the index, and as `shard_names` does.
    """
    place = os.fspath(path)
    files = shard_names(place)
    headers = {name: read_shard(os.path.join(os.path.dirname(place), name)) for name in sorted(set(files.values()))}
    _check_agree(place, files, headers)
    tensors = {
        entry.name: replace(entry, path=header.path) for header in headers.values() for entry in header.tensors.values()
    }
    shards = {header.path: header.file_bytes for header in headers.values()}
    return Header(place, sum(shards.values()), tensors, _common([h.metadata for h in headers.values()]), shards)


def _distinct(place: str, files: Mapping[str, Any]) -> list[Any]:
    """Return the distinct file names of an index, sorted."""
    not_text = next((name for name in files.values() if not isinstance(name, str)), None)
    if not_text is not None:
        raise CorruptFile(f"{place}: weight_map names the file {brief(not_text)}, expected a text")
    names = sorted(set(files.values()))
    if len(names) > MAX_SHARDS:
        raise CorruptFile(f"{place}: names {counted(len(names), 'file')}, expected at most {MAX_SHARDS}")
    return names


def _check_agree(place: str, files: Mapping[str, str], headers: Mapping[str, Header]) -> None:
    found: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name in found:
                raise CorruptFile(f"{place}: tensor {brief(name)} is in {found[name]} and in {file}, expected it once")
            found[name] = file
    for name, file in files.items():
        if found.get(name) != file:
            there = f"it is in {found[name]}" if name in found else "it is in none of them"
            raise CorruptFile(f"{place}: tensor {brief(name)} is not in {file}, where the index has it: {there}")
    unknown = next((name for name in found if name not in files), None)
    if unknown is not None:
        raise CorruptFile(f"{place}: tensor {brief(unknown)} of {found[unknown]} is not in the index")


def _common(metadata: list[Mapping[str, str]]) -> dict[str, str]:
    first = metadata[0]
    return {key: text for key, text in first.items() if all(other.get(key) == text for other in metadata)}
