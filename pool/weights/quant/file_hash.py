"""Computes the SHA-256 that identifies the weights of one file, or of several files that are one checkpoint.
Torch-free.

Does not cache (`pool.catalog.registry` does).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from modelpool.pool.files.formats.gguf_parts import is_split
from modelpool.pool.files.formats.model_description import is_description, read_description
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.weights_file import files_of
from modelpool.pool.values.core.assembly import Assembly


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of the file at `path`, in hexadecimal. Raises CorruptFile when it cannot be read."""
    with open_regular(path, "a file of weights") as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(path: str | os.PathLike[str], hash_file: Callable[[str], str] = file_sha256) -> str:
    """Return the identity of the weights at `path`: the SHA-256 of a file; for an index or a split file, the SHA-256 of
    the names and SHA-256s of its shards or parts. The index alone does not identify them: models fine-tuned from one
    another have equal ones. For a description of separate files see `assembly_sha256`.

    `hash_file` returns the SHA-256 of one file. Raises CorruptFile and UnsafeFile as reading an index does, and when a
    file cannot be read.
    """
    if is_description(path):
        return assembly_sha256(read_description(path), lambda part: weights_sha256(part, hash_file))
    file, *shards = files_of(path)
    if not shards:
        return hash_file(file)
    if is_split(path):  # the first part contains weights too
        shards = [file, *shards]
    lines = [f"{os.path.basename(shard)} {hash_file(shard)}\n" for shard in shards]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def assembly_sha256(assembly: Assembly, hash_part: Callable[[str], str]) -> str:
    """Return the identity of a model in separate files, whatever their names: the SHA-256 of their keys and SHA-256s,
    by `hash_part`. The order of text encoders does not matter, since their contents identify them."""
    lines = sorted(f"{key} {hash_part(file)}\n" for key, file in assembly.parts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
