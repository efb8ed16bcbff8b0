"""`StoreManifest`: the manifest of outputs in an object store: a record per output, and parts with many records.

1. An entry is a record of its own, created after the object: `manifest/KEY.json`.
2. After `MERGED_RECORDS` of them a writer merges its records to a part, `manifest/part-*.jsonl`, and then removes them.
   An entry may be in a part and a record: the one of the latest run counts. A reader that finds a listed record
   removed lists again, since a part has it now.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import BatchKind
from modelpool.actors.outputs.entries import ManifestEntry, is_usable, parse_entry
from modelpool.actors.outputs.key_index import KeyIndex
from modelpool.actors.outputs.listed_entries import ListedEntries
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.outputs.packed_lines import PackedLines
from modelpool.actors.outputs.place import MOST_DAMAGED_LINES, StoredFacts, WriteOrder, WriteReport, entry_fields
from modelpool.actors.request.json_text import parse_json
from modelpool.actors.request.labels import output_key
from modelpool.pool.values.core.errors import UserError

MANIFEST_FOLDER = "manifest/"
#: lines that `repair` took out of the manifest
DAMAGED_FOLDER = "manifest.damaged/"
#: records of a writer that become a part: reading the manifest of 50,000 outputs takes 50 requests instead of 50,000
MERGED_RECORDS = 1000
#: listings of the manifest after which a reader stops to look for entries that were merged since the listing before
MOST_LISTINGS = 20


class StoreManifest:
    """The entries as far as they were read, and the records of this process. Thread-safe. Its creation contacts no
    store."""

    def __init__(self, objects: ObjectPrefix) -> None:
        #: lines that cannot be used: their number, and the first of them
        self.damaged_line_count = 0
        self.damaged_lines: list[str] = []
        self._objects = objects
        #: one thread reads the manifest before the first output is written; the others wait for it
        self._first_read = threading.Lock()
        self._is_read = False
        #: guards everything below
        self._lock = threading.Lock()
        self._lines = PackedLines()
        self._entries = ListedEntries(self._unpacked)
        #: objects of the manifest that were read
        self._read = KeyIndex()
        #: parts among them with damaged lines
        self._damaged: set[str] = set()
        #: lines of the records that this process has created and not merged, by the object's name
        self._records: dict[str, bytes] = {}
        self._part_numbers = itertools.count(1)
        #: the number of this run among those that wrote here; 0 until it has written
        self._run = 0

    @classmethod
    def ordered(cls, objects: ObjectPrefix, order: WriteOrder) -> StoreManifest:
        """Return the manifest as the owner of the store knows it, to write one output: nothing is read."""
        manifest = cls(objects)
        manifest._is_read, manifest._run = True, order.run
        manifest._entries.take(order.taken)
        if order.listed is not None:
            manifest._take_in("", _line(order.listed))
        return manifest

    def has_entries(self) -> bool:
        """Return whether there are entries as far as it was read, or objects of the manifest."""
        return bool(len(self._entries)) or bool(self._objects.sizes(MANIFEST_FOLDER))

    def record_of(self, key: str) -> tuple[Mapping[str, Any], tuple[str, bytes] | None]:
        """Return the entry of the one output of `ordered`, and its record, if there is one."""
        with self._lock:
            return self._listed(key).fields, next(iter(self._records.items()), None)

    def read_first(self) -> None:
        """Read the manifest before the first output is written."""
        with self._first_read:
            if not self._is_read:
                self.read()

    def read(self) -> None:
        """Read the new lines."""
        missing: set[str] = set()
        for _ in range(MOST_LISTINGS):
            # a writer has merged records since they were listed: their part is in the next listing
            before, missing = missing, self._read_new()
            if missing <= before:
                break
        self._is_read = True

    def known(self) -> list[ManifestEntry]:
        """Return the entries as far as the manifest was read, by run and index."""
        with self._lock:
            return sorted(self._entries, key=lambda entry: (entry.run, entry.index))

    def batch_sizes(self) -> Mapping[BatchKind, tuple[int, ...]]:
        """Return the batch sizes of the entries as far as the manifest was read."""
        with self._lock:
            return self._entries.batches.sizes

    def listed(self, key: str) -> ManifestEntry | None:
        """Return the entry of an output as far as the manifest was read; None if there is none."""
        with self._lock:
            return self._entries.get(key)

    def listed_in(self, files: Collection[str]) -> list[ManifestEntry]:
        """Return the entries with these files as far as the manifest was read."""
        with self._lock:
            return self._entries.with_files(files)

    def taken(self, names: Iterable[str], key: str) -> tuple[str, ...]:
        """Return which of the names other outputs are listed with."""
        with self._lock:
            return tuple(name for name in names if self._entries.is_of_another(name, key))

    @property
    def run(self) -> int:
        """The number of this run."""
        with self._lock:
            return self._own_run()

    def create(self, recipe: Recipe, file: str, facts: StoredFacts, about: Mapping[str, Any]) -> ManifestEntry | None:
        """Create the record of an output; return the entry that counts, which may be another writer's. None if its
        record cannot be used."""
        fields = entry_fields(recipe, file, self.run, facts, about)
        key, line = _key(recipe, about), _line(fields)
        name = f"{MANIFEST_FOLDER}{key}.json"
        is_new = self._objects.create(name, line)
        content = line if is_new else self._objects.read_one(name)
        with self._lock:
            if content is not None:
                self._take_in(name, content)
            if is_new:
                self._records[name] = line
            found = self._entries.get(key)
        self._merge_full()
        return found

    def replace(self, recipe: Recipe, file: str, facts: StoredFacts, about: Mapping[str, Any]) -> ManifestEntry:
        """List an output with an outdated record, in a part of its own."""
        fields = entry_fields(recipe, file, self.run, facts, about)
        with self._lock:
            fields["run"] = self._run = max(self._run, 1 + self._entries.latest_run)
        self._create_part(_line(fields))
        with self._lock:
            return self._listed(_key(recipe, about))

    def note(self, report: WriteReport) -> None:
        """Note what another process has written. Its record becomes one of this process, which merges it."""
        with self._lock:
            if report.record is None:
                self._take_in("", _line(report.entry))
            else:
                name, line = report.record
                self._take_in(name, line)
                self._records[name] = line
        self._merge_full()

    def repair(self) -> int:
        """Move the damaged lines below `DAMAGED_FOLDER`; return their number."""
        self.read()
        with self._lock:
            damaged, self._damaged = self._damaged, set()
            moved, self.damaged_line_count, self.damaged_lines = self.damaged_line_count, 0, []
        for name in damaged:
            self._take_apart(name)
        return moved

    def _read_new(self) -> set[str]:
        """Read the new lines of the manifest; return the names of the objects that were removed after the listing."""
        sizes = self._objects.sizes(MANIFEST_FOLDER)
        with self._lock:
            new = {name: size_bytes for name, size_bytes in sizes.items() if name not in self._read}
        missing = set(new)
        for name, content in self._objects.read(new):
            missing.discard(name)
            with self._lock:
                self._take_in(name, content)
        return missing

    def _own_run(self) -> int:
        """Return the number of this run. Requires the lock."""
        if self._run == 0:
            self._run = 1 + self._entries.latest_run
        return self._run

    def _listed(self, key: str) -> ManifestEntry:
        """Return the entry of an output that is listed. Requires the lock."""
        found = self._entries.get(key)
        assert found is not None, f"{key} is listed"
        return found

    def _unpacked(self, numbers: Iterable[int]) -> Iterator[ManifestEntry]:
        return (parse_entry(parse_json(line)) for line in self._lines.read(numbers))

    def _merge_full(self) -> None:
        """Store the records of this process as a part, and remove them, if there are enough. A process that is killed
        in between leaves both.
        """
        with self._lock:
            if len(self._records) < MERGED_RECORDS:
                return
            records, self._records = self._records, {}
        self._create_part(b"".join(records.values()))
        self._objects.remove(records)

    def _create_part(self, lines: bytes) -> None:
        with self._lock:
            number = next(self._part_numbers)
        digest = hashlib.sha256(lines).hexdigest()[:16]
        name = f"{MANIFEST_FOLDER}part-{self._run:06d}-{number:06d}-{digest}.jsonl"
        self._objects.create(name, lines)  # one that exists has the same content
        with self._lock:
            self._take_in(name, lines)

    def _take_in(self, name: str, content: bytes) -> None:
        """Note the entries in an object of the manifest. Requires the lock."""
        self._read.add(name)
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                entry = parse_entry(parse_json(line))
            except UserError as problem:
                self._damaged.add(name)
                self.damaged_line_count += 1
                if len(self.damaged_lines) < MOST_DAMAGED_LINES:
                    self.damaged_lines.append(f"{name}, line {number}: {problem}")
                continue
            known = self._entries.get(entry.key)
            if known is None or entry.run >= known.run:
                if known is None or known.fields != entry.fields:  # a record is also in its part
                    self._entries.note(entry, self._lines.add(line))
            else:
                self._entries.note_file(entry)

    def _take_apart(self, name: str) -> None:
        """Move the damaged lines of an object of the manifest below `DAMAGED_FOLDER`; the others become a part."""
        content = self._objects.read_one(name)
        if content is None:
            return
        good: list[bytes] = []
        bad: list[bytes] = []
        for line in content.splitlines(keepends=True):
            (good if is_usable(line) else bad).append(line)
        digest = hashlib.sha256(content).hexdigest()[:16]
        self._objects.create(f"{DAMAGED_FOLDER}{digest}-{name.removeprefix(MANIFEST_FOLDER)}", b"".join(bad))
        if good:
            self._create_part(b"".join(good))
        self._objects.remove([name])


def _key(recipe: Recipe, about: Mapping[str, Any]) -> str:
    return output_key(recipe.digest, about.get("id") or "")


def _line(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")
