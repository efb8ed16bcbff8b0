"""Embeddings of faces in a request: the output of a face recognition network, as FaceID adapters read it.

modelpool has no such network. An embedding is given as a file (.npy, .safetensors with one tensor, .json), an array, or
a list of numbers; several faces are rows. Torch-free, ray-free.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeAlias

from modelpool.actors.request.bounds import check_complete
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.values.core.errors import unusable_field

if TYPE_CHECKING:
    from modelpool.pool.values.core.results import FloatArray

#: accepted forms, for messages
FACE_FORMS = "a file (.npy, .safetensors, .json), an array or a list of numbers: one row for each face"
#: most bytes of a file of embeddings, and most faces
MAX_FILE_BYTES, MAX_FACES = 1 << 24, 16
#: widest embedding; published ones have 512 numbers
MAX_WIDTH = 4096


@dataclass(frozen=True, slots=True)
class Faces:
    """Embeddings of faces in the driver's memory, [N, D]. Equal when their numbers are equal."""

    sha256: str
    rows: FloatArray = field(compare=False, repr=False)
    file: str = ""


@dataclass(frozen=True, slots=True)
class InputFaces:
    """The same on their way to the pool, which has the numbers."""

    sha256: str
    count: int
    width: int
    file: str = ""


FaceSource: TypeAlias = Faces | InputFaces


def checked_faces(name: str, value: Any) -> FaceSource | None:
    """Read and validate the embeddings in the field `name`. Raises UserError naming the field, and the file for a
    path."""
    if value is None or isinstance(value, (Faces, InputFaces)):
        return value
    import numpy as np

    file = ""
    if isinstance(value, (str, os.PathLike)):
        path = os.fsdecode(value)
        check_complete(name, path)
        file, value = os.path.basename(path), _read(name, path)
    try:
        rows = np.array(value, dtype=np.float32)
    except (TypeError, ValueError):
        raise unusable_field(name, type(value).__name__, FACE_FORMS) from None
    rows = rows.reshape(1, -1) if rows.ndim == 1 else rows.reshape(-1, rows.shape[-1]) if rows.ndim > 2 else rows
    if rows.ndim != 2 or not 1 <= len(rows) <= MAX_FACES or not 1 <= rows.shape[1] <= MAX_WIDTH:
        raise unusable_field(name, f"an array {list(rows.shape)}", FACE_FORMS)
    if not np.isfinite(rows).all():
        raise unusable_field(name, "NaN or infinity", FACE_FORMS)
    digest = hashlib.sha256(str(rows.shape).encode() + rows.tobytes()).hexdigest()
    return Faces(digest, rows, file)


def _read(name: str, path: str) -> Any:
    import numpy as np

    if not os.path.exists(path):
        raise unusable_field(name, path, "an existing file")
    with open_regular(path, "embeddings of faces") as (file, file_bytes):
        if file_bytes > MAX_FILE_BYTES:
            raise unusable_field(name, f"{path} of {file_bytes} bytes", f"at most {MAX_FILE_BYTES} bytes")
        content = file.read()
    try:
        if path.endswith(".npy"):
            return np.load(BytesIO(content), allow_pickle=False)
        if path.endswith(".json"):
            return json.loads(content)
        if path.endswith(".safetensors"):
            from safetensors.numpy import load

            (rows,) = load(content).values()
            return rows
    except Exception as error:  # readers raise arbitrary exceptions for damaged files
        raise unusable_field(name, f"{path} ({error})", FACE_FORMS) from None
    raise unusable_field(name, path, FACE_FORMS)
