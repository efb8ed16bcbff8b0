"""`Registry`: the files of weights of this machine, their names and their hashes.

Scans the folders for each request, so files added later are found; reads a header once and hashes a file once, as long
as the file does not change. Not thread safe; any number of processes may use one database.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from modelpool.pool.catalog.registry.contents import ContentDigests, DigestPass
from modelpool.pool.catalog.registry.file_purpose import (
    CONTROLNETS,
    EMBEDDINGS,
    GLIGENS,
    IMAGE_PROMPTS,
    LORAS,
    MODELS,
    UPSCALERS,
    VISION_ENCODERS,
    WITH_COMPONENTS,
    FileKind,
)
from modelpool.pool.catalog.registry.folder_scan import (
    PIPELINE_FILE,
    FileForm,
    Fingerprint,
    FolderScan,
    ModelLocation,
    RejectedFile,
    WeightsFile,
    scan_locations,
    weights_file,
    with_configured,
)
from modelpool.pool.catalog.registry.hashes import FileHashes, OnBytes, as_digits, hash_file
from modelpool.pool.catalog.registry.header_summary import FileSummary, read_facts
from modelpool.pool.catalog.registry.hub_names import HubName, cached_weights, is_of_repository
from modelpool.pool.catalog.registry.listings import FileNames, LoraListing, ModelListing, list_lora, list_model
from modelpool.pool.catalog.registry.model_hash import assembly_hash, hash_whole
from modelpool.pool.catalog.registry.registry_store import Alias, HashRecord, RegistryStore, open_store
from modelpool.pool.catalog.registry.weight_file_names import folded, named, shortest_names
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.files.formats.model_description import is_description
from modelpool.pool.files.formats.shard_index import is_index
from modelpool.pool.files.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import (
    AmbiguousName,
    CorruptFile,
    OutputFailed,
    UnknownName,
    UserError,
    counted,
    unknown_name,
)
from modelpool.pool.values.core.remote_file import RemoteFile

if TYPE_CHECKING:
    from modelpool.pool.catalog.registry.remote_models import RemoteModels

T = TypeVar("T")
Listed = TypeVar("Listed", ModelListing, LoraListing)

#: a file that changed this recently may change again with equal times: file systems have a time resolution, the
#: coarsest (FAT) of two seconds
SETTLED_NS = 2_000_000_000
#: maximum number of files listed in an error
_MAX_LISTED = 8

ANY_KIND: frozenset[FileKind | None] = frozenset({*FileKind, None})


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """One file of weights that can be named.

    name     the shortest that means it and no other of its kind
    kind     according to its keys, else its folder; None if neither determines it
    hashes   those known so far
    aliases  its aliases
    """

    name: str
    file: WeightsFile
    facts: FileSummary
    kind: FileKind | None
    hashes: FileHashes | None
    aliases: tuple[str, ...]


def open_registry(
    model_folders: Sequence[Path],
    lora_folders: Sequence[Path],
    folder: Path | None = None,
    uses_added: bool = True,
    allow_pickle: bool = False,
    assemblies: Sequence[Assembly] = (),
    remote: RemoteModels | None = None,
) -> Registry:
    """Open the registry of these configured folders and models, with its database in `folder` (None: the user's
    default), and of the `remote` ones."""
    locations = [ModelLocation(path, FileKind.CHECKPOINT) for path in model_folders]
    locations += [ModelLocation(path, FileKind.LORA) for path in lora_folders]
    store = open_store(folder)
    return Registry(store, locations, uses_added, allow_pickle=allow_pickle, assemblies=assemblies, remote=remote)


@dataclass(frozen=True, slots=True)
class RegistryListing:
    """All files: usable ones, those not used and why, and unfinished downloads."""

    entries: tuple[RegistryEntry, ...]
    refused: tuple[RejectedFile, ...]
    unfinished: tuple[Path, ...]


class Registry:
    """The files of weights in the configured locations and in those that users added."""

    def __init__(
        self,
        store: RegistryStore,
        configured: Sequence[ModelLocation] = (),
        uses_added: bool = True,
        now_ns: Callable[[], int] = time.time_ns,
        *,
        allow_pickle: bool = False,
        assemblies: Sequence[Assembly] = (),
        remote: RemoteModels | None = None,
    ) -> None:
        """`uses_added`: include locations and aliases that users added; hashes are stored in any case. `allow_pickle`:
        read PyTorch's pickles; otherwise they are listed, and refused. `assemblies`: models of separate files that a
        configuration names. `remote`: files of sources."""
        self.store = store
        self.remote = remote
        self._assemblies = tuple(assemblies)
        self._contents = ContentDigests(store, now_ns, SETTLED_NS)
        self._configured = tuple(configured)
        self._uses_added = uses_added
        self._allow_pickle = allow_pickle
        self._now_ns = now_ns
        self._facts: dict[tuple[Path, Fingerprint], FileSummary] = {}
        self._listings: dict[object, Any] = {}
        #: hashes that could not be stored in the database: of files that have just changed, or the database is not
        #: writable
        self._hashed: dict[tuple[Path, Fingerprint], FileHashes] = {}
        self._has_warned = False

    def locations(self) -> tuple[ModelLocation, ...]:
        """Return the scanned locations: the configured ones, then the added ones."""
        none: tuple[Path, ...] = ()
        added = self._stored(self.store.locations, none) if self._uses_added else none
        fetched = () if self.remote is None else self.remote.folders()
        return (
            *self._configured,
            *(ModelLocation(path, FileKind.CHECKPOINT) for path in fetched),
            *(ModelLocation(path, is_registered=True) for path in added),
        )

    def scan(self, *first: ModelLocation) -> FolderScan:
        """Return the contents of `first` and of all locations, and the configuration's models. Reads no file except
        indexes."""
        found = scan_locations((*first, *self.locations()), allow_pickle=self._allow_pickle)
        return with_configured(found, self._assemblies) if self._assemblies else found

    def aliases(self) -> tuple[Alias, ...]:
        """Return every alias, by name."""
        none: tuple[Alias, ...] = ()
        return self._stored(self.store.aliases, none) if self._uses_added else none

    def listing(self) -> RegistryListing:
        """Return every file with its known facts, by kind and name. Reads headers; hashes nothing."""
        found = self.scan()
        records = self._records()
        aliases = self.aliases()
        kinds = {file.path: self.kind(file) for file in found.files}
        names = _names(kinds, self._alias_names(found))
        entries, refused = [], list(found.refused)
        for file in found.files:
            facts, hashes = self.facts(file), self._known_hashes(file, records.get(str(file.real_path)))
            if facts.problem:
                refused.append(RejectedFile(file.path, facts.problem))
                continue
            alias_names = tuple(alias.name for alias in aliases if _is_target(alias, file, hashes))
            entries.append(RegistryEntry(names[file.path], file, facts, kinds[file.path], hashes, alias_names))
        order = list(FileKind)
        entries.sort(key=lambda e: (order.index(e.kind) if e.kind else len(order), folded(e.name), e.file.path))
        return RegistryListing(tuple(entries), tuple(sorted(refused, key=lambda r: r.path)), found.unfinished)

    def models(self) -> tuple[ModelListing, ...]:
        """Return every checkpoint and diffusion model, by name. Reads the headers of new ones."""
        return tuple(replace(self._listed(file, list_model), name=name) for name, file in self.files(MODELS))

    def loras(self) -> tuple[LoraListing, ...]:
        """Return every LoRA, by name. Reads the headers of new ones."""
        return tuple(replace(self._listed(file, list_lora), name=name) for name, file in self.files(LORAS))

    def files(self, kinds: Collection[FileKind | None]) -> tuple[tuple[str, WeightsFile], ...]:
        """Return every file that is of one of `kinds`, or may be but cannot be read, by its shortest name."""
        found = self.scan()
        of_kind = {file.path: file for file in found.files if self.kind(file) in kinds}
        names = _names(dict.fromkeys(of_kind), self._alias_names(found))
        return tuple(sorted(((names[path], file) for path, file in of_kind.items()), key=lambda item: item[0]))

    def file_names(self) -> FileNames:
        """Return the names of the usable files that are neither models nor LoRAs. Reads the headers of new ones."""
        found = self.scan()
        kinds = {file.path: kind for file in found.files if (kind := self.kind(file)) and not self.facts(file).problem}
        names = _names(kinds, self._alias_names(found))

        def of(kind: FileKind) -> tuple[str, ...]:
            return tuple(sorted(names[path] for path, each in kinds.items() if each is kind))

        controlnets, upscalers, gligens = of(FileKind.CONTROLNET), of(FileKind.UPSCALER), of(FileKind.GLIGEN)
        return FileNames(controlnets, upscalers, of(FileKind.IMAGE_PROMPT), of(FileKind.EMBEDDING), gligens=gligens)

    def facts(self, file: WeightsFile) -> FileSummary:
        """Return the summary of `file`, read from its header if it is new or has changed."""
        key = (file.path, file.fingerprint)
        if key not in self._facts:
            self._facts[key] = read_facts(file, allow_pickle=self._allow_pickle)
        return self._facts[key]

    def kind(self, file: WeightsFile) -> FileKind | None:
        """Return the kind of `file` according to its keys, else its folder."""
        return self.facts(file).kind or file.folder_kind

    def find(self, name: str, kinds: Collection[FileKind | None] = ANY_KIND, what: str = "file") -> WeightsFile:
        """Return the one file of `kinds` that `name` means: a path, an alias of a known file, a name, a hash as Civitai
        writes them, or a name on the Hugging Face hub with files in the hub's cache.

        `what` is the user's term for these kinds. Raises UnknownName, AmbiguousName, or CorruptFile for a file that
        cannot be read: UnsafeFile for one that may not be.
        """
        if (at_path := _file_at_path(name)) is not None:
            if self.facts(at_path).problem:
                raise self.facts(at_path).refusal(at_path.path)
            return at_path
        found = self.scan()
        files = {file.path: file for file in found.files}
        alias = next((a for a in self.aliases() if folded(a.name) == folded(name)), None)
        candidates = [files[path] for path in named(name, files) if isinstance(path, Path)]
        targets = [] if alias is None else self._alias_targets(alias, found)
        if alias is not None and (targets or not candidates):
            candidates = targets
            if not targets:
                where = "no file with that hash is known" if alias.sha256 else "it is not among the known model files"
                raise UnknownName(f"the alias {alias.name!r} stands for {alias.target}: {where}")
        else:
            if not any(self._is_usable(file, kinds) for file in candidates):
                candidates += self._with_hash(name, found)
        usable = [file for file in candidates if self._is_usable(file, kinds)]
        if len({file.real_path for file in usable}) > 1 and not self._are_copies(usable):
            raise _ambiguous(name, what, usable, list(files))
        if not usable:
            usable = self._fetched(name, what, kinds, found)
        if not usable and (cached := cached_weights(name)) is not None:
            usable = [file for file in (weights_file(cached),) if self._is_usable(file, kinds)]
        if not usable:
            raise self._not_found(name, what, kinds, found, candidates)
        return usable[0]

    def _fetched(
        self, name: str, what: str, kinds: Collection[FileKind | None], found: FolderScan
    ) -> list[WeightsFile]:
        """Return the usable files of the repository `name` on the hub that were fetched into a folder of models, one
        file or copies of one. Raises AmbiguousName for several."""
        hub = HubName.parse(name)
        if hub is None or hub.file or hub.revision:
            return []
        files = [file for file in found.files if is_of_repository(file.path, hub.repository)]
        usable = [file for file in files if self._is_usable(file, kinds)]
        if len({file.real_path for file in usable}) > 1 and not self._are_copies(usable):
            raise _ambiguous(name, what, usable, [file.path for file in found.files])
        return usable

    def find_model(self, name: str) -> WeightsFile:
        """Return the checkpoint or diffusion model that `name` means. Raises as `find`."""
        return self.find(name, MODELS, "model")

    def find_lora(self, name: str) -> WeightsFile:
        """Return the LoRA that `name` means. Raises as `find`."""
        return self.find(name, LORAS, "LoRA")

    def find_controlnet(self, name: str) -> WeightsFile:
        """Return the ControlNet that `name` means. Raises as `find`."""
        return self.find(name, CONTROLNETS, "ControlNet")

    def find_upscaler(self, name: str) -> WeightsFile:
        """Return the upscaler that `name` means. Raises as `find`."""
        return self.find(name, UPSCALERS, "upscaler")

    def find_embedding(self, name: str) -> WeightsFile:
        """Return the textual inversion that `name` means. Raises as `find`."""
        return self.find(name, EMBEDDINGS, "embedding")

    def find_image_prompt(self, name: str) -> WeightsFile:
        """Return the image prompt adapter that `name` means. Raises as `find`."""
        return self.find(name, IMAGE_PROMPTS, "image prompt adapter")

    def find_gligen(self, name: str) -> WeightsFile:
        """Return the GLIGEN model that `name` means. Raises as `find`."""
        return self.find(name, GLIGENS, "GLIGEN model")

    def find_vision_encoder(self, name: str) -> WeightsFile:
        """Return the vision encoder that `name` means. Raises as `find`."""
        return self.find(name, VISION_ENCODERS, "vision encoder")

    def hashes(self, file: WeightsFile, with_data: bool = False, on_bytes: OnBytes = lambda count: None) -> FileHashes:
        """Return the hashes of `file`, reading all of it unless they are known; `with_data` includes AutoV3.

        Raises CorruptFile if it cannot be read, or changes during that.
        """
        known = self._hashed.get((file.real_path, file.fingerprint)) or _valid(
            file, self._stored(lambda: self.store.hash_record(str(file.real_path)), None)
        )
        if known is not None and (known.data_sha256 or not with_data or file.form is not FileForm.FILE):
            return known
        if file.form is FileForm.ASSEMBLED:  # each file separately: its hash is stored, whatever model it is part of
            return FileHashes(assembly_hash(file, lambda part: self.hashes(weights_file(Path(part))).sha256))
        if self._is_remote(file):
            return self._hash_remote(file)
        began_ns = self._now_ns()
        readings: list[DigestPass] = []
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
            raise CorruptFile(f"{file.path}: changed while it was read; try again when it is complete")
        self._hashed[(file.real_path, file.fingerprint)] = found
        for reading in readings:
            self._stored(partial(self._contents.end, reading), None)
        if began_ns - file.fingerprint.changed_ns > SETTLED_NS:
            record = HashRecord(file.fingerprint, found)
            self._stored(lambda: self.store.save_hashes(str(file.real_path), record), None)
        return found

    def digests(self, path: str) -> Mapping[ByteRange, bytes] | None:
        """Return the digests of the tensors of the single file at `path`, by their ranges, reading all of it unless
        they are known; None if there are none, as for files of sources. Raises CorruptFile if it cannot be read."""
        if self.remote is not None and self.remote.has(path):
            return None
        return self._stored(lambda: self._contents.of(path), None)

    def locate(self, file: WeightsFile) -> tuple[str, tuple[RemoteFile, ...]]:
        """Return the path of `file` on the nodes, and the files to fetch for it: its real path and none, unless it is
        of a source. Raises as `hashes`."""
        if self.remote is None or not self._is_remote(file):
            return str(file.real_path), ()
        return self.remote.locate(file)

    def bring(self, files: Sequence[RemoteFile]) -> None:
        """Fetch files of a source to this machine: small models that are read completely to describe them."""
        if files:
            assert self.remote is not None, "only sources have files to fetch"
            for lease in self.remote.bring(files).leases:
                lease.close()

    def described_path(self, path: str) -> str:
        """Return where a file on the nodes can be described from: its outline, if it is of a source."""
        return path if self.remote is None else self.remote.outline_of(path)

    def _is_remote(self, file: WeightsFile) -> bool:
        return self.remote is not None and bool(file.members) and self.remote.has(file.members[0])

    def _hash_remote(self, file: WeightsFile) -> FileHashes:
        remote = self.remote
        assert remote is not None, "the file is of a source"
        known = self._hashed.get((file.real_path, file.fingerprint))
        if known is None:
            known = hash_whole(file, lambda path: FileHashes(remote.sha256(path)))
            self._hashed[(file.real_path, file.fingerprint)] = known
        return known

    def _listed(self, file: WeightsFile, scan: Callable[[str, WeightsFile, bool], Listed]) -> Listed:
        """Return the result of `scan` for `file`, cached for its current state."""
        key = (file.path, file.fingerprint, scan)
        if key not in self._listings:
            self._listings[key] = scan("", file, self._allow_pickle)
        found: Listed = self._listings[key]
        return found

    def _is_usable(self, file: WeightsFile, kinds: Collection[FileKind | None]) -> bool:
        return not self.facts(file).problem and self.kind(file) in kinds

    def _are_copies(self, files: Sequence[WeightsFile]) -> bool:
        """Whether the files have equal content: then any of them will do."""
        if len({file.fingerprint.size_bytes for file in files}) > 1:
            return False
        return len({self.hashes(file).sha256 for file in files}) == 1

    def _alias_targets(self, alias: Alias, found: FolderScan) -> list[WeightsFile]:
        """Return the files of an alias."""
        if alias.sha256:
            return self._with_hash(alias.sha256, found)
        return [file for file in found.files if alias.path in (str(file.path), str(file.real_path))]

    def _alias_names(self, found: FolderScan) -> set[str]:
        """Return the aliases that stand for one of these files: others hide no file, since a pool may have other models
        than the user's other commands."""
        return {folded(alias.name) for alias in self.aliases() if self._alias_targets(alias, found)}

    def _with_hash(self, name: str, found: FolderScan) -> list[WeightsFile]:
        """Return the files with the hash `name`, among known hashes."""
        digits = as_digits(name)
        if digits is None:
            return []
        records = self._records()
        hashed = ((file, self._known_hashes(file, records.get(str(file.real_path)))) for file in found.files)
        return [file for file, hashes in hashed if hashes is not None and hashes.matches_digits(digits)]

    def _not_found(
        self,
        name: str,
        what: str,
        kinds: Collection[FileKind | None],
        found: FolderScan,
        candidates: Sequence[WeightsFile],
    ) -> UserError:
        """Return the error that explains why `name` matches no file of `kinds`."""
        refused: dict[PurePath, CorruptFile] = {r.path: CorruptFile(f"{r.path}: {r.problem}") for r in found.refused}
        refused |= {file.path: facts.refusal(file.path) for file in candidates if (facts := self.facts(file)).problem}
        for bad in named(name, refused):
            return refused[bad]
        for file in candidates:
            kind = self.kind(file)
            is_what = with_article(kind.value) if kind is not None else "of no known kind"
            return UnknownName(f"{name!r} is {is_what}, expected {with_article(what)} ({file.path})")
        # by their folders: reading thousands of headers would take too long
        forms = (
            FileForm if MODELS.intersection(kinds) else (FileForm.FILE, FileForm.SHARDED)
        )  # the others are models always
        readable = [file for file in found.files if file.form in forms]
        likely = {file.path: file.folder_kind for file in readable if file.folder_kind in {*kinds, None}}
        names = [*_names(likely, ()).values(), *(alias.name for alias in self.aliases())]
        unknown = unknown_name(what, name, names)
        if not names:
            unknown = UnknownName(f"{unknown} `modelpool models` shows which files were found, and where")
        if as_digits(name) is None:
            hint = f" There is a folder of that name here: ./{name}" if _file_at_path(f"./{name}") is not None else ""
            return UnknownName(f"{unknown}{hint}{self._hub_hint(name, kinds, found)}")
        records = self._records()
        unread = sum(self._known_hashes(file, records.get(str(file.real_path))) is None for file in found.files)
        hint = f" {unread} files are not hashed yet: run `modelpool models scan`." if unread else ""
        return UnknownName(f"{unknown}{hint}")

    def _hub_hint(self, name: str, kinds: Collection[FileKind | None], found: FolderScan) -> str:
        """Return how to get the model that `name` may be on the hub, or the names of its files if it was fetched into a
        folder of models: nothing there says of which revision it is. "" for another name."""
        hub = HubName.parse(name)
        if hub is None:
            return ""
        files = [file for file in found.files if is_of_repository(file.path, hub.repository)] if hub.revision else []
        fetched = [file.path for file in files if self._is_usable(file, kinds)]
        if not fetched:
            return f" If it is a name on the hub, fetch it first: {hub.fetch}"
        names = shortest_names([file.path for file in found.files])
        listed = ", ".join(repr(names[path]) for path in fetched[:_MAX_LISTED])
        return (
            f" Names with a revision mean files in the hub's cache; of {hub.repository}, a folder of models has "
            f"{listed} without one: use that name, or replace the files: {hub.fetch} --force"
        )

    def _records(self) -> dict[str, HashRecord]:
        none: dict[str, HashRecord] = {}
        return self._stored(self.store.hashes, none)

    def _known_hashes(self, file: WeightsFile, record: HashRecord | None) -> FileHashes | None:
        if file.form is FileForm.ASSEMBLED:
            return self._known_assembly_hash(file)
        if self.remote is not None and file.form is FileForm.FILE and self.remote.has(file.real_path):
            sha256 = self.remote.known_sha256(file.real_path)
            return FileHashes(sha256) if sha256 else None
        return self._hashed.get((file.real_path, file.fingerprint)) or _valid(file, record)

    def _known_assembly_hash(self, file: WeightsFile) -> FileHashes | None:
        """Return the hash of separate files if the hash of each is known."""

        def known(part: str) -> str:
            part_file = weights_file(Path(part))
            hashes = self._known_hashes(
                part_file, self._stored(lambda: self.store.hash_record(str(part_file.real_path)), None)
            )
            if hashes is None:
                raise LookupError(part)
            return hashes.sha256

        try:
            return FileHashes(assembly_hash(file, known))
        except (LookupError, OSError, UserError):
            return None

    def _stored(self, query: Callable[[], T], default: T) -> T:
        """Return the database's answer; `default` if it cannot be used, with one warning."""
        try:
            return query()
        except OutputFailed as problem:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"{problem}; continuing without it", RuntimeWarning, stacklevel=3)
            return default


