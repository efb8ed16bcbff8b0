"""`ContentDigests`: the digests of the tensors of files, which identify equal components of different files.

They are computed in the same pass in which a file is hashed, and stored with the file's size and times, like its hash.
Torch-free. `pool.models.loading.content_digest` knows which tensors make a component.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from modelpool.pool.catalog.registry.folder_scan import Fingerprint, weights_file
from modelpool.pool.catalog.registry.hashes import hash_file
from modelpool.pool.catalog.registry.registry_store import ContentRecord, RegistryStore
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.files.formats.weights_file import read_single_header
from modelpool.pool.models.loading.content_digest import RangeDigests
from modelpool.pool.values.core.errors import CorruptFile, UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DigestPass:
    """A file that is being read, and the digests of its tensors so far."""

    path: str
    fingerprint: Fingerprint
    digests: RangeDigests
    began_ns: int


class ContentDigests:
    """The digests of the tensors of files. Belongs to one registry."""

    def __init__(self, store: RegistryStore, now_ns: Callable[[], int], settled_ns: int) -> None:
        """A file that changed less than `settled_ns` ago is not stored in the database."""
        self._store = store
        self._now_ns = now_ns
        self._settled_ns = settled_ns
        self._known: dict[tuple[str, Fingerprint], Mapping[ByteRange, bytes]] = {}

    def begin(self, path: str | os.PathLike[str]) -> DigestPass | None:
        """Start with the file of weights at `path`, which is about to be read completely; None for one without digests:
        it cannot be read, or its tensors share bytes."""
        real = os.path.realpath(path)
        try:
            fingerprint = weights_file(Path(real)).fingerprint
            # the caller that hashes a pickle has allowed it; headers of pickles run nothing
            digests = RangeDigests.of(read_single_header(real, allow_pickle=True))
        except (OSError, UserError):
            return None
        return None if digests is None else DigestPass(real, fingerprint, digests, self._now_ns())

    def end(self, reading: DigestPass) -> None:
        """Store the digests after the complete file was read, unless the file changed during that."""
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
            self._store.save_content(reading.path, record)

    def of(self, path: str) -> Mapping[ByteRange, bytes] | None:
        """Return the digests of the file at `path` by range, reading all of it unless they are known; None if it has
        none.

        Raises CorruptFile if the file cannot be read.
        """
        real = os.path.realpath(path)
        try:
            fingerprint = weights_file(Path(real)).fingerprint
        except OSError as error:
            raise CorruptFile(f"{path}: cannot be read: {error.strerror or error}") from error
        known = self._known.get((real, fingerprint))
        if known is None:
            record = self._store.content_record(real)
            if record is not None and record.fingerprint == fingerprint:
                known = self._known[(real, fingerprint)] = record.digests
        if known is None and (reading := self.begin(real)) is not None:
            hash_file(real, False, lambda count: None, reading.digests)
            self.end(reading)
            known = self._known.get((real, fingerprint))
        return known
