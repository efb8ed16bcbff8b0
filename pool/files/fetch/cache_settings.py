"""`CacheSettings`: where and how a node keeps fetched files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The cache of each node.

    folder       on a local disk of every node
    bound_bytes  maximum of its files; None is the size of the disk
    token        secret that the nodes of a pool share; empty: no file server
    """

    folder: Path
    bound_bytes: int | None = None
    token: str = ""
