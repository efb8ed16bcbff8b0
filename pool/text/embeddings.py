"""Textual inversion: vectors that were trained to stand for a name in a prompt, `embedding:NAME`, out of their files.

Files have the vectors of one encoder under a name that says nothing, or those of several under the encoders' names, as
SDXL's do. Knows no prompt: `pool.text.chunks` finds the names, `pool.text.encode` puts the vectors in their places.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from modelpool.pool.core.errors import AdapterMismatch, CorruptFile
from modelpool.pool.mapping.mapped_file import MappedFile

#: names of encoders that files have vectors under
ENCODERS = ("clip_l", "clip_g", "clip_h")
#: a prompt has no room for more; published files have up to some tens
MOST_ROWS = 1024
#: whose vectors they are, where a file does not say
ANY = ""


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """What a name stands for.

    name     as prompts have it
    vectors  rows by encoder; `ANY` where the file does not say whose they are
    """

    name: str
    vectors: Mapping[str, Tensor]

    def for_encoder(self, encoder: str, width: int) -> Tensor:
        """The rows for the encoder `encoder`, whose tokens are `width` numbers wide.

        Raises AdapterMismatch when it has none, or others.
        """
        rows = self.vectors.get(encoder, self.vectors.get(ANY))
        if rows is None:
            found = ", ".join(sorted(self.vectors))
            raise AdapterMismatch(f"embedding {self.name!r}: found vectors for {found}, expected some for {encoder}")
        if rows.shape[1] != width:
            raise AdapterMismatch(
                f"embedding {self.name!r}: found vectors of {rows.shape[1]} numbers, expected {width} for {encoder}: "
                "it was trained for another kind of model"
            )
        return rows


def read_embedding(path: str | os.PathLike[str], name: str = "", *, allow_pickle: bool = False) -> Embedding:
    """The embedding in the file at `path`, called `name`, or as the file is where none is given.

    Raises CorruptFile and UnsafeFile as `MappedFile.open` does, and CorruptFile for a file that is no embedding.
    """
    tensors = MappedFile.open(path, allow_pickle=allow_pickle).tensors()
    keys = [key for key in tensors if key in ENCODERS]
    if not keys:
        if len(tensors) != 1:
            first = ", ".join(list(tensors)[:3]) or "none"
            raise CorruptFile(
                f"{os.fspath(path)}: found {len(tensors)} tensors ({first}), expected an embedding: one tensor, or "
                f"those of {', '.join(ENCODERS)}"
            )
        keys = list(tensors)
    vectors = {key if key in ENCODERS else ANY: _rows(tensors[key], key, path) for key in keys}
    return Embedding(name or Path(path).stem, vectors)


def _rows(tensor: Tensor, key: str, path: str | os.PathLike[str]) -> Tensor:
    rows = tensor.unsqueeze(0) if tensor.dim() == 1 else tensor
    if rows.dim() != 2 or not 1 <= rows.shape[0] <= MOST_ROWS or not rows.is_floating_point():
        raise CorruptFile(
            f"{os.fspath(path)}: {key!r}: found {tuple(tensor.shape)} of {tensor.dtype}, expected 1 to {MOST_ROWS} rows"
        )
    values = rows.float()
    if not values.isfinite().all():
        raise CorruptFile(f"{os.fspath(path)}: {key!r}: found numbers that are not finite, expected an embedding")
    return values
