"""`Registry`: which files of weights there are, what they are called, and what their hashes are.

Looks at the folders anew with each question, so files that were added later are seen; reads a header once and hashes a
file once, as long as the file does not change. Not thread safe; any number of processes may use one database.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

from modelpool.pool.core.assembly import Assembly
from modelpool.pool.core.errors import AmbiguousName, CorruptFile, OutputFailed, UnknownName, UserError, unknown_name
from modelpool.pool.formats.byte_ranges import ByteRange
from modelpool.pool.formats.model_description import is_description
from modelpool.pool.formats.shard_index import is_index
from modelpool.pool.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES
from modelpool.pool.registry.contents import Contents, Reading
from modelpool.pool.registry.facts import FileFacts, read_facts
from modelpool.pool.registry.folders import (
    PIPELINE_FILE,
    Fingerprint,
    Form,
    Found,
    Place,
    Refused,
    WeightsFile,
    look_through,
    weights_file,
    with_configured,
)
from modelpool.pool.registry.hashes import FileHashes, OnBytes, as_digits, hash_file
from modelpool.pool.registry.kinds import LORAS, MODELS, WITH_COMPONENTS, Kind
from modelpool.pool.registry.listings import LoraListing, ModelListing, list_lora, list_model
from modelpool.pool.registry.model_hash import assembly_hash, hash_whole
from modelpool.pool.registry.names import folded, named, shortest_names
from modelpool.pool.registry.remembered import Alias, HashRecord, Memory, default_folder

T = TypeVar("T")
Listed = TypeVar("Listed", ModelListing, LoraListing)

#: a file that changed so recently may change again without its times showing it: file systems count in ticks, the
#: coarsest (FAT) in two seconds
SETTLED_NS = 2_000_000_000
#: files that an error names one by one
_MOST_NAMED = 8

ANY_KIND: frozenset[Kind | None] = frozenset({*Kind, None})


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of weights that can be named, or would be if it could be used.

    name     the shortest that means it and no other of its kind
    kind     as its keys say, else as its folder does; None where neither does
    hashes   as far as they are known
    aliases  names that people gave it
    """

    name: str
    file: WeightsFile
    facts: FileFacts
    kind: Kind | None
    hashes: FileHashes | None
    aliases: tuple[str, ...]


def open_registry(
    model_folders: Sequence[Path],
    lora_folders: Sequence[Path],
    folder: Path | None = None,
    uses_added: bool = True,
    allow_pickle: bool = False,
    assemblies: Sequence[Assembly] = (),
) -> Registry:
    """The registry of these configured folders and models, whose database is in `folder` (the user's own when None)."""
    places = [Place(path, Kind.CHECKPOINT) for path in model_folders]
    places += [Place(path, Kind.LORA) for path in lora_folders]
    memory = Memory(folder or default_folder())
    return Registry(memory, places, uses_added, allow_pickle=allow_pickle, assemblies=assemblies)


@dataclass(frozen=True, slots=True)
class Listing:
    """All that there is: files, what is not used and why, and downloads that are not done."""

    entries: tuple[Entry, ...]
    refused: tuple[Refused, ...]
    unfinished: tuple[Path, ...]


