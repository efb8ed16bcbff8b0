"""Reads the files that `torch.save` wrote before 2020: a sequence of pickles, then the storages. Torch-free.

Contents in order: a magic number, a version, a description of the machine, the value, the keys of the storages, and for
each storage its element count and the numbers.
Source: `_legacy_save` in `torch/serialization.py` of torch 2.13.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from modelpool.pool.files.formats.safetensors_file import DTYPE_BITS
from modelpool.pool.files.formats.strict_json import brief
from modelpool.pool.files.formats.torch_objects import BadPickle, DeclaredStorage
from modelpool.pool.files.formats.torch_pickle import read_pickle
from modelpool.pool.files.formats.torch_zip import FileRange
from modelpool.pool.values.core.errors import counted

#: pickle of the magic number, with which every such file begins: protocol 2, an integer of ten bytes, STOP
MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
VERSION = 1001
COUNT_BYTES = 8


def read_legacy(file: BinaryIO, file_bytes: int) -> tuple[Any, dict[str, FileRange]]:
    """Return the value of the file's main pickle, and the place of each storage by its key.

    Raises BadPickle (CodeInPickle among them) for a damaged file.
    """
    file.seek(len(MAGIC))
    version = read_pickle(file, file_bytes - file.tell())
    if version != VERSION:
        raise BadPickle(f"is of version {brief(version)}, expected {VERSION}")
    system = read_pickle(file, file_bytes - file.tell())
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise BadPickle("does not declare its numbers as little-endian, expected that")
    declared: dict[str, DeclaredStorage] = {}
    value = read_pickle(file, file_bytes - file.tell(), declared)
    keys = read_pickle(file, file_bytes - file.tell())
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or set(keys) != set(declared):
        raise BadPickle(f"has storages for {brief(keys)}, expected the {len(declared)} that its pickle refers to")
    return value, _places(file, file_bytes, [declared[key] for key in keys])


def _places(file: BinaryIO, file_bytes: int, storages: list[DeclaredStorage]) -> dict[str, FileRange]:
    places: dict[str, FileRange] = {}
    for storage in storages:
        if storage.key in places:
            raise BadPickle(f"has two storages {brief(storage.key)}")
        count = int.from_bytes(file.read(COUNT_BYTES), "little", signed=True)
        if count != storage.elements:
            raise BadPickle(
                f"has a storage {brief(storage.key)} of {counted(count, 'number')}, "
                f"its pickle promises {storage.elements}"
            )
        place = FileRange(file.tell(), storage.elements * DTYPE_BITS[storage.dtype] // 8)
        if place.begin + place.size_bytes > file_bytes:
            raise BadPickle(
                f"is truncated: the file has {file_bytes} bytes, its storage {brief(storage.key)} ends at byte "
                f"{place.begin + place.size_bytes}"
            )
        file.seek(place.begin + place.size_bytes)
        places[storage.key] = place
    if file.tell() != file_bytes:
        raise BadPickle(f"is too long: {file_bytes - file.tell()} bytes follow its last storage")
    return places
