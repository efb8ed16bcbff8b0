"""`FolderSource`: a shared folder, or one file in it, as a source: its files are copied to the nodes' caches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from modelpool.pool.files.fetch.fetch_errors import FileGone, Interrupted, SourceFailed
from modelpool.pool.files.fetch.source import MAX_FILES, PIECE_BYTES, is_wanted, published_sums, read_all
from modelpool.pool.files.fetch.source_url import path_url, url_path
from modelpool.pool.values.core.remote_file import RemoteFile


class FolderSource:
    """Files of a folder that every node sees at the same path. Follows no links to folders."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = url_path(url)

    def files(self) -> tuple[RemoteFile, ...]:
        """See `FileSource`."""
        if self._path.is_file():
            return (self._describe(self._path.name, self._path),)
        if not self._path.is_dir():
            raise SourceFailed(f"{self._path}: no such folder, expected a folder of models that every node sees")
        found = []
        for base, folders, names in os.walk(self._path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(base, name)
                if is_wanted(name):
                    found.append(self._describe(path.relative_to(self._path).as_posix(), path))
            if len(found) > MAX_FILES:
                raise SourceFailed(f"{self._path}: more than {MAX_FILES} files, expected a folder of models")
        sums = published_sums(found, lambda file: read_all(self, file))
        return tuple(RemoteFile(f.path, f.url, f.size_bytes, f.version, sums.get(f.path, "")) for f in found)

    def read(self, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
        """See `FileSource`."""
        try:
            with open(url_path(file.url), "rb", buffering=0) as opened:
                if _version(os.fstat(opened.fileno())) != file.version:
                    raise FileGone(f"{file.url}: was replaced since it was listed")
                opened.seek(begin)
                while begin < end:
                    piece = opened.read(min(PIECE_BYTES, end - begin))
                    if not piece:
                        raise FileGone(f"{file.url}: ends at byte {begin}, expected {file.size_bytes} bytes")
                    begin += len(piece)
                    yield piece
        except FileNotFoundError:
            raise FileGone(f"{file.url}: no such file") from None
        except OSError as error:
            raise Interrupted(error.strerror or str(error)) from error

    def check(self, file: RemoteFile) -> None:
        """See `FileSource`."""
        try:
            status = url_path(file.url).stat()
        except OSError as error:
            raise FileGone(f"{file.url}: {error.strerror or error}") from None
        if _version(status) != file.version:
            raise FileGone(f"{file.url}: was replaced since it was listed")

    def _describe(self, name: str, path: Path) -> RemoteFile:
        try:
            status = path.stat()
        except OSError as error:
            raise SourceFailed(f"{path}: cannot be read: {error.strerror or error}") from error
        return RemoteFile(name, path_url(path), status.st_size, _version(status))


def _version(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"