class Registry:
    """The files of weights in the configured places and in those that people added."""

    def __init__(
        self,
        memory: Memory,
        configured: Sequence[Place] = (),
        uses_added: bool = True,
        now_ns: Callable[[], int] = time.time_ns,
        *,
        allow_pickle: bool = False,
        assemblies: Sequence[Assembly] = (),
    ) -> None:
        """`uses_added` says whether places and aliases that people added count; hashes are remembered in any case.
        `allow_pickle` has PyTorch's pickles read; without it they are known, and refused. `assemblies` are models of
        separate files that a configuration names."""
        self.memory = memory
        self._assemblies = tuple(assemblies)
        self._contents = Contents(memory, now_ns, SETTLED_NS)
        self._configured = tuple(configured)
        self._uses_added = uses_added
        self._allow_pickle = allow_pickle
        self._now_ns = now_ns
        self._facts: dict[tuple[Path, Fingerprint], FileFacts] = {}
        self._listings: dict[object, Any] = {}
        #: hashes that could not be remembered in the database: of files that have just changed, or it cannot be written
        self._hashed: dict[tuple[Path, Fingerprint], FileHashes] = {}
        self._has_complained = False

    def places(self) -> tuple[Place, ...]:
        """Where is looked: the configured places, then the added ones."""
        none: tuple[Path, ...] = ()
        added = self._remembered(self.memory.places, none) if self._uses_added else none
        return (*self._configured, *(Place(path, is_registered=True) for path in added))

    def look(self, *first: Place) -> Found:
        """What lies in `first` and in all places, and the configuration's models. Reads no file but indexes."""
        found = look_through((*first, *self.places()), allow_pickle=self._allow_pickle)
        return with_configured(found, self._assemblies) if self._assemblies else found

    def aliases(self) -> tuple[Alias, ...]:
        """Every alias, by name."""
        none: tuple[Alias, ...] = ()
        return self._remembered(self.memory.aliases, none) if self._uses_added else none

    def listing(self) -> Listing:
        """Every file with what is known of it, by kind and name. Reads headers; hashes nothing."""
        found = self.look()
        records = self._records()
        aliases = self.aliases()
        kinds = {file.path: self.kind(file) for file in found.files}
        names = _names(kinds, {folded(alias.name) for alias in aliases})
        entries, refused = [], list(found.refused)
        for file in found.files:
            facts, hashes = self.facts(file), self._known(file, records.get(str(file.real_path)))
            if facts.problem:
                refused.append(Refused(file.path, facts.problem))
                continue
            own = tuple(alias.name for alias in aliases if _is_target(alias, file, hashes))
            entries.append(Entry(names[file.path], file, facts, kinds[file.path], hashes, own))
        order = list(Kind)
        entries.sort(key=lambda e: (order.index(e.kind) if e.kind else len(order), folded(e.name), e.file.path))
        return Listing(tuple(entries), tuple(sorted(refused, key=lambda r: r.path)), found.unfinished)

    def models(self) -> tuple[ModelListing, ...]:
        """Every checkpoint and diffusion model, by name. Reads the headers of those that are new."""
        return tuple(replace(self._listed(file, list_model), name=name) for name, file in self.files(MODELS))

    def loras(self) -> tuple[LoraListing, ...]:
        """Every LoRA, in the same way."""
        return tuple(replace(self._listed(file, list_lora), name=name) for name, file in self.files(LORAS))

    def files(self, kinds: Collection[Kind | None]) -> tuple[tuple[str, WeightsFile], ...]:
        """Every file that is of one of `kinds` or cannot be read and may be, by its shortest name."""
        found = self.look()
        of_kind = {file.path: file for file in found.files if self.kind(file) in kinds}
        names = _names(dict.fromkeys(of_kind), {folded(alias.name) for alias in self.aliases()})
        return tuple(sorted(((names[path], file) for path, file in of_kind.items()), key=lambda item: item[0]))

    def facts(self, file: WeightsFile) -> FileFacts:
        """What `file` is, read from its header when it is new or has changed."""
        key = (file.path, file.fingerprint)
        if key not in self._facts:
            self._facts[key] = read_facts(file, allow_pickle=self._allow_pickle)
        return self._facts[key]

    def kind(self, file: WeightsFile) -> Kind | None:
        """What `file` is for: as its keys say, else as its folder does."""
        return self.facts(file).kind or file.folder_kind

    def find(self, name: str, kinds: Collection[Kind | None] = ANY_KIND, what: str = "file") -> WeightsFile:
        """The one file of `kinds` that `name` means: a path, an alias, a name, or a hash as Civitai writes them.

        `what` is what people call these kinds. Raises UnknownName, AmbiguousName, or CorruptFile for a file that is
        there and cannot be read: UnsafeFile for one that may not be.
        """
        if (given := _given(name)) is not None:
            if self.facts(given).problem:
                raise self.facts(given).refusal(given.path)
            return given
        found = self.look()
        files = {file.path: file for file in found.files}
        alias = next((a for a in self.aliases() if folded(a.name) == folded(name)), None)
        if alias is not None:
            means = self._behind(alias, found)
        else:
            means = [files[path] for path in named(name, files) if isinstance(path, Path)]
            if not any(self._is_usable(file, kinds) for file in means):
                means += self._called(name, found)
        usable = [file for file in means if self._is_usable(file, kinds)]
        if len({file.real_path for file in usable}) > 1 and not self._are_copies(usable):
            raise _ambiguous(name, what, usable, list(files))
        if not usable:
            raise self._nothing(name, what, kinds, found, means)
        return usable[0]

    def hashes(self, file: WeightsFile, with_data: bool = False, on_bytes: OnBytes = lambda count: None) -> FileHashes:
        """The hashes of `file`, read whole unless they are known; `with_data` asks for AutoV3 too.

        Raises CorruptFile when it cannot be read, or changes while it is.
        """
        known = self._hashed.get((file.real_path, file.fingerprint)) or _valid(
            file, self._remembered(lambda: self.memory.hash_record(str(file.real_path)), None)
        )
        if known is not None and (known.data_sha256 or not with_data or file.form is not Form.FILE):
            return known
        if file.form is Form.ASSEMBLED:  # each file by itself: its hash is remembered whatever it is a part of
            return FileHashes(assembly_hash(file, lambda part: self.hashes(weights_file(Path(part))).sha256))
        began_ns = self._now_ns()
        readings: list[Reading] = []
        begin = self._contents.begin if self.kind(file) in WITH_COMPONENTS else lambda path: None

        def hash_member(path: str | os.PathLike[str]) -> FileHashes:
            reading = begin(path)
            if reading is not None:
                readings.append(reading)
            return hash_file(path, with_data, on_bytes, None if reading is None else reading.digests)

        found = hash_whole(file, hash_member)
        try:
            after = weights_file(file.path).fingerprint
        except OSError:
            after = None
        if after != file.fingerprint:
            raise CorruptFile(f"{file.path}: changed while it was read; try again when it is whole")
        self._hashed[(file.real_path, file.fingerprint)] = found
        for reading in readings:
            self._remembered(partial(self._contents.end, reading), None)
        if began_ns - file.fingerprint.changed_ns > SETTLED_NS:
            record = HashRecord(file.fingerprint, found)
            self._remembered(lambda: self.memory.remember(str(file.real_path), record), None)
        return found

    def digests(self, path: str) -> Mapping[ByteRange, bytes] | None:
        """The digests of the tensors of the single file at `path`, by their ranges: read whole unless they are known;
        None where there are none. Raises CorruptFile when it cannot be read."""
        return self._remembered(lambda: self._contents.of(path), None)

    def _listed(self, file: WeightsFile, look: Callable[[str, WeightsFile, bool], Listed]) -> Listed:
        """What `look` says of `file` in the state that it is in. It says the same of the same state."""
        key = (file.path, file.fingerprint, look)
        if key not in self._listings:
            self._listings[key] = look("", file, self._allow_pickle)
        found: Listed = self._listings[key]
        return found

    def _is_usable(self, file: WeightsFile, kinds: Collection[Kind | None]) -> bool:
        return not self.facts(file).problem and self.kind(file) in kinds

    def _are_copies(self, files: Sequence[WeightsFile]) -> bool:
        """Whether the files have one content: then it does not matter which of them is meant."""
        if len({file.fingerprint.size_bytes for file in files}) > 1:
            return False
        return len({self.hashes(file).sha256 for file in files}) == 1

    def _behind(self, alias: Alias, found: Found) -> list[WeightsFile]:
        """The files that an alias stands for. Raises UnknownName when it stands for nothing that is there."""
        if alias.sha256:
            files = self._called(alias.sha256, found)
        else:
            files = [file for file in found.files if alias.path in (str(file.path), str(file.real_path))]
        if not files:
            where = "no file with that hash is known" if alias.sha256 else "it is not among the files of models"
            raise UnknownName(f"the alias {alias.name!r} stands for {alias.target}: {where}")
        return files

    def _called(self, name: str, found: Found) -> list[WeightsFile]:
        """The files that have `name` for a hash, as far as hashes are known."""
        digits = as_digits(name)
        if digits is None:
            return []
        records = self._records()
        hashed = ((file, self._known(file, records.get(str(file.real_path)))) for file in found.files)
        return [file for file, hashes in hashed if hashes is not None and hashes.is_called(digits)]

    def _nothing(
        self, name: str, what: str, kinds: Collection[Kind | None], found: Found, means: Sequence[WeightsFile]
    ) -> UserError:
        """Why `name` means no file of `kinds`."""
        refused: dict[PurePath, CorruptFile] = {r.path: CorruptFile(f"{r.path}: {r.problem}") for r in found.refused}
        refused |= {file.path: facts.refusal(file.path) for file in means if (facts := self.facts(file)).problem}
        for bad in named(name, refused):
            return refused[bad]
        for file in means:
            kind = self.kind(file)
            is_what = f"a {kind.value}" if kind is not None else "of no known kind"
            return UnknownName(f"{name!r} is {is_what}, expected a {what} ({file.path})")
        # by their folders: to read the headers of thousands of files would take longer than anybody waits for this
        forms = Form if MODELS.intersection(kinds) else (Form.FILE, Form.SHARDED)  # the others are models always
        readable = [file for file in found.files if file.form in forms]
        likely = {file.path: file.folder_kind for file in readable if file.folder_kind in {*kinds, None}}
        names = [*_names(likely, ()).values(), *(alias.name for alias in self.aliases())]
        unknown = unknown_name(what, name, names)
        if as_digits(name) is None:
            hint = f" There is a folder of it here: ./{name}" if _given(f"./{name}") is not None else ""
            return UnknownName(f"{unknown}{hint}")
        records = self._records()
        unread = sum(self._known(file, records.get(str(file.real_path))) is None for file in found.files)
        hint = f" {unread} files were not hashed yet: `modelpool models scan` does it." if unread else ""
        return UnknownName(f"{unknown}{hint}")

    def _records(self) -> dict[str, HashRecord]:
        none: dict[str, HashRecord] = {}
        return self._remembered(self.memory.hashes, none)

    def _known(self, file: WeightsFile, record: HashRecord | None) -> FileHashes | None:
        if file.form is Form.ASSEMBLED:
            return self._known_together(file)
        return self._hashed.get((file.real_path, file.fingerprint)) or _valid(file, record)

    def _known_together(self, file: WeightsFile) -> FileHashes | None:
        """The hash of separate files, where that of each is known."""

        def known(part: str) -> str:
            own = weights_file(Path(part))
            hashes = self._known(own, self._remembered(lambda: self.memory.hash_record(str(own.real_path)), None))
            if hashes is None:
                raise LookupError(part)
            return hashes.sha256

        try:
            return FileHashes(assembly_hash(file, known))
        except (LookupError, OSError, UserError):
            return None

    def _remembered(self, ask: Callable[[], T], otherwise: T) -> T:
        """What the database answers; `otherwise` where it cannot be used, which is told of once."""
        try:
            return ask()
        except OutputFailed as problem:
            if not self._has_complained:
                self._has_complained = True
                warnings.warn(f"{problem}; going on without it", RuntimeWarning, stacklevel=3)
            return otherwise


