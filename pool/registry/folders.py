"""Looks through folders for files of weights. Follows no link out of what it was told to look through.

Reads no file but the indexes of models in several files, since only they tell which files are parts of one, and the
headers of parts that are not called so. Knows what is left out and why: hidden files, downloads that are not done,
links that lead elsewhere. What a file is for is told by `pool.registry.facts`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from modelpool.pool.core.assembly import Assembly, Source
from modelpool.pool.core.errors import CorruptFile
from modelpool.pool.formats.containment import leads_out
from modelpool.pool.formats.gguf_parts import is_split, part_name, stands_for
from modelpool.pool.formats.model_description import is_description
from modelpool.pool.formats.shard_index import is_index
from modelpool.pool.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES, SAFETENSORS_SUFFIXES, files_of
from modelpool.pool.loading.weights_header import read_weights_header
from modelpool.pool.registry.kinds import Kind, kind_of_folders
from modelpool.pool.registry.names import without_ending

PIPELINE_FILE = "model_index.json"

#: how programs that download call what is not done
UNFINISHED_ENDINGS = (
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
#: aria2 writes to the file's own name and keeps this beside it until it is done
_ARIA2 = ".aria2"
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")

#: what is looked at in one folder of models, with all that is in it; more is a home folder, or a whole disk
MOST_ENTRIES = 200_000
MOST_FOLDERS_DEEP = 16


class Form(Enum):
    """How a model lies on the disk."""

    FILE = "file"
    SHARDED = "sharded file"
    FOLDER = "diffusers folder"
    ASSEMBLED = "separate files"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder, or one file, that a person said holds weights.

    kind           what the files there are for, where neither their keys nor folders below say
    is_registered  added to the registry, and not by a configuration
    """

    path: Path
    kind: Kind | None = None
    is_registered: bool = False


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What shows that a file was changed: its size and both of its times. Archives and copies keep the modification
    time, nothing keeps the change time."""

    size_bytes: int
    modified_ns: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file of weights, or what counts as one. Nobody has read it yet.

    path       as it was found, absolute
    real_path  with every link resolved; of an index, with those of its folder, since its parts are beside its name
    members    the files that it is made of, as far as they are there; itself, of a single file
    assembly   of separate files that a configuration names: what each is for. `path` is then no file
    """

    path: Path
    real_path: Path
    form: Form
    folder_kind: Kind | None
    fingerprint: Fingerprint
    members: tuple[Path, ...]
    assembly: Assembly | None = None

    @property
    def source(self) -> Source:
        """Where its weights are."""
        return self.assembly or self.path


@dataclass(frozen=True, slots=True)
class Refused:
    """Something that is not used, and why."""

    path: Path
    problem: str


@dataclass(frozen=True, slots=True)
class Found:
    """What some places hold, by path. `unfinished` are downloads that are not done."""

    files: tuple[WeightsFile, ...]
    refused: tuple[Refused, ...]
    unfinished: tuple[Path, ...]


def look_through(places: Sequence[Place], *, allow_pickle: bool = False) -> Found:
    """All that lies in `places`. A configured place that is not there is empty; a registered one is refused.

    `allow_pickle` has indexes of pickles read too, as far as they are read at all.
    """
    search = _Search(tuple(os.path.realpath(place.path) for place in places), allow_pickle)
    for place in places:
        search.look_at(place)
    return Found(
        tuple(search.files[path] for path in sorted(search.files)),
        tuple(search.refused[path] for path in sorted(search.refused)),
        tuple(sorted(search.unfinished)),
    )


def weights_file(path: Path, kind: Kind | None = None) -> WeightsFile:
    """The file, or diffusers folder, at `path`, wherever it lies. Raises OSError."""
    path = Path(os.path.abspath(path))
    real_path = Path(os.path.realpath(path))
    if real_path.is_dir():
        members = tuple(_folder_members(real_path))
        return WeightsFile(path, real_path, Form.FOLDER, kind, _fingerprint(members), members)
    if _is_several(path):
        form = Form.ASSEMBLED if is_description(path) else Form.SHARDED
        real_path = Path(os.path.realpath(path.parent), path.name)
        members = tuple(part for part in _parts_of(path) if part.exists())
        return WeightsFile(path, real_path, form, kind, _fingerprint(members), members)
    return WeightsFile(path, real_path, Form.FILE, kind, _fingerprint([real_path]), (real_path,))


def _configured_model(assembly: Assembly) -> WeightsFile:
    """A model of separate files that a configuration names. Raises OSError when one is not there."""
    path, members = Path(assembly.path), tuple(map(Path, assembly.files))
    states = [weights_file(member) for member in members]
    return WeightsFile(
        path, path, Form.ASSEMBLED, Kind.CHECKPOINT, _together([s.fingerprint for s in states]), members, assembly
    )


