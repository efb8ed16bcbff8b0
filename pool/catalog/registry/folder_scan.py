"""Scans folders for files of weights. Follows no link out of the scanned locations.

Reads no file except the indexes of models in several files, since only they say which files are parts of one, and the
headers of parts with unusual names. Leaves out, with reasons: hidden files, unfinished downloads, links that lead
elsewhere. `pool.catalog.registry.header_summary` determines what a file is for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from modelpool.pool.catalog.registry.file_purpose import FileKind, kind_of_folders
from modelpool.pool.catalog.registry.weight_file_names import without_suffix
from modelpool.pool.files.formats.containment import leads_out
from modelpool.pool.files.formats.gguf_parts import first_part_of, is_split, part_name
from modelpool.pool.files.formats.model_description import is_description
from modelpool.pool.files.formats.shard_index import is_index
from modelpool.pool.files.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES, SAFETENSORS_SUFFIXES, files_of
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.values.core.assembly import Assembly, Source
from modelpool.pool.values.core.errors import CorruptFile

PIPELINE_FILE = "model_index.json"

#: suffixes of unfinished downloads of various programs
UNFINISHED_SUFFIXES = (
    ".part",
    ".partial",
    ".crdownload",
    ".download",
    ".opdownload",
    ".filepart",
    ".incomplete",
    ".aria2",
    ".tmp",
)
#: aria2 writes to the final name and keeps a file with this suffix next to it until it is done
_ARIA2 = ".aria2"
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")

#: maximum number of entries scanned in one model folder, including its subfolders; more is a home folder, or a complete
#: disk
MAX_ENTRIES = 200_000
MAX_DEPTH = 16


class FileForm(Enum):
    """The form of a model on disk."""

    FILE = "file"
    SHARDED = "sharded file"
    FOLDER = "diffusers folder"
    ASSEMBLED = "separate files"


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A folder, or one file, that the user registered or configured as a source of weights.

    kind           kind of its files, if neither their keys nor subfolders determine it
    is_registered  added to the registry, not by a configuration
    """

    path: Path
    kind: FileKind | None = None
    is_registered: bool = False


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The size and both times of a file, to detect changes. Archives and copies preserve the modification time, nothing
    preserves the change time."""

    size_bytes: int
    modified_ns: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file of weights, or what counts as one. Not read yet.

    path       as found, absolute
    real_path  with all links resolved; of an index, only the links of its folder, since its parts are next to its name
    members    the existing files that it is made of; itself, for a single file
    assembly   for separate files named by a configuration: the role of each. `path` is then no file
    """

    path: Path
    real_path: Path
    form: FileForm
    folder_kind: FileKind | None
    fingerprint: Fingerprint
    members: tuple[Path, ...]
    assembly: Assembly | None = None

    @property
    def source(self) -> Source:
        """The source of its weights."""
        return self.assembly or self.path


@dataclass(frozen=True, slots=True)
class RejectedFile:
    """A file that is not used, and why."""

    path: Path
    problem: str


@dataclass(frozen=True, slots=True)
class FolderScan:
    """The contents of some locations, by path. `unfinished` are unfinished downloads."""

    files: tuple[WeightsFile, ...]
    refused: tuple[RejectedFile, ...]
    unfinished: tuple[Path, ...]


def scan_locations(locations: Sequence[ModelLocation], *, allow_pickle: bool = False) -> FolderScan:
    """Return the contents of `locations`. A configured location that does not exist is empty; a registered one is
    refused.

    `allow_pickle` allows reading indexes of pickles too.
    """
    search = _Scanner(tuple(os.path.realpath(place.path) for place in locations), allow_pickle)
    for place in locations:
        search.scan(place)
    return FolderScan(
        tuple(search.files[path] for path in sorted(search.files)),
        tuple(search.refused[path] for path in sorted(search.refused)),
        tuple(sorted(search.unfinished)),
    )


def weights_file(path: Path, kind: FileKind | None = None) -> WeightsFile:
    """Return the file, or diffusers folder, at `path`. Raises OSError."""
    path = Path(os.path.abspath(path))
    real_path = Path(os.path.realpath(path))
    if real_path.is_dir():
        members = tuple(_folder_members(real_path))
        return WeightsFile(path, real_path, FileForm.FOLDER, kind, _fingerprint(members), members)
    if _is_multi_file(path):
        form = FileForm.ASSEMBLED if is_description(path) else FileForm.SHARDED
        real_path = Path(os.path.realpath(path.parent), path.name)
        members = tuple(part for part in _parts_of(path) if part.exists())
        return WeightsFile(path, real_path, form, kind, _fingerprint(members), members)
    return WeightsFile(path, real_path, FileForm.FILE, kind, _fingerprint([real_path]), (real_path,))


def _configured_model(assembly: Assembly) -> WeightsFile:
    """Return a model of separate files named by a configuration. Raises OSError if one does not exist."""
    path, members = Path(assembly.path), tuple(map(Path, assembly.files))
    states = [weights_file(member) for member in members]
    return WeightsFile(
        path,
        path,
        FileForm.ASSEMBLED,
        FileKind.CHECKPOINT,
        _combined([s.fingerprint for s in states]),
        members,
        assembly,
    )


