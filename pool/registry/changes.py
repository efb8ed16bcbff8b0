"""What people change in the registry: places, aliases, and hashes that are wanted now.

Every change is one transaction; who is interrupted leaves what was before, or what is wanted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.core.errors import CorruptFile, UserError, unusable_field
from modelpool.pool.formats.shard_index import is_index
from modelpool.pool.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES, SAFETENSORS_SUFFIXES
from modelpool.pool.registry.folders import PIPELINE_FILE, Form, Place, Refused, WeightsFile, weights_file
from modelpool.pool.registry.hashes import AUTOV1_DIGITS, FileHashes, OnBytes, as_digits
from modelpool.pool.registry.kinds import Kind
from modelpool.pool.registry.names import ENDINGS, folded
from modelpool.pool.registry.registry import SETTLED_NS, Entry, Registry
from modelpool.pool.registry.remembered import Alias

_ALIAS = re.compile(r"\w[\w .+()-]*")
_EXPECTED_ALIAS = "letters, digits, spaces and any of _ . + - ( ), beginning with a letter or digit"


@dataclass(frozen=True, slots=True)
class Added:
    """What `add_place` did, and what the place holds.

    is_new   false where it was there already, or lies in `within`, which was
    files    those that can be read
    refused  the others, and why
    """

    path: Path
    is_new: bool
    within: Path | None
    files: tuple[WeightsFile, ...]
    refused: tuple[Refused, ...]
    unfinished: tuple[Path, ...]


def add_place(registry: Registry, path: Path) -> Added:
    """Add a file, a diffusers folder, or a folder of models.

    Raises CorruptFile for a file that cannot be read, and UserError for what is not there or no place for models;
    nothing is registered then.
    """
    path = Path(os.path.abspath(path.expanduser()))
    if not path.is_dir() or (path / PIPELINE_FILE).is_file():
        _check_file(registry, path)
    # links may lead into the places that are there already
    found = registry.look(Place(path, is_registered=True))
    for refused in found.refused:
        if refused.path == path:
            raise UserError(f"{path}: {refused.problem}; expected a folder of models")
    own = [file for file in found.files if file.path.is_relative_to(path)]
    unread = [Refused(file.path, problem) for file in own if (problem := registry.facts(file).problem)]
    within = _place_around(registry, path)
    return Added(
        path,
        is_new=within is None and registry.memory.add_place(path),
        within=within,
        files=tuple(file for file in own if not registry.facts(file).problem),
        refused=(*(refused for refused in found.refused if refused.path.is_relative_to(path)), *unread),
        unfinished=tuple(part for part in found.unfinished if part.is_relative_to(path)),
    )


def remove(registry: Registry, what: str) -> Alias | Path:
    """Forget an alias, or a place that was added; no file is touched. Gives back what is gone. Raises UserError."""
    alias = registry.memory.remove_alias(what)
    if alias is not None:
        return alias
    path = Path(os.path.abspath(Path(what).expanduser()))
    if registry.memory.remove_place(path):
        return path
    added = registry.memory.places()
    if not path.exists():
        # a file that was added by itself may be called by its name
        path = registry.find(what).path
        if registry.memory.remove_place(path):
            return path
    around = _place_around(registry, path)
    if around is None:
        listed = ", ".join(map(str, added)) or "none"
        raise UserError(f"{what}: was not added, so it cannot be removed. Added: {listed}")
    how = "remove that, or move the file away" if around in added else "the configuration names that folder"
    raise UserError(f"{what}: was not added by itself but lies in {around}; {how}")


def set_alias(registry: Registry, name: str, target: str) -> tuple[Alias, Alias | None]:
    """Give what `target` means the name `name`: the file at a path, or the content with a hash.

    Gives back the alias, and the one that had the name before. Raises UserError.
    """
    _check_alias(name)
    file = registry.find(target)
    here = [other for other in registry.look().files if other.real_path == file.real_path]
    if not here:
        raise UserError(f"{file.path}: lies in no folder of models; add it first: modelpool models add {file.path}")
    digits = as_digits(target)
    hashes = registry.hashes(file) if digits is not None else None
    if hashes is not None and hashes.is_called(digits or ""):
        alias = Alias(name, sha256=hashes.sha256)
    else:
        alias = Alias(name, path=str(here[0].path))
    for entry in registry.listing().entries:
        if folded(entry.name) == folded(name) and entry.file.real_path != file.real_path:
            raise UserError(f"{name!r} is the name of {entry.file.path} already; take another for the alias")
    return alias, registry.memory.set_alias(alias)


def unhashed(registry: Registry) -> tuple[Entry, ...]:
    """The files that `hash_all` would read, in the order of their paths."""
    entries = registry.listing().entries
    return tuple(sorted((e for e in entries if not _has_all(e)), key=lambda entry: entry.file.path))


def hash_all(
    registry: Registry,
    entries: tuple[Entry, ...],
    on_bytes: Callable[[Entry], OnBytes] = lambda entry: lambda count: None,
    wait: Callable[[float], None] = time.sleep,
    now_ns: Callable[[], int] = time.time_ns,
) -> Iterator[tuple[Entry, FileHashes | CorruptFile]]:
    """Hash `entries`, one after the other, and give each as it is done; who stops asking keeps what was done.

    Waits a moment first where a file has only just changed: its hash could not be kept else.
    """
    newest_ns = max((entry.file.fingerprint.changed_ns for entry in entries), default=0)
    wait_ns = newest_ns + SETTLED_NS + 1_000_000 - now_ns()
    if 0 < wait_ns <= SETTLED_NS + 1_000_000:  # longer: a clock is wrong, and waiting would not mend it
        wait(wait_ns / 1e9)
    for entry in entries:
        try:
            yield entry, registry.hashes(entry.file, _wants_data(entry), on_bytes(entry))
        except CorruptFile as problem:
            yield entry, problem


def _has_all(entry: Entry) -> bool:
    """Whether every hash that is wanted is known."""
    return entry.hashes is not None and bool(entry.hashes.data_sha256 or not _wants_data(entry))


def _wants_data(entry: Entry) -> bool:
    """Whether the hash of the data alone is wanted: AutoV3 is what LoRAs are known by, if they are safetensors."""
    is_safetensors = entry.file.form is Form.FILE and entry.file.path.name.lower().endswith(SAFETENSORS_SUFFIXES)
    return entry.kind is Kind.LORA and is_safetensors


def _check_file(registry: Registry, path: Path) -> None:
    """Raise UserError unless `path` is a file of weights, or a folder that is one, which can be read."""
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


def _place_around(registry: Registry, path: Path) -> Path | None:
    """The place that `path` lies in, or is."""
    return next((place.path for place in registry.places() if path.is_relative_to(place.path)), None)


def _check_alias(name: str) -> None:
    if not _ALIAS.fullmatch(name) or name != name.strip():
        raise unusable_field("alias", name, _EXPECTED_ALIAS)
    if as_digits(name) is not None:
        raise unusable_field(
            "alias", name, f"a name that is not written like a hash ({AUTOV1_DIGITS} hex digits or so)"
        )
    if name.lower().endswith(ENDINGS):
        raise unusable_field("alias", name, "a name without the ending of a file")
