"""`NodeFiles`: brings the files of sources to this node's disk, for one process: cache, transfers and file server.

A file that the node has is used at once. Otherwise one process of the node fetches it, from other nodes of the pool
where they have it, else from its source.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.files.fetch.chunk_plan import ChunkPlan
from modelpool.pool.files.fetch.fetch_errors import CacheBroken, FileGone
from modelpool.pool.files.fetch.file_cache import FileCache, FileLease, cache_key
from modelpool.pool.files.fetch.file_server import FileServer, PeerClient, node_folder
from modelpool.pool.files.fetch.open_source import open_source
from modelpool.pool.files.fetch.partial_file import PartialFile
from modelpool.pool.files.fetch.peer_list import PeerList
from modelpool.pool.files.fetch.source import FileSource
from modelpool.pool.files.fetch.transfer import Transfer, Transferred
from modelpool.pool.values.core.remote_file import RemoteFile


@dataclass(frozen=True, slots=True)
class BroughtFiles:
    """Files of one model on this node.

    folder        in which they have their names
    leases        keep them there
    source_bytes  fetched from sources by this process; `peer_bytes` from other nodes
    seconds       until they were complete, including waiting for another process that fetched them
    """

    folder: Path
    leases: tuple[FileLease, ...]
    source_bytes: int = 0
    peer_bytes: int = 0
    seconds: float = 0.0

    def have_names(self, files: Iterable[RemoteFile]) -> bool:
        """Whether these files, which were brought, still have their names: somebody may have emptied the cache."""
        return all(lease.is_at(self.folder / file.path) for file, lease in zip(files, self.leases, strict=True))


class NodeFiles:
    """The files of sources on this node. Any number of threads may use it."""

    def __init__(
        self,
        settings: CacheSettings,
        host: str = "",
        node: str = "",
        open_source: Callable[[str], FileSource] = open_source,
    ) -> None:
        """`host` is the address at which other nodes reach this one; empty: nothing is served. `node` distinguishes it
        from the others. Raises CacheFull if the folder cannot be created."""
        self.cache = FileCache(settings.folder, settings.bound_bytes)
        self.cache.clean_up()
        self._token = settings.token
        self._open_source = open_source
        self._sources: dict[str, FileSource] = {}
        self._start = int(hashlib.sha256((node + self.cache.identity).encode()).hexdigest()[:8], 16) / 2**32
        self.peers = PeerList(node_folder(settings.folder))
        self._server: FileServer | None = None
        if host and settings.token:
            self._server = FileServer(self.cache, settings.token, host, lambda peer: self.peers.add((peer,)))
            self.peers.is_own(self._server.address)
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """The address of the file server of this process; "" if there is none."""
        return "" if self._server is None else self._server.address

    def bring(
        self,
        files: Sequence[RemoteFile],
        needed_next: Sequence[str] = (),
        should_stop: Callable[[], bool] = lambda: False,
        peers: Iterable[str] = (),
    ) -> BroughtFiles | None:
        """Bring all of these files to this node and return where they are; None when `should_stop`.

        needed_next  hashes of files that are expected to be needed soon: they are evicted last
        peers        addresses of other nodes
        Raises SourceFailed, FileGone, LibraryMissing, WrongContent, CacheFull, CacheBroken.
        """
        self.peers.add(peers)
        try:
            try:
                return self._brought(files, needed_next, should_stop)
            except FileNotFoundError:  # somebody has emptied the cache
                self.cache.create_folders()
                self.peers.create_folder()
                return self._brought(files, needed_next, should_stop)
        except OSError as error:
            raise CacheBroken(
                f"{self.cache.root}: fetched files cannot be read or written ({error.strerror or error}); expected a "
                "folder on a local disk as [models] cache"
            ) from error

    def _brought(
        self, files: Sequence[RemoteFile], needed_next: Sequence[str], should_stop: Callable[[], bool]
    ) -> BroughtFiles | None:
        """As `bring`; errors of the disk are raised as they are."""
        began, moved = time.monotonic(), Transferred()
        soon = (*(file.sha256 for file in files if file.sha256), *needed_next)
        with contextlib.ExitStack() as stack:
            leases: list[FileLease] = []
            for file in files:
                lease = self.cache.fetch(file, self._filler(moved, should_stop), soon, should_stop)
                if lease is None:
                    return None
                stack.callback(lease.close)
                leases.append(lease)
            names = [(file.path, lease.sha256) for file, lease in zip(files, leases, strict=True)]
            folder = self.cache.view(names)
            stack.pop_all()
        seconds = time.monotonic() - began
        return BroughtFiles(folder, tuple(leases), moved.source_bytes, moved.peer_bytes, seconds)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _filler(
        self, moved: Transferred, should_stop: Callable[[], bool]
    ) -> Callable[[PartialFile, RemoteFile, bool], bool]:
        def fill(partial: PartialFile, file: RemoteFile, is_alone: bool) -> bool:
            before_bytes = moved.peer_bytes
            uses_peers = bool(self._token) and not is_alone
            plan = ChunkPlan(partial.progress, self._start, is_alone=not (uses_peers and self.peers.addresses()))
            source = self._source_of(file)
            Transfer(
                partial,
                file,
                cache_key(file),
                source,
                plan,
                self.peers.addresses,
                lambda address: PeerClient(address, self._token, self.address),
                self.cache.identity,
                should_stop,
                self.peers.is_own,
                moved,
            ).run(uses_peers)
            if not file.sha256 and partial.progress.is_complete:
                try:
                    source.check(file)
                except FileGone:
                    partial.reset()
                    raise
            return moved.peer_bytes > before_bytes

        return fill

    def _source_of(self, file: RemoteFile) -> FileSource:
        """Return the source of a file; opening one may import a library. Kept by its place, since files share it."""
        place = file.url.removesuffix(file.path)
        with self._lock:
            source = self._sources.get(place)
            if source is None:
                if len(self._sources) >= 64:
                    self._sources.clear()
                source = self._sources[place] = self._open_source(place if place.endswith("/") else file.url)
            return source