@dataclass(slots=True)
class _Scanner:
    """One scan of some locations. `allowed` are the real paths of all of them: links may lead into any."""

    allowed: tuple[str, ...]
    allow_pickle: bool
    files: dict[Path, WeightsFile] = field(default_factory=dict)
    refused: dict[Path, RejectedFile] = field(default_factory=dict)
    unfinished: set[Path] = field(default_factory=set)
    visited_folders: set[tuple[int, int]] = field(default_factory=set)
    #: per folder: its real path and the kind of its files; the same for all files in it
    real_folders: dict[Path, Path] = field(default_factory=dict)
    folder_kinds: dict[tuple[Path, ModelLocation], FileKind | None] = field(default_factory=dict)
    entry_count: int = 0

    def scan(self, place: ModelLocation) -> None:
        """Scan one location."""
        self.entry_count = 0
        if os.path.isdir(place.path):  # unlike Path's, no error if a parent folder is not accessible
            self._folder(place.path, place, 0)
        elif os.path.isfile(place.path):
            self._file(place.path, place)
        elif place.is_registered:
            self._refuse(place.path, "does not exist; `modelpool models remove` removes it from the registry")

    def _folder(self, folder: Path, place: ModelLocation, depth: int) -> None:
        try:
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in self.visited_folders:
                return
            self.visited_folders.add(identity)
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            self._refuse(folder, f"cannot be scanned: {error.strerror or error}")
            return
        self.entry_count += len(entries)
        if self.entry_count > MAX_ENTRIES:
            self._refuse(place.path, f"contains more than {MAX_ENTRIES} files and folders; not all were scanned")
            return
        names = {entry.name for entry in entries}
        if PIPELINE_FILE in names:
            self._add(folder, place)
            return
        indexes = [name for name in names if is_index(name) and not name.startswith(".")]
        indexed = {without_suffix(name) for name in indexes}
        parts = {part for index in indexes for part in self._confirmed_parts(folder / index, names, indexed)}
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                # a location inside another one is scanned separately, with its own kind
                if os.path.realpath(path) in self.allowed:
                    continue
                if depth < MAX_DEPTH:
                    self._folder(path, place, depth + 1)
                else:
                    self._refuse(path, f"is more than {MAX_DEPTH} folders deep, and was not scanned")
            elif entry.is_symlink() and os.path.isdir(path):
                # a link into a scanned location is found there
                self._allows(path)
            elif entry.name not in parts and not self._is_shard(entry.name, indexed, names, path):
                self._entry(path, place, names)

    def _confirmed_parts(self, index: Path, names: set[str], indexed: set[str]) -> set[str]:
        """Return the `names` that are parts of `index` and not separate models. An index may name unrelated files:
        a file without the name of a part counts as one only if the index and its parts agree."""
        parts = {part.name for part in _parts_of(index)[1:]} & names
        if all(_model_name_of_shard(name) in indexed for name in parts):
            return parts
        try:
            read_weights_header(index, allow_pickle=self.allow_pickle)
        except CorruptFile:
            return set()
        return parts

    def _is_shard(self, name: str, indexed: set[str], names: set[str], path: Path) -> bool:
        """Whether this has the name of a part of a model in several files, which may be missing from every index."""
        part = part_name(name)
        if part is not None and part.number > 1:
            if first_part_of(name, names) is None:
                self._refuse(path, f"one of several parts, and the first, {part.sibling(1)}, is missing")
            return True
        whole = _model_name_of_shard(name)
        if whole is None or (whole not in indexed and not name.lower().endswith(SAFETENSORS_SUFFIXES)):
            return False
        if whole not in indexed:
            self._refuse(path, f"one of several parts, and {whole}.safetensors.index.json is missing")
        return True

    def _entry(self, path: Path, place: ModelLocation, names: set[str]) -> None:
        low = path.name.lower()
        if low.endswith(UNFINISHED_SUFFIXES):
            stem = low[: low.rindex(".")]
            if stem.endswith((*PLAIN_SUFFIXES, *PICKLE_SUFFIXES)) or low.startswith("unconfirmed "):
                self.unfinished.add(path)
        elif path.name + _ARIA2 in names:
            self.unfinished.add(path)
        elif low.endswith(PLAIN_SUFFIXES) or _names_safetensors(path):
            self._file(path, place)
        elif (low.endswith(PICKLE_SUFFIXES) or is_index(path)) and self._kind_of(path, place) is not None:
            # many other files have these suffixes; `pool.catalog.registry.header_summary` decides whether those that
            # are weights may be read
            self._file(path, place)

    def _file(self, path: Path, place: ModelLocation) -> None:
        if not _is_multi_file(path) and not os.path.islink(path):
            self._single_file(path, place)
        elif path == place.path or not os.path.islink(path) or self._allows(path):
            self._add(path, place)  # the user chose the location itself, wherever it leads

    def _single_file(self, path: Path, place: ModelLocation) -> None:
        """Do what `_add` does, with only one disk access, for a single file that is no link, as nearly all are."""
        folder = path.parent
        if folder not in self.real_folders:
            self.real_folders[folder] = Path(os.path.realpath(folder))
        try:
            str(path).encode("utf-8")
            real_path = self.real_folders[folder] / path.name
            file = WeightsFile(
                path, real_path, FileForm.FILE, self._kind_of(path, place), _fingerprint([real_path]), (real_path,)
            )
        except UnicodeEncodeError:
            self._refuse(path, "its name is not valid UTF-8")
        except OSError as error:
            self._refuse(path, f"cannot be read: {error.strerror or error}")
        else:
            self.files.setdefault(path, file)

    def _add(self, path: Path, place: ModelLocation) -> None:
        try:
            str(path).encode("utf-8")
            file = weights_file(path, self._kind_of(path, place))
            if file.form is FileForm.FILE or all(self._allows(member, path) for member in file.members):
                self.files.setdefault(path, file)
        except UnicodeEncodeError:
            self._refuse(path, "its name is not valid UTF-8")
        except OSError as error:
            self._refuse(path, f"cannot be read: {error.strerror or error}")

    def _allows(self, link: Path, whole: Path | None = None) -> bool:
        """Whether `link` leads to an allowed file; else it is refused, or the `whole` that it is a part of."""
        target = os.path.realpath(link)
        what = "a link" if whole is None else f"its part {link.name} is a link"
        if not os.path.exists(target):
            self._refuse(whole or link, f"{what} to {target}, which does not exist")
        elif all(leads_out(link, root) for root in self.allowed):
            self._refuse(whole or link, f"{what} out of the folder, to {target}; add that path to use it")
        else:
            return True
        return False

    def _refuse(self, path: Path, problem: str) -> None:
        # an invalid name could not be printed
        printable = Path(str(path).encode("utf-8", "backslashreplace").decode("utf-8"))
        self.refused.setdefault(printable, RejectedFile(printable, problem))

    def _kind_of(self, path: Path, place: ModelLocation) -> FileKind | None:
        """Return the kind according to the subfolders of the location, else the location, else its parent folders."""
        key = (path.parent, place)
        if key not in self.folder_kinds:
            below = path.relative_to(place.path).parts[:-1] if path != place.path else ()
            around = place.path.parts if path != place.path else place.path.parts[:-1]
            self.folder_kinds[key] = kind_of_folders(reversed(below)) or place.kind or kind_of_folders(reversed(around))
        return self.folder_kinds[key]


