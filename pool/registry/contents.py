"""`Contents`: the digests of the tensors of files, by which components of several files are seen to be equal.

They are made in the same pass in which a file is hashed, and remembered with the file's size and times, as its hash is.
Torch-free. Which tensors make a component is `pool.loading.content_digest`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from modelpool.pool.core.errors import CorruptFile, UserError
from modelpool.pool.formats.byte_ranges import ByteRange
from modelpool.pool.formats.weights_file import read_own_header
from modelpool.pool.loading.content_digest import RangeDigests
from modelpool.pool.registry.folders import Fingerprint, weights_file
from modelpool.pool.registry.hashes import hash_file
from modelpool.pool.registry.remembered import ContentRecord, Memory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reading:
    """A file that is being read, and what its tensors come to."""

    path: str
    fingerprint: Fingerprint
    digests: RangeDigests
    began_ns: int


class Contents:
    """What the tensors of files come to. One registry's."""

    def __init__(self, memory: Memory, now_ns: Callable[[], int], settled_ns: int) -> None:
        """A file that changed less than `settled_ns` ago is not remembered in the database."""
        self._memory = memory
        self._now_ns = now_ns
        self._settled_ns = settled_ns
        self._known: dict[tuple[str, Fingerprint], Mapping[ByteRange, bytes]] = {}

    def begin(self, path: str | os.PathLike[str]) -> Reading | None:
        """Begin with the file of weights at `path`, which is about to be read whole; None for one that has no digests:
        it cannot be read, or its tensors share bytes."""
        real = os.path.realpath(path)
        try:
            fingerprint = weights_file(Path(real)).fingerprint
            # whoever hashes a pickle has allowed it; headers of pickles run nothing
            digests = RangeDigests.of(read_own_header(real, allow_pickle=True))
        except (OSError, UserError):
            return None
        return None if digests is None else Reading(real, fingerprint, digests, self._now_ns())

    def end(self, reading: Reading) -> None:
        """The whole file was read: remember what was found, unless the file changed meanwhile."""
        try:
            after = weights_file(Path(reading.path)).fingerprint
        except OSError:
            return
        if after != reading.fingerprint:
            return
        found = reading.digests.digests()
        self._known[(reading.path, reading.fingerprint)] = found
        if reading.began_ns - reading.fingerprint.changed_ns > self._settled_ns:
            record = ContentRecord(reading.fingerprint, found)
            self._memory.remember_content(reading.path, record)

    def of(self, path: str) -> Mapping[ByteRange, bytes] | None:
        """The digests of the file at `path` by range, read whole unless they are known; None where it has none.

        Raises CorruptFile when the file cannot be read.
        """
        real = os.path.realpath(path)
        try:
            fingerprint = weights_file(Path(real)).fingerprint
        except OSError as error:
            raise CorruptFile(f"{path}: cannot be read: {error.strerror or error}") from error
        known = self._known.get((real, fingerprint))
        if known is None:
            record = self._memory.content_record(real)
            if record is not None and record.fingerprint == fingerprint:
                known = self._known[(real, fingerprint)] = record.digests
        if known is None and (reading := self.begin(real)) is not None:
            hash_file(real, False, lambda count: None, reading.digests)
            self.end(reading)
            known = self._known.get((real, fingerprint))
        return known