@dataclass(slots=True)
class _Search:
    """One look through some places. `allowed` are the real paths of all of them: links may lead into any."""

    allowed: tuple[str, ...]
    allow_pickle: bool
    files: dict[Path, WeightsFile] = field(default_factory=dict)
    refused: dict[Path, Refused] = field(default_factory=dict)
    unfinished: set[Path] = field(default_factory=set)
    folders_seen: set[tuple[int, int]] = field(default_factory=set)
    #: of each folder: where it really is, and what it says that its files are for; the same for all files in it
    real_folders: dict[Path, Path] = field(default_factory=dict)
    folder_kinds: dict[tuple[Path, Place], Kind | None] = field(default_factory=dict)
    entries_seen: int = 0

    def look_at(self, place: Place) -> None:
        """Take in one place."""
        self.entries_seen = 0
        if os.path.isdir(place.path):  # unlike Path's, no error where a folder above cannot be entered
            self._folder(place.path, place, 0)
        elif os.path.isfile(place.path):
            self._file(place.path, place)
        elif place.is_registered:
            self._refuse(place.path, "is not there now; `modelpool models remove` forgets it")

    def _folder(self, folder: Path, place: Place, depth: int) -> None:
        try:
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in self.folders_seen:
                return
            self.folders_seen.add(identity)
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            self._refuse(folder, f"cannot be looked through: {error.strerror or error}")
            return
        self.entries_seen += len(entries)
        if self.entries_seen > MOST_ENTRIES:
            self._refuse(place.path, f"holds more than {MOST_ENTRIES} files and folders; not all were looked at")
            return
        names = {entry.name for entry in entries}
        if PIPELINE_FILE in names:
            self._take(folder, place)
            return
        indexes = [name for name in names if is_index(name) and not name.startswith(".")]
        indexed = {without_ending(name) for name in indexes}
        parts = {part for index in indexes for part in self._parts_for_sure(folder / index, names, indexed)}
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                # a place within a place is looked at by itself, for what it was said to hold
                if os.path.realpath(path) in self.allowed:
                    continue
                if depth < MOST_FOLDERS_DEEP:
                    self._folder(path, place, depth + 1)
                else:
                    self._refuse(path, f"lies more than {MOST_FOLDERS_DEEP} folders deep, and was not looked at")
            elif entry.is_symlink() and os.path.isdir(path):
                # one that leads to what is looked through anyway is found there
                self._allows(path)
            elif entry.name not in parts and not self._is_shard(entry.name, indexed, names, path):
                self._entry(path, place, names)

    def _parts_for_sure(self, index: Path, names: set[str], indexed: set[str]) -> set[str]:
        """Which of `names` are parts of `index` and no models of their own. Anybody can write an index that names
        other people's files: what is not called as a part is one only where the index and its parts agree."""
        parts = {part.name for part in _parts_of(index)[1:]} & names
        if all(_whole_of(name) in indexed for name in parts):
            return parts
        try:
            read_weights_header(index, allow_pickle=self.allow_pickle)
        except CorruptFile:
            return set()
        return parts

    def _is_shard(self, name: str, indexed: set[str], names: set[str], path: Path) -> bool:
        """Whether this is called as a part of a model in several files is, which no index may name."""
        part = part_name(name)
        if part is not None and part.number > 1:
            if stands_for(name, names) is None:
                self._refuse(path, f"one of several parts, and the first, {part.named(1)}, is not beside it")
            return True
        whole = _whole_of(name)
        if whole is None or (whole not in indexed and not name.lower().endswith(SAFETENSORS_SUFFIXES)):
            return False
        if whole not in indexed:
            self._refuse(path, f"one of several parts, and {whole}.safetensors.index.json is not beside it")
        return True

    def _entry(self, path: Path, place: Place, names: set[str]) -> None:
        low = path.name.lower()
        if low.endswith(UNFINISHED_ENDINGS):
            stem = low[: low.rindex(".")]
            if stem.endswith((*PLAIN_SUFFIXES, *PICKLE_SUFFIXES)) or low.startswith("unconfirmed "):
                self.unfinished.add(path)
        elif path.name + _ARIA2 in names:
            self.unfinished.add(path)
        elif low.endswith(PLAIN_SUFFIXES) or _names_safetensors(path):
            self._file(path, place)
        elif (low.endswith(PICKLE_SUFFIXES) or is_index(path)) and self._kind_of(path, place) is not None:
            # many other files end so; of those that are weights, `pool.registry.facts` says whether they may be read
            self._file(path, place)

    def _file(self, path: Path, place: Place) -> None:
        if not _is_several(path) and not os.path.islink(path):
            self._plain(path, place)
        elif path == place.path or not os.path.islink(path) or self._allows(path):
            self._take(path, place)  # a place itself was named by a person, wherever it leads

    def _plain(self, path: Path, place: Place) -> None:
        """What `_take` does for a single file that is no link, as nearly all are, with one question to the disk."""
        folder = path.parent
        if folder not in self.real_folders:
            self.real_folders[folder] = Path(os.path.realpath(folder))
        try:
            str(path).encode("utf-8")
            real_path = self.real_folders[folder] / path.name
            file = WeightsFile(
                path, real_path, Form.FILE, self._kind_of(path, place), _fingerprint([real_path]), (real_path,)
            )
        except UnicodeEncodeError:
            self._refuse(path, "its name is no text in UTF-8")
        except OSError as error:
            self._refuse(path, f"cannot be read: {error.strerror or error}")
        else:
            self.files.setdefault(path, file)

    def _take(self, path: Path, place: Place) -> None:
        try:
            str(path).encode("utf-8")
            file = weights_file(path, self._kind_of(path, place))
            if file.form is Form.FILE or all(self._allows(member, path) for member in file.members):
                self.files.setdefault(path, file)
        except UnicodeEncodeError:
            self._refuse(path, "its name is no text in UTF-8")
        except OSError as error:
            self._refuse(path, f"cannot be read: {error.strerror or error}")

    def _allows(self, link: Path, whole: Path | None = None) -> bool:
        """Whether `link` leads to what may be used; else it is refused, or the `whole` that it is a part of."""
        target = os.path.realpath(link)
        what = "a link" if whole is None else f"its part {link.name} is a link"
        if not os.path.exists(target):
            self._refuse(whole or link, f"{what} to {target}, which is not there")
        elif all(leads_out(link, root) for root in self.allowed):
            self._refuse(whole or link, f"{what} out of the folder, to {target}; add that if it is to be used")
        else:
            return True
        return False

    def _refuse(self, path: Path, problem: str) -> None:
        # a name that is no text could be shown nowhere
        shown = Path(str(path).encode("utf-8", "backslashreplace").decode("utf-8"))
        self.refused.setdefault(shown, Refused(shown, problem))

    def _kind_of(self, path: Path, place: Place) -> Kind | None:
        """As the folders below the place say, else the place itself, else the folders that it lies in."""
        key = (path.parent, place)
        if key not in self.folder_kinds:
            below = path.relative_to(place.path).parts[:-1] if path != place.path else ()
            around = place.path.parts if path != place.path else place.path.parts[:-1]
            self.folder_kinds[key] = kind_of_folders(reversed(below)) or place.kind or kind_of_folders(reversed(around))
        return self.folder_kinds[key]


