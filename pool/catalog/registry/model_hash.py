"""Computes the hashes of models in several files from the hashes of the files. Torch-free; reads nothing itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from modelpool.pool.catalog.registry.folder_scan import FileForm, WeightsFile
from modelpool.pool.catalog.registry.hashes import FileHashes
from modelpool.pool.files.formats.model_description import read_description
from modelpool.pool.weights.quant.file_hash import assembly_sha256, weights_sha256


def assembly_hash(file: WeightsFile, hash_part: Callable[[str], str]) -> str:
    """Return the SHA-256 of a model in separate files; `hash_part` hashes the weights at a path. Raises
    CorruptFile as `read_description` does."""
    return assembly_sha256(file.assembly or read_description(file.path), hash_part)


def hash_whole(file: WeightsFile, hash_member: Callable[[str | os.PathLike[str]], FileHashes]) -> FileHashes:
    """Return the hashes of a file, or of a model in several files: the hash of a text with one line per file, with its
    hash."""
    if file.form is FileForm.FILE:
        return hash_member(file.real_path)
    if file.form is FileForm.SHARDED:
        return FileHashes(weights_sha256(file.real_path, lambda part: hash_member(part).sha256))
    combined = hashlib.sha256()
    for member in file.members:
        digest = hash_member(member).sha256
        combined.update(f"{digest}  {os.path.relpath(member, file.real_path)}\n".encode())
    return FileHashes(combined.hexdigest())
