"""The output of `modelpool models`, as tables and as JSON, and the progress of hashing."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from modelpool.actors.cli.terminal.screen import counted, duration, print_json, say, show, user_console
from modelpool.actors.cli.terminal.tables import facts_table, lora_description, loras_table, models_table, rows_table
from modelpool.actors.config.example_model import WAYS_TO_MODELS
from modelpool.pool.values.core.errors import CorruptFile, format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from modelpool.actors.control.status import PinnedModel
    from modelpool.pool.catalog.registry.changes import AddedLocation
    from modelpool.pool.catalog.registry.folder_scan import RejectedFile
    from modelpool.pool.catalog.registry.hashes import FileHashes, OnBytes
    from modelpool.pool.catalog.registry.listings import LoraListing, ModelListing
    from modelpool.pool.catalog.registry.registry import Registry, RegistryEntry, RegistryListing

#: rows in the table of unusable files; `models scan` lists all
_MOST_REFUSED = 20


def print_pool(
    pool: str,
    models: Sequence[ModelListing],
    loras: Sequence[LoraListing],
    as_json: bool,
    pins: Sequence[PinnedModel] = (),
) -> None:
    """Print the models and LoRAs of a running pool. `pins` are shown to people; `modelpool pin --json` has them."""
    if as_json:
        _print_listings(models, loras, {})
        return
    console = user_console(sys.stdout)
    if models:
        show(console, models_table(models))
    if loras:
        show(console, loras_table(loras))
    if pins:
        show(console, facts_table([("pinned", f"{pinned.model} {pinned.words}") for pinned in pins]))
    if not models:
        say(console, _nothing(f"the folders of pool {pool}"))


def print_registry(registry: Registry, as_json: bool) -> None:
    """Print everything that a pool started here could use."""
    from modelpool.pool.catalog.registry.file_purpose import FileKind

    listing, models, loras = registry.listing(), registry.models(), registry.loras()
    listed = {model.path for model in models} | {lora.path for lora in loras}
    if as_json:
        by_path = {str(entry.file.path): entry for entry in listing.entries}
        _print_listings(models, loras, by_path)
        for entry in listing.entries:
            if str(entry.file.path) not in listed:
                print_json(sys.stdout, entry_plain(entry, entry.hashes))
        for refused in listing.refused:
            if str(refused.path) not in listed:
                plain = {"kind": "refused", "path": str(refused.path), "problem": refused.problem}
                print_json(sys.stdout, plain)
        for path in listing.unfinished:
            print_json(sys.stdout, {"kind": "unfinished", "path": str(path)})
        return
    console = user_console(sys.stdout)
    if listing.entries:
        show(console, _entries_table(listing, models, loras))
    if listing.refused:
        show(console, refused_table(listing.refused))
    if listing.unfinished:
        say(console, f"{counted(len(listing.unfinished), 'unfinished download')} skipped")
    if not models:
        places = ", ".join(str(place.path) for place in registry.locations() if place.kind is not FileKind.LORA)
        say(console, _nothing(places or "any folder; no model folder is configured or added"))


def entry_plain(entry: RegistryEntry, hashes: FileHashes | None) -> dict[str, Any]:
    """Return one file as JSON values."""
    return {
        "kind": _kind_word(entry),
        "name": entry.name,
        "path": str(entry.file.path),
        "title": entry.facts.title,
        "file_bytes": entry.file.fingerprint.size_bytes,
        "form": entry.file.form.value,
        "problem": "",
        **_names_plain(entry, hashes),
    }


def refused_table(refused: Sequence[RejectedFile]) -> Table:
    """Build the table of unusable files with reasons."""
    rows = [(str(one.path), one.problem) for one in refused[:_MOST_REFUSED]]
    if len(refused) > _MOST_REFUSED:
        rows.append((f"and {len(refused) - _MOST_REFUSED} more", "modelpool models --json lists all"))
    return rows_table(("unusable", "why"), rows)


def added_report(added: AddedLocation) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Describe an added path: as JSON values, and as lines with their style."""
    plain = {
        "kind": "place",
        "path": str(added.path),
        "is_new": added.is_new,
        "within": str(added.within) if added.within is not None else None,
        "files": len(added.files),
        "refused": [{"path": str(refused.path), "problem": refused.problem} for refused in added.refused],
        "unfinished": [str(path) for path in added.unfinished],
    }
    if added.is_new:
        did = f"{added.path} is added"
    elif added.within is not None and added.within != added.path:
        did = f"{added.path} was already added, as part of {added.within}"
    else:
        did = f"{added.path} was already added"
    counts = [counted(len(added.files), "file")]
    counts += [counted(len(added.unfinished), "unfinished download")] if added.unfinished else []
    lines = [(f"{did}: {', '.join(counts)}", "")]
    lines += [(f"unusable: {refused.path}: {refused.problem}", "yellow") for refused in added.refused]
    return plain, lines


