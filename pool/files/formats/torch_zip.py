"""Reads the zip archives that `torch.save` writes since 2020: places of the pickle and of each storage.

Torch-free. Knows the archive; not the contents of the pickle. Accepts only archives as torch writes them: members
stored uncompressed, so that no member is larger than the file, without duplicates or overlaps.
Source: `caffe2/serialize/inline_container.h` of torch; PKWARE's APPNOTE.TXT, 4.3 and 4.4.
"""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from typing import Any, BinaryIO

from modelpool.pool.files.formats.strict_json import brief
from modelpool.pool.files.formats.torch_objects import BadPickle
from modelpool.pool.files.formats.torch_pickle import MAX_PICKLE_BYTES, read_pickle
from modelpool.pool.values.core.errors import counted

MAGIC = b"PK\x03\x04"
#: more tensors than `read_pickle` accepts
MAX_MEMBERS = 100_000

_END = struct.Struct("<4s4H2LH")
_END_MAGIC = b"PK\x05\x06"
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_MAGIC = b"PK\x06\x06"
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_MAGIC = b"PK\x06\x07"
_LOCAL = struct.Struct("<4s5H3L2H")
#: longest comment after the end record
_MAX_COMMENT_BYTES = (1 << 16) - 1
#: largest directory entry: name, extra fields and comment of a member; torch pads members with extra fields
_MAX_MEMBER_BYTES = 46 + (1 << 10)


@dataclass(frozen=True, slots=True)
class FileRange:
    """The byte range of a member or a storage in the file."""

    begin: int
    size_bytes: int


def read_zip(file: BinaryIO, file_bytes: int) -> tuple[Any, dict[str, FileRange]]:
    """Return the value of the archive's pickle, and the byte range of each storage by its key.

    Raises BadPickle (CodeInPickle among them) for a damaged archive.
    """
    _check_directory_size(file, file_bytes)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, EOFError, OverflowError) as error:
        raise BadPickle(f"is a damaged zip archive: {brief(str(error))}") from None
    places = _places(file, file_bytes, members)
    pickles = [name for name in places if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise BadPickle(
            f"is a zip archive with {counted(len(pickles), 'member')} "
            f"*/data.pkl, expected the one that torch.save writes"
        )
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}constants.pkl" in places or any(name.startswith(f"{folder}code/") for name in places):
        raise BadPickle("is a TorchScript program, which is code, expected weights")
    order = places.get(f"{folder}byteorder")
    if order is not None and _read(file, order, 16) != b"little":
        raise BadPickle("has big-endian numbers, expected little-endian ones")
    pickle = places[pickles[0]]
    if pickle.size_bytes > MAX_PICKLE_BYTES:
        raise BadPickle(f"has a pickle of {pickle.size_bytes} bytes, expected at most {MAX_PICKLE_BYTES}")
    file.seek(pickle.begin)
    data = f"{folder}data/"
    storages = {name.removeprefix(data): place for name, place in places.items() if name.startswith(data)}
    return read_pickle(file, pickle.size_bytes), storages


def _check_directory_size(file: BinaryIO, file_bytes: int) -> None:
    """Raise BadPickle if the directory is too large: it can be as large as the file, and `zipfile` reads all of it."""
    tail_bytes = min(file_bytes, _MAX_COMMENT_BYTES + _END.size)
    tail = _read(file, FileRange(file_bytes - tail_bytes, tail_bytes), tail_bytes)
    at = tail.rfind(_END_MAGIC)
    if at < 0 or len(tail) - at < _END.size:
        raise BadPickle("is a zip archive without its end: truncated?")
    members, directory_bytes = _END.unpack_from(tail, at)[4:6]
    locator_at = file_bytes - tail_bytes + at - _LOCATOR.size
    locator = _read(file, FileRange(locator_at, _LOCATOR.size), _LOCATOR.size) if locator_at >= 0 else b""
    if locator.startswith(_LOCATOR_MAGIC):
        # Python reads the record before the locator, others the one that it points to: they must be the same
        end64_at = locator_at - _END64.size
        end64 = _read(file, FileRange(end64_at, _END64.size), _END64.size) if end64_at >= 0 else b""
        if not end64.startswith(_END64_MAGIC) or _LOCATOR.unpack(locator)[2] != end64_at:
            raise BadPickle("is a zip archive whose zip64 end record is not directly before its locator")
        members, directory_bytes = _END64.unpack(end64)[7:9]
    if members > MAX_MEMBERS or directory_bytes > MAX_MEMBERS * _MAX_MEMBER_BYTES:
        raise BadPickle(
            f"is a zip archive of {members} members in a directory of {directory_bytes} bytes, expected at most "
            f"{MAX_MEMBERS} members"
        )


def _places(file: BinaryIO, file_bytes: int, members: list[zipfile.ZipInfo]) -> dict[str, FileRange]:
    """Return the byte range of each member. Raises BadPickle unless all are stored, complete and disjoint."""
    places: dict[str, FileRange] = {}
    end = 0
    for member in sorted(members, key=lambda m: m.header_offset):
        name = brief(member.filename)
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise BadPickle(
                f"has a compressed member {name} that declares {member.file_size} bytes in {member.compress_size}, "
                f"expected uncompressed members"
            )
        if member.flag_bits & 1:
            raise BadPickle(f"has an encrypted member {name}")
        if member.filename in places:
            raise BadPickle(f"has two members {name}")
        if not end <= member.header_offset < file_bytes:
            raise BadPickle(f"has a member {name} that lies over another or outside of the file")
        local = _read(file, FileRange(member.header_offset, _LOCAL.size), _LOCAL.size)
        if len(local) < _LOCAL.size or not local.startswith(MAGIC):
            raise BadPickle(f"has a member {name} that is not where the directory says")
        name_bytes, extra_bytes = _LOCAL.unpack(local)[9:11]
        begin = member.header_offset + _LOCAL.size + name_bytes + extra_bytes
        end = begin + member.file_size
        if end > file_bytes:
            raise BadPickle(
                f"has a member {name} of {member.file_size} bytes that ends at byte {end}, the file at {file_bytes}"
            )
        places[member.filename] = FileRange(begin, member.file_size)
    return places


def _read(file: BinaryIO, place: FileRange, at_most_bytes: int) -> bytes:
    file.seek(place.begin)
    return file.read(min(place.size_bytes, at_most_bytes))
