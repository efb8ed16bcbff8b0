"""`OutputFolder`: a folder of finished images, videos and audio clips: one file per recipe, manifest, contact sheet.

Knows files and names; not jobs, workers or Ray. Rules
1. A file under its final name is complete: it is written under a temporary name, synced and renamed.
2. An output counts as finished when its manifest line exists and its file has the size in it; the line is written
   after the file. A line that cannot be used is counted and skipped.
3. Same recipe, same file name; it is written again only if the file is damaged, and the last line counts.
4. Every change happens under one lock (`LOCK_NAME`), so several runs may share the folder, and the holder of the lock
   knows that any temporary file is left over from a killed run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.outputs.atomic_write import TEMPORARY_SUFFIX as TEMPORARY_SUFFIX
from modelpool.actors.outputs.atomic_write import write_atomically as write_atomically
from modelpool.actors.outputs.contact_sheet import LabelledImage, make_contact_sheet
from modelpool.actors.outputs.entries import ManifestEntry, parse_entry
from modelpool.actors.outputs.file_content import (
    content_problem,
    is_lossless,
    read_content,
    size_problem,
    unlisted_output,
)
from modelpool.actors.outputs.file_content import pixels_sha256 as pixels_sha256
from modelpool.actors.outputs.image_file import encode_thumbnail
from modelpool.actors.outputs.manifest import Line, Manifest
from modelpool.actors.outputs.output_file import FinishedOutput as FinishedOutput
from modelpool.actors.outputs.output_file import array_of_output, encoded
from modelpool.actors.outputs.place import (
    MOST_DAMAGED_LINES,
    DamagedOutput,
    KeptImage,
    StoredFacts,
    WrittenOutput,
    about_found_file,
    about_generation,
    entry_fields,
    thumbnail_name,
)
from modelpool.actors.outputs.place import file_name as file_name
from modelpool.actors.outputs.place import plain as plain
from modelpool.actors.outputs.write_failures import check_writable, output_failure
from modelpool.actors.request.json_text import parse_json
from modelpool.pool.core.errors import OutputFailed, UserError
from modelpool.pool.core.stage_params import ImagePixels

MANIFEST_NAME = "manifest.jsonl"
#: lines of the manifest that `repair_manifest` took out
DAMAGED_NAME = "manifest.damaged"
CONTACT_SHEET_NAME = "contact_sheet.png"
LOCK_NAME = ".lock"


class OutputFolder:
    """Writes and finds outputs in one folder; an `OutputPlace`.

    Creating it creates the folder, checks that it is writable and removes temporary files of a killed run. Every
    method raises OutputFailed naming the folder or file; FolderFailed if no other file could be written either.
    """

    def __init__(self, path: str | Path, thumbnail_pixels: int = 0) -> None:
        self.path = Path(path)
        self._thumbnail_pixels = thumbnail_pixels
        self._manifest = Manifest(self.path / MANIFEST_NAME)
        self._entries: dict[str, ManifestEntry] = {}
        #: lines of the manifest that cannot be used: their number, and the first of them
        self.damaged_line_count = 0
        self.damaged_lines: list[str] = []
        #: the number of this run among those that wrote here; 0 until it has written
        self._run = 0
        with self._failures_named(self.path):
            self.prepare()
            with self._locked():
                self._clear_leftovers()
                self._read_new_entries()
        if self.damaged_lines and not self._entries:  # it was not written by this program
            raise OutputFailed(f"{self.manifest_path}: {self.damaged_lines[0]}")

    def write(self, image: FinishedOutput, content: bytes | None = None) -> WrittenOutput:
        """Write and list an output, unless the file of an equal recipe is complete. A damaged file is replaced.
        `content` is what `encoded` returns for it, if it is known already.
        """
        digest, pixels = image.recipe.digest, array_of_output(image.output)
        path = self.path / file_name(image.recipe)
        content = encoded(image.output, image.recipe) if content is None else content
        with self._failures_named(path), self._locked():
            self._read_new_entries()
            listed = self._entries.get(digest)
            if listed is not None:  # under another name, perhaps, of an earlier version
                path = self.path / listed.file
            if listed is None or content_problem(path, listed):
                # an unlisted file is from a run that was killed in between
                facts = StoredFacts(len(content), hashlib.sha256(content).hexdigest(), pixels_sha256(pixels))
                if self._thumbnail_pixels and isinstance(image.output, ImagePixels):
                    thumbnail = self.path / thumbnail_name(path.name)
                    thumbnail.parent.mkdir(exist_ok=True)
                    write_atomically(thumbnail, encode_thumbnail(image.output.pixels_HWC, self._thumbnail_pixels))
                write_atomically(path, content)
                if listed is None or not facts.are_listed(listed):
                    listed = self._append(path, image, facts)
            file_bytes = path.stat().st_size
        return WrittenOutput(path, listed.pixels_sha256, pixels.nbytes, file_bytes)

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
        return bool(self.kept())

    def finished(self) -> dict[str, Path]:
        """Return the listed and complete files by the digest of their recipe, in order of creation."""
        return {digest: self.path / kept.entry["file"] for digest, kept in self.kept().items()}

    def kept(self) -> dict[str, KeptImage]:
        """Return `finished` with the manifest entries. A file counts if it has the listed size."""
        kept: dict[str, KeptImage] = {}
        for entry in self.entries():
            path = self.path / entry.file
            if not size_problem(path, entry):
                file_bytes = path.stat().st_size if entry.file_bytes is None else entry.file_bytes
                kept[entry.digest] = KeptImage(path, entry.recipe, entry.pixels_sha256, entry.fields, file_bytes)
        return kept

    def entries(self) -> tuple[ManifestEntry, ...]:
        """Return the latest entry of each output that was ever finished, in order of creation."""
        with self._failures_named(self.path):
            self._read_new_entries()
        return tuple(self._entries.values())

    def damaged(self, quick: bool = False) -> Iterator[DamagedOutput]:
        """Yield the listed outputs whose file is missing or damaged. Reads every file; only its size if `quick`."""
        for entry in self.entries():
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
                usable = [_is_usable(line) for line in lines]
                with (self.path / DAMAGED_NAME).open("ab") as file:
                    file.writelines(line for line, good in zip(lines, usable, strict=True) if not good)
                write_atomically(self.manifest_path, b"".join(compress(lines, usable)))
                self._read_new_entries()
            listed = 0
            for path in sorted(self.path.iterdir()):
                found = unlisted_output(path)
                if found is not None and found.digest not in self._entries and path.name == file_name(found):
                    self._append_found(path, found)
                    listed += 1
        return moved, listed

    def contact_sheet(self) -> Path:
        """Draw a contact sheet of this folder, run by run in order of submission; return its path."""
        images = sorted(self.kept().values(), key=lambda kept: (kept.entry["run"], kept.entry["index"]))
        path = self.path / CONTACT_SHEET_NAME
        with self._failures_named(path):
            content = make_contact_sheet(
                [LabelledImage(self.path / kept.entry["file"], kept.recipe) for kept in images]
            )
            with self._locked():
                write_atomically(path, content)
        return path

    def _append(self, path: Path, image: FinishedOutput, facts: StoredFacts) -> ManifestEntry:
        return self._append_entry(path, image.recipe, facts, about_generation(image))

    def _append_found(self, path: Path, recipe: Recipe) -> None:
        """List a complete file that was found."""
        content = path.read_bytes()
        pixels = pixels_sha256(read_content(path)) if is_lossless(path) else ""
        facts = StoredFacts(len(content), hashlib.sha256(content).hexdigest(), pixels)
        self._append_entry(path, recipe, facts, about_found_file())

    def _append_entry(self, path: Path, recipe: Recipe, facts: StoredFacts, about: Mapping[str, Any]) -> ManifestEntry:
        if self._run == 0:
            self._run = 1 + max((entry.run for entry in self._entries.values()), default=0)
        self._manifest.repair()
        self._manifest.append(entry_fields(recipe, path.name, self._run, facts, about))
        self._read_new_entries()
        return self._entries[recipe.digest]

    def _read_new_entries(self) -> None:
        if self._manifest.is_replaced():
            self._entries, self.damaged_lines, self.damaged_line_count = {}, [], 0
        for line in self._manifest.read_new():
            entry = self._parsed(line)
            if entry is not None:
                self._entries[entry.digest] = entry

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
        for leftover in self.path.glob(f".*{TEMPORARY_SUFFIX}"):
            leftover.unlink(missing_ok=True)
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


def _is_usable(line: bytes) -> bool:
    """Whether a line of a manifest is an entry."""
    try:
        parse_entry(parse_json(line))
    except UserError:
        return False
    return True
