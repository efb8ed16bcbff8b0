"""`RemoteModels`: the files of sources, as a registry finds and reads them: by outlines in the cache of this machine.

The registry scans the outlines like any folder. What it returns for a model are the paths that the model's files have
on every node once they are fetched, and the files to fetch; nothing else has to know that a model is remote. The hash
of a file is the one that its source publishes (`pool.files.fetch.source.published_sums`, the Hugging Face hub). Without
it, the file is fetched to this machine when it is first used, and hashed; other nodes get it from here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from modelpool.pool.catalog.registry.folder_scan import FileForm, WeightsFile
from modelpool.pool.catalog.registry.outline import FIRST_BYTES, write_outline
from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.files.fetch.file_cache import checked_path, view_name
from modelpool.pool.files.fetch.node_files import BroughtFiles, NodeFiles
from modelpool.pool.files.fetch.open_source import open_source
from modelpool.pool.files.fetch.source import MAX_SMALL_BYTES, SMALL_SUFFIXES, FileSource, read_range
from modelpool.pool.files.formats.shard_index import is_index
from modelpool.pool.files.formats.weights_file import files_of
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.remote_file import RemoteFile
from modelpool.pool.weights.quant.file_hash import file_sha256

#: a source is listed again after this time, when a name is looked up
LISTED_SECONDS = 60.0
#: outlines that are written at once
OUTLINED_AT_ONCE = 8
#: maximum size of the outlines of one source on the disk
MAX_OUTLINE_BYTES = 4 << 30
#: maximum number of models with an outline remembered by the path on the nodes
MAX_LOCATED = 65_536
#: files next to weights that belong to a model: tokenizers and configurations
COMPANIONS = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.model",
        "tekken.json",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "config.json",
    }
)
_INDEX_NAME, _FILES_NAME = "index.json", "files"


class RemoteModels:
    """The files of some sources. Not thread safe."""

    def __init__(
        self,
        urls: Sequence[str],
        nodes: NodeFiles,
        clock: Callable[[], float] = time.monotonic,
        open_source: Callable[[str], FileSource] = open_source,
    ) -> None:
        """`nodes` is the cache of this machine."""
        self._nodes = nodes
        self._clock = clock
        self._sources = [
            _OutlinedSource(open_source(url), nodes.cache.root / "outlines" / _digest(url)[:16]) for url in urls
        ]
        self._listed_at: float | None = None
        #: outlines by the path on the nodes
        self._outlines: dict[str, Path] = {}

    @property
    def files_address(self) -> str:
        """The address of the file server of this process; "" if there is none."""
        return self._nodes.address

    def folders(self) -> tuple[Path, ...]:
        """Return the folders with outlines, updated if they are old.

        Raises SourceFailed when a source cannot be listed for the first time; later the last list is used, with a
        warning.
        """
        now = self._clock()
        if self._listed_at is None or now - self._listed_at > LISTED_SECONDS:
            for source in self._sources:
                source.update(must=self._listed_at is None)
            self._listed_at = now
        return tuple(source.folder for source in self._sources)

    def has(self, path: str | os.PathLike[str]) -> bool:
        """Whether an outline is at `path`."""
        return self._found(path) is not None

    def sha256(self, path: str | os.PathLike[str]) -> str:
        """Return the SHA-256 of the file with the outline at `path`; fetches it if its source publishes none.

        Raises SourceFailed, CacheFull, WrongContent.
        """
        file, is_complete = self._file_at(path)
        known = self._nodes.cache.known_sha256(file)
        if known:
            return known
        if is_complete:
            found = file_sha256(path)
            self._nodes.cache.hash_is_known_as(file, found)
            return found
        fetched = self._nodes.bring((file,))
        assert fetched is not None, "nothing stops it"
        for lease in fetched.leases:
            lease.close()
        return fetched.leases[0].sha256

    def known_sha256(self, path: str | os.PathLike[str]) -> str:
        """Return the SHA-256 as far as it is known; "" without fetching the file."""
        file, _ = self._file_at(path)
        return self._nodes.cache.known_sha256(file)

    def locate(self, file: WeightsFile) -> tuple[str, tuple[RemoteFile, ...]]:
        """Return the path of a model on the nodes, and the files to fetch for it, with their hashes.

        Raises as `sha256`.
        """
        source = self._source_of(file.real_path)
        assert source is not None, f"{file.real_path} is no outline"
        found = {path: self._with_hash(path) for path in self._files_for(source, file)}
        files = tuple(found[path] for path in sorted(found))
        view = self._nodes.cache.views / view_name(sorted({(each.path, each.sha256) for each in files}))
        path = str(view / source.relative(file.real_path))
        if len(self._outlines) >= MAX_LOCATED:
            self._outlines.clear()
        self._outlines[path] = file.real_path
        return path, files

    def outline_of(self, path: str) -> str:
        """Return the path of the outline of a model that was located at `path` on the nodes; `path` itself for any
        other file."""
        outline = self._outlines.get(path)
        return path if outline is None else str(outline)

    def bring(self, files: Sequence[RemoteFile]) -> BroughtFiles:
        """Fetch files to this machine."""
        fetched = self._nodes.bring(files)
        assert fetched is not None, "nothing stops it"
        return fetched

    def _with_hash(self, path: Path) -> RemoteFile:
        file, _ = self._file_at(path)
        return RemoteFile(file.path, file.url, file.size_bytes, file.version, self.sha256(path))

    def _files_for(self, source: _OutlinedSource, file: WeightsFile) -> Iterator[Path]:
        """Yield the outlines of all files that running the model may read."""
        members = [*file.members]
        if file.form is not FileForm.FOLDER:
            members = [Path(part) for part in files_of(str(file.real_path))]
        yield from members
        for member in members:
            for folder in _folders_near(member):
                if not folder.is_relative_to(source.folder) or not folder.is_dir():
                    continue
                for path in sorted(folder.iterdir()):
                    is_own = path.name.startswith(f"{member.stem}.") and path.name.lower().endswith(SMALL_SUFFIXES)
                    if path.is_file() and (path.name in COMPANIONS or is_own):
                        yield path

    def _file_at(self, path: str | os.PathLike[str]) -> tuple[RemoteFile, bool]:
        found = self._found(path)
        assert found is not None, f"{os.fspath(path)} is no outline"
        return found

    def _found(self, path: str | os.PathLike[str]) -> tuple[RemoteFile, bool] | None:
        source = self._source_of(Path(path))
        return None if source is None else source.files.get(source.relative(Path(path)))

    def _source_of(self, path: Path) -> _OutlinedSource | None:
        return next((source for source in self._sources if path.is_relative_to(source.folder)), None)


def open_remote(urls: Sequence[str], cache: CacheSettings | None, host: str = "") -> RemoteModels | None:
    """Return the models of these sources; None if there are none. `host` is the address at which other nodes get the
    files of this one. Raises LibraryMissing, SourceFailed, CacheFull."""
    if not urls or cache is None:
        return None
    return RemoteModels(urls, NodeFiles(cache, host))


class _OutlinedSource:
    """The outlines of one source in one folder."""

    def __init__(self, source: FileSource, folder: Path) -> None:
        self._source = source
        self._index = folder / _INDEX_NAME
        self.folder = Path(os.path.realpath(folder)) / _FILES_NAME
        #: by path: the file, and whether its outline has all of its bytes
        self.files: dict[str, tuple[RemoteFile, bool]] = {}

    def relative(self, path: Path) -> str:
        """Return the path of an outline below the source."""
        return path.relative_to(self.folder).as_posix()

    def update(self, must: bool) -> None:
        """List the source again, write missing outlines, and remove outlines of files that are gone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        known = self._read_index()
        try:
            listed = [file for file in self._source.files() if _is_described(file)]
        except UserError as problem:
            if must and not known:
                raise
            warnings.warn(f"{problem}; using the list of an earlier time", RuntimeWarning, stacklevel=2)
            self.files = known
            return
        with _locked(self._index.with_suffix(".lock")):
            known = self._read_index()
            wanted = {str(checked_path(file.path)): file for file in listed}
            stale = {path: file for path, file in wanted.items() if not self._is_current(path, file, known)}
            with ThreadPoolExecutor(OUTLINED_AT_ONCE, thread_name_prefix="outline") as executor:
                written = dict(zip(stale, executor.map(self._write, stale.values()), strict=True))
            self.files = {
                path: (file, written[path] if path in written else known[path][1])
                for path, file in wanted.items()
                if path not in written or written[path] is not None
            }
            self._remove_others()
            rows = [{**asdict(file), "is_complete": complete} for file, complete in self.files.values()]
            temporary = self._index.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(rows))
            temporary.replace(self._index)

    def _is_current(self, path: str, file: RemoteFile, known: dict[str, tuple[RemoteFile, bool]]) -> bool:
        before = known.get(path)
        same = before is not None and (before[0].size_bytes, before[0].version) == (file.size_bytes, file.version)
        return same and (self.folder / path).is_file()

    def _write(self, file: RemoteFile) -> bool:
        """Write the outline of a file. Return whether it has all of its bytes."""
        path = self.folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)

        def read(begin: int, end: int) -> bytes:
            return b"".join(read_range(self._source, file, begin, end))

        try:
            if _is_small(file):
                temporary.write_bytes(read(0, file.size_bytes))
                fetched = file.size_bytes
            else:
                fetched = write_outline(temporary, file.size_bytes, read)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return fetched >= file.size_bytes

    def _remove_others(self) -> None:
        """Remove outlines of files that are no longer at the source, and the last ones beyond the maximum size."""
        total_bytes = 0
        for base, folders, names in os.walk(self.folder):
            folders.sort()
            for name in sorted(names):
                path = Path(base, name)
                total_bytes += 512 * path.stat().st_blocks
                if self.relative(path) not in self.files or total_bytes > MAX_OUTLINE_BYTES:
                    self.files.pop(self.relative(path), None)
                    path.unlink()

    def _read_index(self) -> dict[str, tuple[RemoteFile, bool]]:
        try:
            rows = json.loads(self._index.read_text())
            found = {}
            for row in rows:
                is_complete = bool(row.pop("is_complete"))
                found[str(row["path"])] = (RemoteFile(**row), is_complete)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        return found


def _is_small(file: RemoteFile) -> bool:
    low = file.path.lower()
    return low.endswith(SMALL_SUFFIXES) or is_index(low) or file.size_bytes <= FIRST_BYTES


def _is_described(file: RemoteFile) -> bool:
    """Whether a file can belong to a model; small ones are read completely."""
    return not _is_small(file) or file.size_bytes <= MAX_SMALL_BYTES


def _folders_near(member: Path) -> Iterable[Path]:
    """Return the folders in which tokenizers of a weights file may be."""
    here = member.parent
    return dict.fromkeys((here, here / member.stem, *sorted(here.glob("tokenizer*")), *here.parent.glob("tokenizer*")))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