def with_configured(found: Found, assemblies: Sequence[Assembly]) -> Found:
    """`found` and the models that a configuration names."""
    files, refused = list(found.files), list(found.refused)
    for assembly in assemblies:
        try:
            files.append(_configured_model(assembly))
        except OSError as error:
            problem = f"{error.filename}: cannot be read: {error.strerror or error}"
            refused.append(Refused(Path(assembly.path), problem))
    return replace(found, files=tuple(files), refused=tuple(refused))


def _is_several(path: Path) -> bool:
    """Whether the file stands for several: an index, a description, the first part of a split GGUF file."""
    return is_index(path) or is_description(path) or is_split(path)


def _names_safetensors(path: Path) -> bool:
    """Whether the file is called as one that names files of safetensors: a description, or an index."""
    return is_description(path) or (is_index(path) and SAFETENSORS_SUFFIXES[0] in path.name.lower())


def _whole_of(name: str) -> str | None:
    """What the model is called that the file `name` is a part of, as its name says; None for another name."""
    if not name.lower().endswith((*SAFETENSORS_SUFFIXES, *PICKLE_SUFFIXES)):
        return None
    part = _SHARD.fullmatch(without_ending(name))
    return None if part is None else part[1]


def _parts_of(index: Path) -> tuple[Path, ...]:
    """The file and those that it stands for, there or not; itself alone where it is damaged, which is told when it is
    read."""
    try:
        return tuple(map(Path, files_of(index)))
    except CorruptFile:
        return (index,)


def _folder_members(folder: Path) -> Iterator[Path]:
    """The files of a diffusers folder that say what it computes."""
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith((*SAFETENSORS_SUFFIXES, ".json", ".txt", ".model")) and not name.startswith("."):
                yield Path(base, name)


def _fingerprint(members: Sequence[Path]) -> Fingerprint:
    """Of several files: their size together, and the latest of their times."""
    states = [os.stat(path) for path in members]
    return _together([Fingerprint(state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states])


def _together(states: Sequence[Fingerprint]) -> Fingerprint:
    return Fingerprint(
        sum(state.size_bytes for state in states),
        max((state.modified_ns for state in states), default=0),
        max((state.changed_ns for state in states), default=0),
    )
