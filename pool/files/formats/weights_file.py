"""Reads the header of a weights file of any format. Torch-free; reads no weights.

Selects the reader from the first bytes and, for an index of several files, from the name. Pickles are read only if
allowed: a pickle can contain code.
"""

from __future__ import annotations

import os
from pathlib import Path

from modelpool.pool.files.formats.containment import contained
from modelpool.pool.files.formats.folder_header import read_folder_header
from modelpool.pool.files.formats.gguf_entries import MAGIC as GGUF_MAGIC
from modelpool.pool.files.formats.gguf_entries import has_gguf_start
from modelpool.pool.files.formats.gguf_header import read_gguf_header, read_gguf_part
from modelpool.pool.files.formats.gguf_parts import first_part_of, is_split, parts_of
from modelpool.pool.files.formats.model_description import is_description, read_description
from modelpool.pool.files.formats.model_folder import is_model_folder
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.safetensors_file import Header, read_header
from modelpool.pool.files.formats.shard_index import is_index, read_index, shard_names
from modelpool.pool.files.formats.torch_file import is_torch_file, read_torch_header
from modelpool.pool.values.core.assembly import Assembly, Source
from modelpool.pool.values.core.errors import CorruptFile, UnsafeFile

#: file name endings of the weights files that this project reads
SAFETENSORS_SUFFIXES = (".safetensors", ".sft")
GGUF_SUFFIX = ".gguf"
PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
#: endings of formats that cannot contain code
PLAIN_SUFFIXES = (*SAFETENSORS_SUFFIXES, GGUF_SUFFIX)

#: the option that allows pickles, for messages
PICKLE_FLAG = "allow_pickle"


def read_part(path: str, *, allow_pickle: bool = False) -> Header:
    """As `read_weights_header`, for anything but a model in separate files."""
    if is_index(path):
        return read_index(path, lambda shard: _read_one(shard, allow_pickle))
    if is_model_folder(path):
        return read_folder_header(path, lambda part: read_part(part, allow_pickle=allow_pickle))
    return _read_one(path, allow_pickle)


def read_single_header(path: str, *, allow_pickle: bool = False) -> Header:
    """Read the header of the file at `path` alone: of a split GGUF file this part only, under its own tensor names.

    Raises as `read_weights_header`.
    """
    return read_gguf_part(path) if has_gguf_start(path) else read_part(path, allow_pickle=allow_pickle)


def files_of(source: Source) -> tuple[str, ...]:
    """Return the files of the weights at `source`: the file itself; an index and its shards, by name; all parts of a
    split GGUF file, the first one first; a description, if there is one, and the files that it names, each with its
    shards.

    Raises CorruptFile for a damaged index or description, UnsafeFile for one that leads out of its folder, also for a
    part of a split file.
    """
    if isinstance(source, Assembly):
        return tuple(dict.fromkeys(file for part in source.files for file in files_of(part)))
    place = os.fspath(source)
    if is_description(place):
        return (place, *files_of(read_description(place)))
    folder = os.path.dirname(place)
    if is_split(place):
        first, *others = parts_of(place)
        for part in others:
            contained(Path(part), Path(folder))
        return (first, *others)
    if not is_index(place):
        return (place,)
    return (place, *(os.path.join(folder, name) for name in sorted(set(shard_names(place).values()))))


def loose_weights(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors and GGUF files directly in `folder`, by name, whatever the case of their endings; of a
    split GGUF file only the first part.

    Some may be links that lead out of it: check with `contained` before reading one. Raises CorruptFile when the folder
    cannot be read.
    """
    try:
        names = {name for name in os.listdir(folder) if name.lower().endswith(PLAIN_SUFFIXES)}
    except OSError as error:
        raise CorruptFile(f"{folder}: cannot be read: {error.strerror or error}") from None
    models = sorted(name for name in names if first_part_of(name, names) is None)
    return tuple(folder / name for name in models if os.path.isfile(folder / name))


def _read_one(path: str, allow_pickle: bool) -> Header:
    with open_regular(path) as (file, _):
        start = file.read(16)
    if start.startswith(GGUF_MAGIC):
        return read_gguf_header(path)
    if not is_torch_file(start):
        return read_header(path)
    if not allow_pickle:
        raise UnsafeFile(
            f"{path}: a PyTorch pickle, which can contain code; expected a safetensors file, or {PICKLE_FLAG} for "
            f"files from a trusted source (only the weights are read, no code is run)"
        )
    return read_torch_header(path)
