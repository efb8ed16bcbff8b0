"""The one door to files of weights, whatever their format. Torch-free; reads no weights.

Knows which reader a file needs, from its first bytes and, for an index of several files, from its name. Pickles are
read only where somebody allowed them: it is the format in which a file can carry a program.
"""

from __future__ import annotations

import os
from pathlib import Path

from pool.checkpoints.files.regular_file import open_regular
from pool.checkpoints.files.shard_index import is_index, read_index, shard_names
from pool.checkpoints.files.torch_file import is_torch_file, read_torch_header
from pool.checkpoints.safetensors_file import Header, read_header
from pool.errors import CorruptFile, UnsafeFile

#: how files of weights end that this project reads
SAFETENSORS_SUFFIXES = (".safetensors", ".sft")
PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")

#: how a person allows pickles, for messages
PICKLE_FLAG = "allow_pickle"


def read_weights_header(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> Header:
    """Read and check what the file, or the index of several files, at `path` says of its tensors.

    `allow_pickle` reads PyTorch's pickles too; nothing in them is run even so. Raises UnsafeFile for a pickle that was
    not allowed or that has code in it, and for an index that leads out of its folder; CorruptFile for anything else
    that is not whole.
    """
    place = os.fspath(path)
    if is_index(place):
        return read_index(place, lambda shard: _read_one(shard, allow_pickle))
    return _read_one(place, allow_pickle)


def files_of(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The files that the weights at `path` are in: the file itself, or an index and its shards, by name.

    Raises CorruptFile for a damaged index, UnsafeFile for one that leads out of its folder.
    """
    place = os.fspath(path)
    if not is_index(place):
        return (place,)
    folder = os.path.dirname(place)
    return (place, *(os.path.join(folder, name) for name in sorted(set(shard_names(place).values()))))


def loose_weights(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that lie in `folder` itself, by name, however their endings are written.

    Some may be links that lead out of it: who reads one asks `contained` first. Raises CorruptFile when the folder
    cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith(SAFETENSORS_SUFFIXES))
    except OSError as error:
        raise CorruptFile(f"{folder}: cannot be read: {error.strerror or error}") from None
    return tuple(folder / name for name in names if os.path.isfile(folder / name))


def _read_one(path: str, allow_pickle: bool) -> Header:
    with open_regular(path) as (file, _):
        pickled = is_torch_file(file.read(16))
    if not pickled:
        return read_header(path)
    if not allow_pickle:
        raise UnsafeFile(
            f"{path}: a PyTorch pickle, which can carry a program; expected a safetensors file, or {PICKLE_FLAG} to be "
            f"set for files from a source that you trust (only the weights are read, nothing in it is run)"
        )
    return read_torch_header(path)
