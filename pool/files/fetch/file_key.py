"""`file_key`: the short name of a fetched file in the scheduler's tables."""

from __future__ import annotations

#: enough digits to distinguish the files of a pool
KEY_DIGITS = 16


def file_key(sha256: str) -> str:
    """Return the key of the file with this hash, as in `ComponentSpec.fetch_key` and `WorkerSpec.cached_files`."""
    return sha256[:KEY_DIGITS]
