"""Errors of sources and of the cache of fetched files. Each names the URL, the folder or the file."""

from __future__ import annotations

from modelpool.pool.values.core.errors import CorruptFile, UserError


class SourceFailed(UserError):
    """A source that cannot be reached or does not answer as expected, after all retries."""


class FileGone(SourceFailed):
    """A file that is no longer at its source, or was replaced there since it was listed."""


class LibraryMissing(UserError):
    """A source with a library that is not installed. The message names the extra to install."""


class WrongContent(CorruptFile):
    """A fetched file that is not the one that the source announced: another hash or another size."""


class CacheFull(UserError):
    """No room on the node's disk, or in the bound of its cache. The message names the folder and the sizes."""


class CacheBroken(UserError):
    """A cache that cannot be read or written. The message names the folder and the reason."""


class Interrupted(Exception):
    """A transfer that broke off and may be continued; internal to retries."""


#: what prevents a file from being on a node's disk; another node may be able to fetch it
FETCH_ERRORS = (SourceFailed, LibraryMissing, WrongContent, CacheFull, CacheBroken)