def with_configured(found: FolderScan, assemblies: Sequence[Assembly]) -> FolderScan:
    """Return `found` with the models that a configuration names."""
    files, refused = list(found.files), list(found.refused)
    for assembly in assemblies:
        try:
            files.append(_configured_model(assembly))
        except OSError as error:
            problem = f"{error.filename}: cannot be read: {error.strerror or error}"
            refused.append(RejectedFile(Path(assembly.path), problem))
    return replace(found, files=tuple(files), refused=tuple(refused))


def _is_multi_file(path: Path) -> bool:
    """Whether the file represents several: an index, a description, the first part of a split GGUF file."""
    return is_index(path) or is_description(path) or is_split(path)


def _names_safetensors(path: Path) -> bool:
    """Whether the file, by its name, lists safetensors files: a description, or an index."""
    return is_description(path) or (is_index(path) and SAFETENSORS_SUFFIXES[0] in path.name.lower())


def _model_name_of_shard(name: str) -> str | None:
    """Return the model name in the name of a shard; None for another name."""
    if not name.lower().endswith((*SAFETENSORS_SUFFIXES, *PICKLE_SUFFIXES)):
        return None
    part = _SHARD.fullmatch(without_suffix(name))
    return None if part is None else part[1]


def _parts_of(index: Path) -> tuple[Path, ...]:
    """Return the file and those that it lists, existing or not; itself alone if it is damaged, which is reported when
    it is read."""
    try:
        return tuple(map(Path, files_of(index)))
    except CorruptFile:
        return (index,)


def _folder_members(folder: Path) -> Iterator[Path]:
    """Yield the files of a diffusers folder that determine its results."""
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith((*SAFETENSORS_SUFFIXES, ".json", ".txt", ".model")) and not name.startswith("."):
                yield Path(base, name)


def _fingerprint(members: Sequence[Path]) -> Fingerprint:
    """Return the fingerprint of several files: their total size, and the latest of their times."""
    states = [os.stat(path) for path in members]
    return _combined([Fingerprint(state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states])


def _combined(states: Sequence[Fingerprint]) -> Fingerprint:
    return Fingerprint(
        sum(state.size_bytes for state in states),
        max((state.modified_ns for state in states), default=0),
        max((state.changed_ns for state in states), default=0),
    )
