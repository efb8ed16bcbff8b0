"""Reads the header of weights from a file, an index, a folder or a model in separate files. Torch-free."""

from __future__ import annotations

import os

from modelpool.pool.files.formats.model_description import is_description, read_description
from modelpool.pool.files.formats.safetensors_file import Header
from modelpool.pool.files.formats.weights_file import read_part
from modelpool.pool.models.loading.assembled_checkpoint import assembled_header
from modelpool.pool.values.core.assembly import Assembly, Source


def read_weights_header(source: Source, *, allow_pickle: bool = False) -> Header:
    """Read and check the header of the weights at `source`: a file, the index of several, the first of several GGUF
    files, the description of a model in separate files (or its value), or a diffusers folder.

    `allow_pickle` reads PyTorch's pickles too; nothing in them is ever run. Raises UnsafeFile for a pickle that was not
    allowed or that contains code, and for an index or a description that leads out of its folder; MissingParts for
    separate files that do not make a model; CorruptFile for anything else that is incomplete.
    """
    if not isinstance(source, Assembly):
        place = os.fspath(source)
        if not is_description(place):
            return read_part(place, allow_pickle=allow_pickle)
        source = read_description(place)
    return assembled_header(source, lambda part: read_part(part, allow_pickle=allow_pickle))
