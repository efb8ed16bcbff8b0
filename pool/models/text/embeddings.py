"""Textual inversion: reads the trained vectors of an embedding (`embedding:NAME` in a prompt) from its file.

Files hold the vectors of one encoder under an arbitrary name, or of several under the encoders' names, as SDXL's
do. Knows no prompts: `pool.models.text.chunks` finds the names, `pool.models.text.encode` inserts the vectors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from modelpool.pool.families.detection.recognize import mistaken
from modelpool.pool.values.core.errors import AdapterMismatch, CorruptFile, counted
from modelpool.pool.weights.keymaps.adapter_keys import bundled_name
from modelpool.pool.weights.quant.open_weights import open_weights

#: encoder names that files use
ENCODERS = ("clip_l", "clip_g", "clip_h")
#: the parts of a LoRA's bundled embedding that are read; the last one names no encoder
_BUNDLED = (*ENCODERS, "string_to_param.*")
#: longer than any prompt; published files have up to some tens
MAX_ROWS = 1024
#: key of vectors for an encoder without a name
ANY = ""


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The vectors of one textual inversion.

    name     its name in prompts
    vectors  rows by encoder; under `ANY` if the file does not name the encoder
    """

    name: str
    vectors: Mapping[str, Tensor]

    def for_encoder(self, encoder: str, width: int) -> Tensor:
        """Return the rows for the encoder `encoder`, which has token vectors of size `width`.

        Raises AdapterMismatch if there are none, or of another size.
        """
        rows = self.vectors.get(encoder, self.vectors.get(ANY))
        if rows is None:
            found = ", ".join(sorted(self.vectors))
            raise AdapterMismatch(f"embedding {self.name!r}: found vectors for {found}, expected vectors for {encoder}")
        if rows.shape[1] != width:
            raise AdapterMismatch(
                f"embedding {self.name!r}: found vectors of size {rows.shape[1]}, expected {width} for {encoder}; it "
                "was trained for another kind of model"
            )
        return rows


def read_embedding(path: str | os.PathLike[str], name: str = "", *, allow_pickle: bool = False) -> Embedding:
    """Read the embedding in the file at `path`, called `name`, or like the file if that is empty. In a LoRA file, it is
    the embedding of that name among those that the file bundles.

    Raises CorruptFile, UnsafeFile and BadQuantization as `open_weights` does, and CorruptFile for a file that is not
    an embedding.
    """
    weights = open_weights(path, allow_pickle=allow_pickle)
    shapes = weights.shapes
    tensors = _bundled(shapes, name) or {key: key for key in shapes}
    keys = [key for key in tensors if key in ENCODERS]
    if not keys:
        if len(tensors) != 1:
            first = ", ".join(list(tensors)[:3]) or "none"
            expected = f"an embedding: one tensor, or the tensors {', '.join(ENCODERS)}"
            unknown = f"found {counted(len(tensors), 'tensor')} ({first}), expected {expected}"
            raise CorruptFile(f"{os.fspath(path)}: {mistaken(weights.header.shapes, expected, unknown)}")
        keys = list(tensors)
    weights.expect_scales_read(_beside([tensors[key] for key in keys], shapes))
    vectors = {key if key in ENCODERS else ANY: _rows(weights.values_of(tensors[key]), key, path) for key in keys}
    return Embedding(name or Path(path).stem, vectors)


def _beside(vectors: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Return the `keys` that are in the same place as one of `vectors`: a LoRA file has others, too."""
    own = set(vectors)
    places = {key.rpartition(".")[0] for key in own}
    return [key for key in keys if key not in own and (key.rpartition(".")[0] in places or key.startswith(tuple(own)))]


def _bundled(keys: Iterable[str], name: str) -> dict[str, str]:
    """Return the key of the vectors of an embedding that a LoRA file bundles, by encoder; encoders that read no textual
    inversions are left out."""
    found = {bundled_name(key): key for key in keys}
    return {named[1]: key for named, key in found.items() if named and named[0] == name and named[1] in _BUNDLED}


def _rows(tensor: Tensor, key: str, path: str | os.PathLike[str]) -> Tensor:
    rows = tensor.unsqueeze(0) if tensor.dim() == 1 else tensor
    if rows.dim() != 2 or not 1 <= rows.shape[0] <= MAX_ROWS or not rows.is_floating_point():
        raise CorruptFile(
            f"{os.fspath(path)}: {key!r}: found {tuple(tensor.shape)} of {tensor.dtype}, expected 1 to {MAX_ROWS} "
            "rows of floating point numbers"
        )
    values = rows.float()
    if not values.isfinite().all():
        raise CorruptFile(f"{os.fspath(path)}: {key!r}: found NaN or infinity, expected finite numbers")
    return values
