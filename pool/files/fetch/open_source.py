"""Opens the source of a URL with the library that reads its scheme."""

from __future__ import annotations

from modelpool.pool.files.fetch.folder_source import FolderSource
from modelpool.pool.files.fetch.fsspec_source import FsspecSource
from modelpool.pool.files.fetch.http_source import HttpSource
from modelpool.pool.files.fetch.source import FileSource
from modelpool.pool.files.fetch.source_url import FILE_SCHEME, HTTP_SCHEMES, scheme_of


def open_source(url: str) -> FileSource:
    """Return the source at `url`, a folder or one file. Raises LibraryMissing, SourceFailed."""
    scheme = scheme_of(url)
    if scheme in HTTP_SCHEMES:
        return HttpSource(url)
    if scheme == FILE_SCHEME:
        return FolderSource(url)
    return FsspecSource(url)
