"""Adds the files that have to be fetched to the sizes of a component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelpool.pool.files.fetch.file_key import file_key
from modelpool.pool.values.core.remote_file import RemoteFile
from modelpool.pool.values.specs.spec import ComponentSpec


def with_fetch(spec: ComponentSpec, files: Sequence[RemoteFile]) -> ComponentSpec:
    """Return `spec` with the key and size of the files that it is fetched with; unchanged for local files. All
    components of one model have the same: its largest file stands for all of them."""
    if not files:
        return spec
    largest = max(files, key=lambda file: (file.size_bytes, file.path))
    return replace(spec, fetch_key=file_key(largest.sha256), fetch_bytes=sum(file.size_bytes for file in files))