def _valid(file: WeightsFile, record: HashRecord | None) -> FileHashes | None:
    """Return the hashes of `record` if they are of the file's current state."""
    return record.hashes if record is not None and record.fingerprint == file.fingerprint else None


def _file_at_path(name: str) -> WeightsFile | None:
    """Return the file, or diffusers folder, at the path `name`. Users may name any path; only scans of folders are
    restricted."""
    path = Path(name)
    try:
        is_called_so = name.lower().endswith((*PLAIN_SUFFIXES, *PICKLE_SUFFIXES)) or is_index(name)
        if (is_called_so or is_description(name)) and path.is_file():
            return weights_file(path)
        # a bare folder name is a registry name
        if path.name != name and (path / PIPELINE_FILE).is_file():
            return weights_file(path)
    except (OSError, ValueError):  # not accessible, or not a path
        return None
    return None


def _names(kinds: Mapping[Path, FileKind | None], taken: Collection[str]) -> dict[PurePath, str]:
    """Return the shortest name of each file among the files of its kind."""
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
    listed = "; ".join(f"{names[file.path]!r} ({file.path})" for file in files[:_MAX_LISTED])
    more = f"; and {len(files) - _MAX_LISTED} more" if len(files) > _MAX_LISTED else ""
    return AmbiguousName(
        f"{what} {name!r} can mean {counted(len(files), 'file')}: {listed}{more}. Use one of these names, a "
        "path or a hash, or "
        f"set an alias: modelpool models alias NAME {names[files[0].path]}"
    )


def with_article(noun: str) -> str:
    """Return "a model", "an upscaler"."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
