"""`FsspecSource`: files of an object store or hub through fsspec: s3://, gs://, hf:// and every other scheme that an
installed fsspec library reads.

Credentials and endpoints are the library's own, from the environment of the process (such as AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelpool.pool.files.fetch.fetch_errors import FileGone, Interrupted, SourceFailed
from modelpool.pool.files.fetch.file_system import open_file_system
from modelpool.pool.files.fetch.source import MAX_FILES, PIECE_BYTES, is_wanted, published_sums, read_all
from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.core.remote_file import RemoteFile

#: bytes of one request: a request costs an object store some tens of milliseconds
REQUEST_BYTES = 8 * PIECE_BYTES
#: keys of fsspec's descriptions that change with the content, the strongest first
_VERSION_KEYS = ("VersionId", "generation", "ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime", "created")


class FsspecSource:
    """Files below one URL. Any number of threads may use it."""

    def __init__(self, url: str) -> None:
        """Raises LibraryMissing naming the extra to install."""
        self.url = url
        self._system = open_file_system(url)
        self._root = str(self._system._strip_protocol(url)).rstrip("/")

    def files(self) -> tuple[RemoteFile, ...]:
        """See `FileSource`."""
        try:
            self._system.invalidate_cache()
            listed: Mapping[str, Mapping[str, Any]] = self._system.find(self._root, detail=True)
        except FileNotFoundError:
            raise SourceFailed(f"{self.url}: does not exist, expected a folder of models") from None
        except Exception as error:  # each library has its own errors
            raise SourceFailed(f"{self.url}: cannot be listed: {type(error).__name__}: {error}") from error
        found = []
        for name in sorted(listed):
            facts = listed[name]
            path = name.removeprefix(self._root).lstrip("/") or name.rsplit("/", 1)[-1]
            if facts.get("type", "file") == "file" and is_wanted(path):
                found.append(self._describe(path, name, facts))
        if not found:
            raise SourceFailed(f"{self.url}: no files of weights there, expected a folder of models")
        if len(found) > MAX_FILES:
            raise SourceFailed(f"{self.url}: more than {MAX_FILES} files, expected a folder of models")
        sums = published_sums(found, lambda file: read_all(self, file))
        return tuple(RemoteFile(f.path, f.url, f.size_bytes, f.version, sums.get(f.path, f.sha256)) for f in found)

    def read(self, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
        """See `FileSource`."""
        name = str(self._system._strip_protocol(file.url))
        while begin < end:
            stop = min(end, begin + REQUEST_BYTES)
            try:
                piece = self._system.cat_file(name, start=begin, end=stop)
            except FileNotFoundError:
                raise FileGone(f"{file.url}: no such file") from None
            except PermissionError as error:
                raise SourceFailed(f"{file.url}: access is refused: {error}") from error
            except Exception as error:  # each library has its own errors, and most of them pass
                raise Interrupted(f"{type(error).__name__}: {error}") from error
            if len(piece) != stop - begin:
                raise FileGone(
                    f"{file.url}: found {counted(len(piece), 'byte')} "
                    f"from {begin}, expected {stop - begin}; it was replaced "
                    "since it was listed"
                )
            yield piece
            begin = stop

    def check(self, file: RemoteFile) -> None:
        """See `FileSource`. fsspec reads ranges without a condition: if the version is the listed one after all reads,
        it was so during them."""
        name = str(self._system._strip_protocol(file.url))
        try:
            self._system.invalidate_cache()
            now = self._describe(file.path, name, self._system.info(name))
        except FileNotFoundError:
            raise FileGone(f"{file.url}: no such file") from None
        except Exception as error:
            raise SourceFailed(f"{file.url}: cannot be checked: {type(error).__name__}: {error}") from error
        if (now.version, now.size_bytes) != (file.version, file.size_bytes):
            raise FileGone(f"{file.url}: was replaced since it was listed")

    def _describe(self, path: str, name: str, facts: Mapping[str, Any]) -> RemoteFile:
        version = next((str(facts[key]).strip('"') for key in _VERSION_KEYS if facts.get(key)), "")
        stored = facts.get("lfs")  # of the Hugging Face hub: large files are stored by their SHA-256
        sha256 = str(stored.get("sha256", "")) if isinstance(stored, Mapping) else ""
        return RemoteFile(path, str(self._system.unstrip_protocol(name)), int(facts["size"]), version, sha256)
