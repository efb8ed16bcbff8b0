"""`OutputFolder`: a folder of finished images, videos and audio clips: one file per recipe, manifest, contact sheet.

Knows files and names; not jobs, workers or Ray. Rules
1. A file under its final name is complete: it is written under a temporary name, synced and renamed.
2. An output counts as finished when its manifest line exists and its file has the size in it; the line is written
   after the file. A line that cannot be used is counted and skipped.
3. Same recipe and id, same file; it is written again only if the file is damaged, and the last line counts.
4. Every change happens under one lock (`LOCK_NAME`), so several runs may share the folder. Opening it removes what
   killed runs were writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import BatchKind
from modelpool.actors.outputs.atomic_write import TEMPORARY_SUFFIX as TEMPORARY_SUFFIX
from modelpool.actors.outputs.atomic_write import remove_leftovers, temporary_files
from modelpool.actors.outputs.atomic_write import write_atomically as write_atomically
from modelpool.actors.outputs.contact_sheet import MOST_IMAGES, LabelledImage, make_contact_sheet, mark_of
from modelpool.actors.outputs.entries import ManifestEntry, is_usable, parse_entry
from modelpool.actors.outputs.failures import FAILURES_NAME, FailedOutput, parse_failure, unresolved
from modelpool.actors.outputs.file_content import (
    content_problem,
    is_lossless,
    labels_in,
    read_content,
    size_problem,
    unlisted_output,
)
from modelpool.actors.outputs.file_content import pixels_sha256 as pixels_sha256
from modelpool.actors.outputs.image_file import encode_thumbnail
from modelpool.actors.outputs.kept_outputs import KeptOutputs
from modelpool.actors.outputs.key_index import KeyIndex
from modelpool.actors.outputs.listed_entries import ListedEntries
from modelpool.actors.outputs.manifest import Line, Manifest, ReplacedMeanwhile
from modelpool.actors.outputs.output_file import FinishedOutput as FinishedOutput
from modelpool.actors.outputs.output_file import OutputFacts, array_of_output, encoded
from modelpool.actors.outputs.place import (
    MOST_DAMAGED_LINES,
    THUMBNAIL_FOLDER,
    DamagedOutput,
    KeptImage,
    StoredFacts,
    WriteOrder,
    WriteReport,
    WrittenOutput,
    about_found_file,
    about_generation,
    entry_fields,
    possible_names,
    thumbnail_name,
)
from modelpool.actors.outputs.place import file_name as file_name
from modelpool.actors.outputs.place import plain as plain
from modelpool.actors.outputs.write_failures import check_writable, output_failure
from modelpool.actors.request.labels import Labels, output_key
from modelpool.pool.values.core.errors import OutputFailed, UserError
from modelpool.pool.values.core.stage_params import ImagePixels

MANIFEST_NAME = "manifest.jsonl"
#: lines of the manifest that `repair_manifest` took out
DAMAGED_NAME = "manifest.damaged"
CONTACT_SHEET_NAME = "contact_sheet.png"
#: counts the changes of how a contact sheet is drawn
SHEET_VERSION = 1
LOCK_NAME = ".lock"
#: replacements of the manifest during one look at it
MOST_REPLACED = 8


class OutputFolder:
    """Writes and finds outputs in one folder; an `OutputPlace`. Thread-safe.

    Creating it creates the folder, checks that it is writable and removes temporary files of a killed run. Every
    method raises OutputFailed naming the folder or file; FolderFailed if no other file could be written either.
    """

    def __init__(self, path: str | Path, thumbnail_pixels: int = 0) -> None:
        self.path = Path(path)
        self._thumbnail_pixels = thumbnail_pixels
        self._manifest = Manifest(self.path / MANIFEST_NAME)
        self._failures = Manifest(self.path / FAILURES_NAME)
        self._entries = ListedEntries(self._read_at)
        #: lines of the manifest that cannot be used: their number, and the first of them
        self.damaged_line_count = 0
        self.damaged_lines: list[str] = []
        #: the number of this run among those that wrote here; 0 until it has written
        self._run = 0
        #: guards everything above; taken after the lock of the folder, which is also one among threads
        self._lock = threading.RLock()
        with self._failures_named(self.path):
            self.prepare()
            with self._locked():
                self._clear_leftovers()
                self._read_new_entries()
                self._compact_failures()
        if self.damaged_lines and not self._entries:  # it was not written by this program
            raise OutputFailed(f"{self.manifest_path}: {self.damaged_lines[0]}")

    def write(self, image: FinishedOutput, content: bytes | None = None) -> WrittenOutput:
        """Write and list an output, unless the file of an equal recipe and id is complete. A damaged file is replaced.
        `content` is what `encoded` returns for it, if it is known already.
        """
        pixels = array_of_output(image.output)
        path = self.path / possible_names(image.recipe, image.labels)[0]
        content = encoded(image.output, image.recipe, image.labels) if content is None else content
        preview = b""
        if self._thumbnail_pixels and isinstance(image.output, ImagePixels):
            preview = encode_thumbnail(image.output.pixels_HWC, self._thumbnail_pixels)
        with self._failures_named(path), self._locked():
            listed = self._listed(image.key)
            path = self._free_path(image) if listed is None else path
            if listed is not None:  # under another name, perhaps, of an earlier version
                path = self.path / listed.file
            if listed is None or content_problem(path, listed):
                # an unlisted file is from a run that was killed in between
                facts = StoredFacts(len(content), hashlib.sha256(content).hexdigest(), pixels_sha256(pixels))
                if preview:
                    thumbnail = self.path / thumbnail_name(path.name)
                    thumbnail.parent.mkdir(exist_ok=True)
                    write_atomically(thumbnail, preview)
                write_atomically(path, content)
                if listed is None or not facts.are_listed(listed):
                    listed = self._append(path, image, facts)
            file_bytes = path.stat().st_size
        return WrittenOutput(path, listed.pixels_sha256, pixels.nbytes, file_bytes)

    def order(self, facts: OutputFacts) -> WriteOrder:
        """See `OutputPlace`: who writes reads the manifest."""
        with self._failures_named(self.path), self._lock:
            if self._run == 0:
                self._read_new_entries()
            return WriteOrder(facts, self._own_run(), thumbnail_pixels=self._thumbnail_pixels)

    def write_ordered(self, order: WriteOrder, image: FinishedOutput) -> WriteReport:
        """Write an output that the owner of the place has ordered from this process."""
        with self._lock:
            self._run = order.run
        written = self.write(image)
        listed = self._listed(image.key)
        assert listed is not None, "an output that is written is listed"
        return WriteReport(written, listed.fields)

    def note(self, report: WriteReport) -> WrittenOutput:
        """See `OutputPlace`: the manifest is read when it is needed."""
        return report.written

    @property
    def manifest_path(self) -> Path:
        """The manifest."""
        return self._manifest.path

    def prepare(self) -> None:
        """Create the folder again if it was removed, and check that it is writable."""
        with self._failures_named(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            check_writable(self.path)

    def path_of(self, file: str) -> Path:
        """See `OutputPlace`."""
        return self.path / file

    @contextlib.contextmanager
    def local_file(self, file: str) -> Iterator[Path]:
        """See `OutputPlace`."""
        yield self.path / file

    def finish(self) -> None:
        """See `OutputPlace`: nothing is pending."""

    def has_outputs(self) -> bool:
        """See `OutputPlace`."""
        return next(self._complete(), None) is not None

    def finished(self) -> dict[str, Path]:
        """Return the listed and complete files by their keys, in order of creation."""
        return {entry.key: self.path / entry.file for entry in self._complete()}

    def kept(self) -> Mapping[str, KeptImage]:
        """Return `finished` with the manifest entries, which are read again when they are asked for. A file counts if
        it has the listed size.
        """
        keys = (entry.key for entry in self._complete())
        return KeptOutputs(keys, self._listed_now, self._each_entry, partial(_as_kept, self.path))

    def batch_sizes(self) -> Mapping[BatchKind, tuple[int, ...]]:
        """See `OutputPlace`."""
        with self._failures_named(self.path):
            self._read_new_entries()
            with self._lock:
                return self._entries.batches.sizes

    def note_failures(self, failures: Sequence[FailedOutput]) -> None:
        """See `OutputPlace`."""
        with self._failures_named(self._failures.path), self._locked():
            self._failures.repair()
            for failure in failures:
                self._failures.append(failure.as_json())

    def failures(self) -> tuple[FailedOutput, ...]:
        """See `OutputPlace`."""
        with self._failures_named(self._failures.path):
            self._read_new_entries()
            return unresolved(self._all_failures(), self._entries.__contains__)

    def entries(self) -> tuple[ManifestEntry, ...]:
        """Return the latest entry of each output that was ever finished, in order of creation."""
        return tuple(self._each_entry())

    def damaged(self, quick: bool = False) -> Iterator[DamagedOutput]:
        """Yield the listed outputs with a missing or damaged file. Reads every file; only its size if `quick`."""
        for entry in self._each_entry():
            reason = self.problem(entry, quick)
            if reason:
                yield DamagedOutput(self.path / entry.file, entry, reason)

    def problem(self, entry: ManifestEntry, quick: bool = False) -> str:
        """Return why the file of `entry` is not what was written; "" if it is. Reads only its size if `quick`."""
        return (size_problem if quick else content_problem)(self.path / entry.file, entry)

    def repair_manifest(self) -> tuple[int, int]:
        """Move lines that cannot be used to `DAMAGED_NAME`, and list complete files again that are not listed, by the
        recipe in them. Return the number of lines moved and of files listed.
        """
        with self._failures_named(self.manifest_path), self._locked():
            self._read_new_entries()
            moved = self.damaged_line_count
            if moved:
                content = self.manifest_path.read_bytes()
                lines = [line + b"\n" for line in content[: content.rfind(b"\n")].split(b"\n")]
                usable = [is_usable(line) for line in lines]
                with (self.path / DAMAGED_NAME).open("ab") as file:
                    file.writelines(line for line, good in zip(lines, usable, strict=True) if not good)
                write_atomically(self.manifest_path, b"".join(compress(lines, usable)))
                self._read_new_entries()
            listed = 0
            for path in sorted(self.path.iterdir()):
                found = unlisted_output(path)
                if found is None:
                    continue
                labels = labels_in(path)
                key = output_key(found.digest, labels.id)
                if key not in self._entries and path.name in possible_names(found, labels):
                    self._append_found(path, found, labels)
                    listed += 1
        return moved, listed

    def contact_sheet(self) -> Path:
        """Draw a contact sheet of this folder, run by run in order of submission, unless it shows these files already;
        return its path.
        """
        on_sheet = (_OnSheet.of(entry, _as_kept(self.path, entry).file_bytes) for entry in self._complete())
        images = sorted(on_sheet, key=lambda each: (each.run, each.index))
        path = self.path / CONTACT_SHEET_NAME
        mark = _sheet_mark(images)
        with self._failures_named(path):
            if mark_of(path) == mark:
                return path
            shown = [entry for each in images[:MOST_IMAGES] if (entry := self._listed(each.key)) is not None]
            labelled = [LabelledImage(self.path / entry.file, entry.recipe) for entry in shown]
            content = make_contact_sheet(labelled, mark, len(images))
            with self._locked():
                write_atomically(path, content)
        return path

    def _append(self, path: Path, image: FinishedOutput, facts: StoredFacts) -> ManifestEntry:
        return self._append_entry(path, image.recipe, facts, about_generation(image), image.key)

    def _append_found(self, path: Path, recipe: Recipe, labels: Labels) -> None:
        """List a complete file that was found."""
        content = path.read_bytes()
        pixels = pixels_sha256(read_content(path)) if is_lossless(path) else ""
        facts = StoredFacts(len(content), hashlib.sha256(content).hexdigest(), pixels)
        key = output_key(recipe.digest, labels.id)
        self._append_entry(path, recipe, facts, about_found_file(labels), key)

    def _append_entry(
        self, path: Path, recipe: Recipe, facts: StoredFacts, about: Mapping[str, Any], key: str
    ) -> ManifestEntry:
        run = self._own_run()
        self._manifest.repair()
        self._manifest.append(entry_fields(recipe, path.name, run, facts, about))
        listed = self._listed(key)
        assert listed is not None, "it is listed now"
        return listed

    def _own_run(self) -> int:
        """Return the number of this run."""
        with self._lock:
            if self._run == 0:
                self._run = 1 + self._entries.latest_run
            return self._run

    def _read_new_entries(self) -> None:
        with self._lock:
            if self._manifest.is_replaced():
                self._forget_entries()
            for line in self._manifest.read_new():
                entry = self._parsed(line)
                if entry is not None:
                    self._entries.note(entry, line.at_byte)

    def _forget_entries(self) -> None:
        self._entries, self.damaged_lines, self.damaged_line_count = ListedEntries(self._read_at), [], 0

    def _read_at(self, begins: Iterable[int]) -> Iterator[ManifestEntry]:
        """Yield the entries that begin there. Raises ReplacedMeanwhile if the lines are elsewhere by now."""
        for line in self._manifest.read_at(begins):
            try:
                yield parse_entry(line.fields)
            except UserError as problem:
                raise ReplacedMeanwhile(f"{self.manifest_path}: {problem}") from problem

    def _listed(self, key: str) -> ManifestEntry | None:
        """Return the entry of an output; None if it is not listed."""
        with self._lock:
            for _ in range(MOST_REPLACED):
                self._read_new_entries()
                try:
                    return self._entries.get(key)
                except ReplacedMeanwhile:  # begin at the first line of the other file
                    self._manifest.begin_again()
                    self._forget_entries()
        raise OutputFailed(f"{self.manifest_path}: it is replaced again and again")

    def _listed_now(self, key: str) -> ManifestEntry | None:
        with self._failures_named(self.path):
            return self._listed(key)

    def _each_entry(self) -> Iterator[ManifestEntry]:
        """Yield the latest entry of each output that was ever finished, in order of creation."""
        with self._failures_named(self.path):
            self._read_new_entries()
            with self._lock:
                entries, found = iter(self._entries), KeyIndex()
            try:
                for entry in entries:
                    found.add(entry.key)
                    yield entry
            except ReplacedMeanwhile:  # the others are in another file now
                self._read_new_entries()
                with self._lock:
                    rest = [entry for entry in self._entries if entry.key not in found]
                yield from rest

    def _complete(self) -> Iterator[ManifestEntry]:
        """Yield the entries with a complete file."""
        return (entry for entry in self._each_entry() if not size_problem(self.path / entry.file, entry))

    def _all_failures(self) -> list[FailedOutput]:
        """Return every failure in the list. Lines that cannot be used are left out."""
        if not self._failures.path.exists():
            return []
        found = []
        for line in Manifest(self._failures.path).read_new():
            with contextlib.suppress(UserError):
                found.append(parse_failure(line.fields))
        return found

    def _compact_failures(self) -> None:
        """Drop the failures of outputs that are listed by now, and those that another follows. Requires the lock."""
        found = self._all_failures()
        left = unresolved(found, self._entries.__contains__)
        if len(left) < len(found):
            write_atomically(self._failures.path, b"".join(failure.as_line() for failure in left))

    def _free_path(self, image: FinishedOutput) -> Path:
        """Return the first of the possible paths of a new output that is not another file's. Requires the lock."""
        names = possible_names(image.recipe, image.labels)
        if not image.labels.name:
            return self.path / names[0]
        entries = self._entries
        free = (name for name in names if not entries.is_of_another(name, image.key) and self._is_own(name, image))
        return self.path / next(free, names[-1])

    def _is_own(self, name: str, image: FinishedOutput) -> bool:
        """Whether there is no file of this name, or only what a killed run left of this output."""
        path = self.path / name
        if self._entries.is_file(name) or not path.exists():
            return True
        found = unlisted_output(path)
        return found is not None and output_key(found.digest, labels_in(path).id) == image.key

    def _parsed(self, line: Line) -> ManifestEntry | None:
        """Parse a line; None, after noting it, if it cannot be used."""
        problem = line.problem
        if line.fields is not None:
            try:
                return parse_entry(line.fields)
            except UserError as error:
                problem = str(error)
        self.damaged_line_count += 1
        if len(self.damaged_lines) < MOST_DAMAGED_LINES:
            self.damaged_lines.append(f"byte {line.at_byte}: {problem}")
        return None

    def _clear_leftovers(self) -> None:
        remove_leftovers(temporary_files(self.path))
        remove_leftovers(temporary_files(self.path / THUMBNAIL_FOLDER))
        self._manifest.repair()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, waiting for it. The lock ends with the process."""
        with (self.path / LOCK_NAME).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _failures_named(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise output_failure(error, path, self.path) from error


@dataclass(frozen=True, slots=True)
class _OnSheet:
    """An output on a contact sheet: its place in the order, and what its mark knows of it."""

    run: int
    index: int
    key: str
    file: str
    file_bytes: int
    file_sha256: str

    @classmethod
    def of(cls, entry: ManifestEntry, file_bytes: int) -> _OnSheet:
        """Return the needed facts of an entry."""
        return cls(entry.run, entry.index, entry.key, entry.file, file_bytes, entry.file_sha256)


def _as_kept(folder: Path, entry: ManifestEntry) -> KeptImage:
    path = folder / entry.file
    file_bytes = path.stat().st_size if entry.file_bytes is None else entry.file_bytes
    return KeptImage(path, entry.recipe, entry.pixels_sha256, entry.fields, file_bytes)


def _sheet_mark(images: Sequence[_OnSheet]) -> str:
    """Return a digest of the files on a contact sheet and of their order."""
    shown = [[each.file, each.file_bytes, each.file_sha256] for each in images]
    return hashlib.sha256(json.dumps([SHEET_VERSION, *shown]).encode()).hexdigest()
