"""User changes to the registry: added locations, aliases, and hashing on request.

Every change is one transaction; an interruption leaves the state before or after it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.catalog.registry.file_purpose import FileKind
from modelpool.pool.catalog.registry.folder_scan import (
    PIPELINE_FILE,
    FileForm,
    ModelLocation,
    RejectedFile,
    WeightsFile,
    weights_file,
)
from modelpool.pool.catalog.registry.hashes import AUTOV1_DIGITS, FileHashes, OnBytes, as_digits
from modelpool.pool.catalog.registry.registry import SETTLED_NS, Registry, RegistryEntry
from modelpool.pool.catalog.registry.registry_store import Alias
from modelpool.pool.catalog.registry.weight_file_names import SUFFIXES, folded
from modelpool.pool.files.formats.shard_index import is_index
from modelpool.pool.files.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES, SAFETENSORS_SUFFIXES
from modelpool.pool.values.core.errors import CorruptFile, UserError, unusable_field

_ALIAS = re.compile(r"\w[\w .+()-]*")
_EXPECTED_ALIAS = "letters, digits, spaces and any of _ . + - ( ), beginning with a letter or digit"


@dataclass(frozen=True, slots=True)
class AddedLocation:
    """The result of `add_location`, and what the location contains.

    is_new   false if it was registered before, or is in `within`, which was
    files    those that can be read
    refused  the others, and why
    """

    path: Path
    is_new: bool
    within: Path | None
    files: tuple[WeightsFile, ...]
    refused: tuple[RejectedFile, ...]
    unfinished: tuple[Path, ...]


def add_location(registry: Registry, path: Path) -> AddedLocation:
    """Add a file, a diffusers folder, or a model folder.

    Raises CorruptFile for a file that cannot be read, and UserError for a path that does not exist or cannot hold
    models; nothing is registered then.
    """
    path = Path(os.path.abspath(path.expanduser()))
    if not path.is_dir() or (path / PIPELINE_FILE).is_file():
        _check_file(registry, path)
    # links may lead into locations that are already registered
    found = registry.scan(ModelLocation(path, is_registered=True))
    for refused in found.refused:
        if refused.path == path:
            raise UserError(f"{path}: {refused.problem}; expected a folder of models")
    files = [file for file in found.files if file.path.is_relative_to(path)]
    unread = [RejectedFile(file.path, problem) for file in files if (problem := registry.facts(file).problem)]
    within = _location_containing(registry, path)
    return AddedLocation(
        path,
        is_new=within is None and registry.store.add_location(path),
        within=within,
        files=tuple(file for file in files if not registry.facts(file).problem),
        refused=(*(refused for refused in found.refused if refused.path.is_relative_to(path)), *unread),
        unfinished=tuple(part for part in found.unfinished if part.is_relative_to(path)),
    )


def remove(registry: Registry, what: str) -> Alias | Path:
    """Remove an alias, or a location that was added; no file is touched. Returns what was removed. Raises UserError."""
    alias = registry.store.remove_alias(what)
    if alias is not None:
        return alias
    path = Path(os.path.abspath(Path(what).expanduser()))
    if registry.store.remove_location(path):
        return path
    added = registry.store.locations()
    if not path.exists():
        # a file that was added by itself may be named by its registry name
        path = registry.find(what).path
        if registry.store.remove_location(path):
            return path
    around = _location_containing(registry, path)
    if around is None:
        listed = ", ".join(map(str, added)) or "none"
        raise UserError(f"{what}: was not added, so it cannot be removed. Added: {listed}")
    how = "remove that, or move the file away" if around in added else "the configuration names that folder"
    raise UserError(f"{what}: was not added by itself but is in {around}; {how}")


def set_alias(registry: Registry, name: str, target: str) -> tuple[Alias, Alias | None]:
    """Set the alias `name` for `target`: the file at a path, or the content with a hash.

    Returns the alias, and the previous one of that name. Raises UserError.
    """
    _check_alias(name)
    file = registry.find(target)
    here = [other for other in registry.scan().files if other.real_path == file.real_path]
    if not here:
        raise UserError(f"{file.path}: is in no model folder; add it first: modelpool models add {file.path}")
    digits = as_digits(target)
    hashes = registry.hashes(file) if digits is not None else None
    if hashes is not None and hashes.matches_digits(digits or ""):
        alias = Alias(name, sha256=hashes.sha256)
    else:
        alias = Alias(name, path=str(here[0].path))
    for entry in registry.listing().entries:
        if folded(entry.name) == folded(name) and entry.file.real_path != file.real_path:
            raise UserError(f"{name!r} is already the name of {entry.file.path}; choose another alias")
    return alias, registry.store.set_alias(alias)


def unhashed(registry: Registry) -> tuple[RegistryEntry, ...]:
    """Return the files that `hash_all` would read, sorted by path."""
    entries = registry.listing().entries
    return tuple(sorted((e for e in entries if not _has_all(e)), key=lambda entry: entry.file.path))


def hash_all(
    registry: Registry,
    entries: tuple[RegistryEntry, ...],
    on_bytes: Callable[[RegistryEntry], OnBytes] = lambda entry: lambda count: None,
    wait: Callable[[float], None] = time.sleep,
    now_ns: Callable[[], int] = time.time_ns,
) -> Iterator[tuple[RegistryEntry, FileHashes | CorruptFile]]:
    """Hash `entries` in turn and yield each result; hashes are kept even if the caller stops early.

    Waits briefly first if a file has just changed: its hash could not be stored otherwise.
    """
    newest_ns = max((entry.file.fingerprint.changed_ns for entry in entries), default=0)
    wait_ns = newest_ns + SETTLED_NS + 1_000_000 - now_ns()
    if 0 < wait_ns <= SETTLED_NS + 1_000_000:  # longer: a clock is wrong, and waiting would not help
        wait(wait_ns / 1e9)
    for entry in entries:
        try:
            yield entry, registry.hashes(entry.file, _wants_data(entry), on_bytes(entry))
        except CorruptFile as problem:
            yield entry, problem


def _has_all(entry: RegistryEntry) -> bool:
    """Whether every requested hash is known."""
    return entry.hashes is not None and bool(entry.hashes.data_sha256 or not _wants_data(entry))


def _wants_data(entry: RegistryEntry) -> bool:
    """Whether the hash of the data alone is needed: AutoV3 identifies LoRAs, if they are safetensors."""
    is_safetensors = entry.file.form is FileForm.FILE and entry.file.path.name.lower().endswith(SAFETENSORS_SUFFIXES)
    return entry.kind is FileKind.LORA and is_safetensors


def _check_file(registry: Registry, path: Path) -> None:
    """Raise UserError unless `path` is a readable file of weights, or a folder that counts as one."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    low = path.name.lower()
    if path.is_file() and not low.endswith((*PLAIN_SUFFIXES, *PICKLE_SUFFIXES)) and not is_index(path):
        raise UserError(f"{path}: expected a folder, or a file that ends in {' or '.join(PLAIN_SUFFIXES)}")
    try:
        facts = registry.facts(weights_file(path))
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror or error}") from error
    if facts.problem:
        raise facts.refusal(path)


def _location_containing(registry: Registry, path: Path) -> Path | None:
    """Return the location that is or contains `path`."""
    return next((place.path for place in registry.locations() if path.is_relative_to(place.path)), None)


def _check_alias(name: str) -> None:
    if not _ALIAS.fullmatch(name) or name != name.strip():
        raise unusable_field("alias", name, _EXPECTED_ALIAS)
    if as_digits(name) is not None:
        raise unusable_field("alias", name, f"a name that does not look like a hash ({AUTOV1_DIGITS} hex digits or so)")
    if name.lower().endswith(SUFFIXES):
        raise unusable_field("alias", name, "a name without a file suffix")