def _valid(file: WeightsFile, record: HashRecord | None) -> FileHashes | None:
    """The hashes of `record`, where it is of the file as it is now."""
    return record.hashes if record is not None and record.fingerprint == file.fingerprint else None


def _given(name: str) -> WeightsFile | None:
    """The file, or diffusers folder, whose path `name` is. People may name any; only folders are looked through
    warily."""
    path = Path(name)
    try:
        is_called_so = name.lower().endswith((*PLAIN_SUFFIXES, *PICKLE_SUFFIXES)) or is_index(name)
        if (is_called_so or is_description(name)) and path.is_file():
            return weights_file(path)
        # a folder's bare name is a name like others
        if path.name != name and (path / PIPELINE_FILE).is_file():
            return weights_file(path)
    except (OSError, ValueError):  # not to be entered, or no path at all
        return None
    return None


def _names(kinds: Mapping[Path, Kind | None], taken: Collection[str]) -> dict[PurePath, str]:
    """The shortest name of each file among those that are asked for together."""
    groups: dict[object, list[PurePath]] = {}
    for path, kind in kinds.items():
        groups.setdefault(MODELS if kind in MODELS else kind, []).append(path)
    return {path: name for group in groups.values() for path, name in shortest_names(group, taken).items()}


def _is_target(alias: Alias, file: WeightsFile, hashes: FileHashes | None) -> bool:
    if alias.sha256:
        return hashes is not None and alias.sha256 == hashes.sha256
    return alias.path in (str(file.path), str(file.real_path))


def _ambiguous(name: str, what: str, files: Sequence[WeightsFile], all_paths: Sequence[Path]) -> AmbiguousName:
    names = shortest_names(all_paths)
    listed = "; ".join(f"{names[file.path]!r} ({file.path})" for file in files[:_MOST_NAMED])
    more = f"; and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
    return AmbiguousName(
        f"{what} {name!r} can mean {len(files)} files: {listed}{more}. Say one of these names, a path, a hash, or give "
        f"one a name of its own: modelpool models alias NAME {names[files[0].path]}"
    )
