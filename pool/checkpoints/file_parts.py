"""Which bytes of a file a component is made of. Torch-free; reads headers only.

Knows where tensors lie in a file and which component they belong to; not what is done with them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from pool.checkpoints.detect import detect
from pool.checkpoints.safetensors_file import read_header
from pool.spec import Role

#: first byte, and the one after the last
ByteRange: TypeAlias = tuple[int, int]

#: ranges with less than this between them are read as one: a disk gives a page more as fast as it skips it
LEAST_GAP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FilePart:
    """The file that a component is in. `role` is None where the component is the whole file, as a LoRA is."""

    path: str
    role: Role | None = None


def byte_ranges(part: FilePart) -> tuple[ByteRange, ...]:
    """Where the component's bytes are, in order. Raises CorruptFile and UnknownArchitecture, or OSError."""
    if part.role is None:
        return ((0, os.stat(part.path).st_size),)
    header = read_header(part.path)
    names = detect(header).shapes_of(part.role, header.shapes)
    return _joined((header.tensors[name].begin, header.tensors[name].end) for name in names)


def _joined(ranges: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    joined: list[ByteRange] = []
    for begin, end in sorted(ranges):
        if joined and begin - joined[-1][1] < LEAST_GAP_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)
