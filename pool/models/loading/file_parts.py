"""Finds the byte ranges of a component in its files. Torch-free; reads headers only.

Knows where tensors are in a file and which component they belong to; not how they are used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from modelpool.pool.files.formats.byte_ranges import ByteRange, merge_ranges
from modelpool.pool.files.formats.gguf_parts import is_split
from modelpool.pool.files.formats.shard_index import is_index
from modelpool.pool.models.loading.detect_family import detect
from modelpool.pool.models.loading.vision_checkpoint import vision_family
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.values.core.file_part import FilePart


def byte_ranges(part: FilePart) -> Mapping[str, tuple[ByteRange, ...]]:
    """Return the byte ranges of the component, in order, by the path of the file.

    Raises CorruptFile and UnknownArchitecture, or OSError.
    """
    if part.role is None and not is_index(part.path) and not is_split(part.path):
        return {part.path: ((0, os.stat(part.path).st_size),)}
    # the user of the component has allowed its source; headers of pickles run nothing
    header = read_weights_header(part.assembly or part.path, allow_pickle=True)
    family = None if part.role is None else vision_family(header) or detect(header)
    names = header.tensors if family is None or part.role is None else family.shapes_of(part.role, header.shapes)
    by_path: dict[str, list[ByteRange]] = {}
    for name in names:
        entry = header.tensors[name]
        by_path.setdefault(header.path_of(name), []).append((entry.begin, entry.end))
    return {path: merge_ranges(ranges) for path, ranges in by_path.items()}
