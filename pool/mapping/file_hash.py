"""The SHA-256 that tells the weights of one file, or of several files that are one checkpoint, from others. Torch-free.

Remembers nothing (`pool.registry` does).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from modelpool.pool.core.assembly import Assembly
from modelpool.pool.formats.gguf_parts import is_split
from modelpool.pool.formats.model_description import is_description, read_description
from modelpool.pool.formats.regular_file import open_regular
from modelpool.pool.formats.weights_file import files_of


def file_sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of the whole file at `path`, in hexadecimal. Raises CorruptFile when it cannot be read."""
    with open_regular(path, "a file of weights") as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(path: str | os.PathLike[str], hash_file: Callable[[str], str] = file_sha256) -> str:
    """What tells the weights at `path` from others: the SHA-256 of a file; of an index, that of its shards' names and
    SHA-256s, as of the parts of a split file. The index itself says too little: models that were trained from one
    another have equal ones. Of a description of separate files, that of what they are for and their SHA-256s.

    `hash_file` gives the SHA-256 of one file. Raises CorruptFile and UnsafeFile as reading an index does, and when a
    file cannot be read.
    """
    if is_description(path):
        return assembly_sha256(read_description(path), lambda part: weights_sha256(part, hash_file))
    file, *shards = files_of(path)
    if not shards:
        return hash_file(file)
    if is_split(path):  # its first part holds weights too
        shards = [file, *shards]
    lines = [f"{os.path.basename(shard)} {hash_file(shard)}\n" for shard in shards]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def assembly_sha256(assembly: Assembly, hash_part: Callable[[str], str]) -> str:
    """What tells a model in separate files from others, whatever they are called: `hash_part` gives the SHA-256 of the
    weights of one. Text encoders say themselves what they are, so that their order does not count."""
    lines = sorted(f"{key} {hash_part(file)}\n" for key, file in assembly.parts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