class _LinesView:
    """Prints one line per file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_seconds = time.monotonic()

    def begin(self, entry: RegistryEntry) -> OnBytes:
        """Called before a file is read; returns a callback that counts the bytes read."""
        self._began_seconds = time.monotonic()
        return lambda count: None

    def done(self, entry: RegistryEntry, result: FileHashes | CorruptFile) -> None:
        """Called when a file was read or failed."""
        if isinstance(result, CorruptFile):
            say(self._console, str(result), "red")
            return
        took = duration(time.monotonic() - self._began_seconds)
        size = format_bytes(entry.file.fingerprint.size_bytes)
        say(self._console, f"hashed {entry.name}: {result.autov2.upper()} ({size} in {took})")


class _BarView(_LinesView):
    """One bar over all files, and a line for each finished one."""

    def __init__(self, console: Console, bar: Progress, total_bytes: int) -> None:
        super().__init__(console)
        self._bar = bar
        self._task = bar.add_task("", total=total_bytes)

    def begin(self, entry: RegistryEntry) -> OnBytes:
        super().begin(entry)
        self._bar.update(self._task, description=entry.name)
        return lambda count: self._bar.advance(self._task, count)


@contextlib.contextmanager
def hashing_view(console: Console, entries: Sequence[RegistryEntry]) -> Iterator[_LinesView]:
    """Show the progress of hashing `entries`: a bar on a terminal, lines elsewhere."""
    if not console.is_terminal or console.is_dumb_terminal or not entries:
        yield _LinesView(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        yield _BarView(console, bar, sum(entry.file.fingerprint.size_bytes for entry in entries))


def _print_listings(
    models: Iterable[ModelListing], loras: Iterable[LoraListing], entries: dict[str, RegistryEntry]
) -> None:
    for kind, listings in (("model", models), ("lora", loras)):
        for listing in listings:
            entry = entries.get(listing.path)
            names = _names_plain(entry, entry.hashes) if entry is not None else {}
            print_json(sys.stdout, {"kind": kind, **dataclasses.asdict(listing), **names})


def _names_plain(entry: RegistryEntry, hashes: FileHashes | None) -> dict[str, Any]:
    """Return aliases and hashes as JSON values; null for unknown hashes."""
    return {
        "aliases": list(entry.aliases),
        "sha256": hashes.sha256 if hashes is not None else None,
        "autov1": (hashes.autov1.upper() or None) if hashes is not None else None,
        "autov2": hashes.autov2.upper() if hashes is not None else None,
        "autov3": (hashes.autov3.upper() or None) if hashes is not None else None,
    }


def _kind_word(entry: RegistryEntry) -> str:
    """The kind in JSON; "model" is what can generate images."""
    from modelpool.pool.catalog.registry.file_purpose import MODELS

    if entry.kind is None:
        return "unknown"
    return "model" if entry.kind in MODELS else entry.kind.name.lower()


def _entries_table(listing: RegistryListing, models: Iterable[ModelListing], loras: Iterable[LoraListing]) -> Table:
    """Build the table of every named file: kind, and what a pool knows of it."""
    descriptions: dict[str, str] = {}
    for model in models:
        native_size = f", {model.width}x{model.height}" if model.width else ""
        descriptions[model.path] = _problem(model) or f"{model.family}{native_size}"
    for lora in loras:
        descriptions[lora.path] = _problem(lora) or lora_description(lora)
    rows = []
    for entry in listing.entries:
        name_or_description = descriptions.get(str(entry.file.path)) or entry.facts.title
        names = ", ".join((entry.name, *entry.aliases))
        kind = entry.kind.value if entry.kind is not None else "unknown"
        size = format_bytes(entry.file.fingerprint.size_bytes)
        digits = entry.hashes.autov2.upper() if entry.hashes is not None else "-"
        rows.append((names, kind, name_or_description or "-", size, digits, str(entry.file.path)))
    return rows_table(("name", "kind", "description", "size", "hash", "file"), rows, right=("size",))


def _problem(listed: ModelListing | LoraListing) -> str:
    """The problem without the path, which is in another column."""
    return listed.problem.removeprefix(f"{listed.path}: ")


def _nothing(places: str) -> str:
    return (
        f"No models found in {places}: put .safetensors files there, add a folder with "
        f"`modelpool models add FOLDER`, or name a configuration with --config; {WAYS_TO_MODELS}"
    )
