"""`WorkerFiles`: brings the files of runs to the worker's node, and keeps them there as long as the worker uses them.

A file is leased from before the run that reads it until this process has unmapped it: an engine keeps models open
between runs. Without leases, another worker of the node could evict a file that is the host copy of weights here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from modelpool.actors.worker.fetch_cost import FetchCost
from modelpool.actors.worker.wire.messages import FetchOrder
from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.files.fetch.fetch_errors import CacheFull
from modelpool.pool.files.fetch.file_key import file_key
from modelpool.pool.files.fetch.node_files import BroughtFiles, NodeFiles
from modelpool.pool.values.core.remote_file import RemoteFile
from modelpool.pool.values.core.stage_params import Stopped
from modelpool.pool.values.specs.spec import FileOnDisk

#: sets of files with leases that are kept before unmapped sets are given up
SETS_KEPT = 256
#: files on the disk that the scheduler is informed of when the worker starts; small ones take no time to fetch
MAX_TOLD, LEAST_TOLD_BYTES = 4096, 1 << 20


class WorkerFiles:
    """The fetched files of one worker. `bring` is for the thread of the runs, `prefetch` for another one."""

    def __init__(self, settings: CacheSettings, host: str, node: str, close_models: Callable[[], None]) -> None:
        """`close_models` closes models that no run uses, so that their files may be evicted. Raises CacheFull."""
        self._nodes = NodeFiles(settings, host, node)
        self._close_models = close_models
        #: brought files by set, the most recently used set last
        self._leases: OrderedDict[tuple[RemoteFile, ...], BroughtFiles] = OrderedDict()

    @property
    def address(self) -> str:
        """The address at which other nodes get files."""
        return self._nodes.address

    def on_disk(self) -> tuple[FileOnDisk, ...]:
        """Return the large files on this node's disk, the least recently used first."""
        files = [file for file in self._nodes.cache.use().files if not file.is_partial]
        known = sorted(files, key=lambda file: file.used_at)[-MAX_TOLD:]
        return tuple(
            FileOnDisk(file_key(file.key), file.size_bytes) for file in known if file.size_bytes >= LEAST_TOLD_BYTES
        )

    def bring(self, order: FetchOrder, should_stop: Callable[[], bool]) -> FetchCost:
        """Return when all files are on this node. Raises Stopped, and as `NodeFiles.bring`."""
        source_bytes = peer_bytes = 0
        seconds = 0.0
        for files in order.sets:
            if (known := self._leases.get(files)) is not None:
                if known.have_names(files):
                    self._leases.move_to_end(files)
                    continue
                del self._leases[files]
                _close(known)
            try:
                brought = self._nodes.bring(files, order.needed_next, should_stop, order.peers)
            except CacheFull:
                # files of models that this worker keeps open may be what fills the cache
                self.release_unmapped(keep=order.sets)
                self._close_models()
                self.release_unmapped(keep=order.sets)
                brought = self._nodes.bring(files, order.needed_next, should_stop, order.peers)
            if brought is None:
                raise Stopped("stopped while its files were fetched")
            self._leases[files] = brought
            source_bytes += brought.source_bytes
            peer_bytes += brought.peer_bytes
            seconds += brought.seconds
        if len(self._leases) > SETS_KEPT:
            self.release_unmapped(keep=order.sets)
        return FetchCost(source_bytes, peer_bytes, seconds)

    def prefetch(self, files: tuple[RemoteFile, ...], should_stop: Callable[[], bool]) -> None:
        """Bring files for a later run, without keeping them."""
        brought = self._nodes.bring(files, (), should_stop)
        if brought is not None:
            _close(brought)

    def release_unmapped(self, keep: tuple[tuple[RemoteFile, ...], ...] = ()) -> None:
        """Give up the leases of files that this process has not mapped, except those in `keep`."""
        mapped = mapped_inodes()
        for files in [files for files in self._leases if files not in keep]:
            brought = self._leases[files]
            if mapped is not None and not any(lease.inode()[1] in mapped for lease in brought.leases):
                del self._leases[files]
                _close(brought)

    def close(self) -> None:
        """Release all files and stop serving. Idempotent."""
        for brought in self._leases.values():
            _close(brought)
        self._leases.clear()
        self._nodes.close()


def _close(brought: BroughtFiles) -> None:
    for lease in brought.leases:
        lease.close()


def mapped_inodes(maps: Path = Path("/proc/self/maps")) -> frozenset[int] | None:
    """Return the inode of every file that this process has mapped; None if the system does not tell. Without devices:
    some file systems (btrfs, overlays) report others there than `stat` does."""
    try:
        lines = maps.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    found = set()
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] != "0":
            found.add(int(fields[4]))
    return frozenset(found)
