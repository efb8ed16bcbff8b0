"""`OutputStore`: finished outputs in an object store, below one URL: an object per recipe and id, and a manifest.

Rules
1. An object under its final name is complete, since stores write an object completely or not at all.
2. An output is created, never replaced (`ObjectPrefix.create`): of two writers the first one counts, and a process that
   was replaced long ago can change nothing. Only an object that is not the output that it is listed as is replaced.
3. An output counts as finished when its entry exists and its object has the size in it. What a killed run has stored
   without a record is listed when the next run begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import BatchKind
from modelpool.actors.outputs.entries import ManifestEntry
from modelpool.actors.outputs.failures import FAILURES_FOLDER, FailedOutput, parse_failure, unresolved
from modelpool.actors.outputs.file_content import is_lossless, labels_in, pixels_sha256, read_content, unlisted_output
from modelpool.actors.outputs.image_file import encode_thumbnail
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.outputs.output_file import FinishedOutput, OutputFacts, array_of_output, encoded
from modelpool.actors.outputs.place import (
    DamagedOutput,
    KeptImage,
    StoredFacts,
    WriteOrder,
    WriteReport,
    WrittenOutput,
    about_found_file,
    about_generation,
    possible_names,
    thumbnail_name,
)
from modelpool.actors.outputs.store_manifest import MANIFEST_FOLDER, StoreManifest
from modelpool.actors.request.json_text import parse_json
from modelpool.actors.request.labels import output_key
from modelpool.actors.request.video_output_fields import IMAGE_FORMATS
from modelpool.pool.values.core.errors import OutputFailed, UserError
from modelpool.pool.values.core.stage_params import ImagePixels

#: stored outputs without a record that a new run lists: more than any run has unlisted
MOST_FOUND = 256
#: what `file_name` returns
_DEFAULT_NAME = re.compile(r"[a-z0-9-]+-\d+-[0-9a-f]{8}\.[a-z0-9]+")
#: what `safe_stem` returns, of an image: other outputs do not have the name in them that was asked for, and are found
#: by the request that they are for
_CHOSEN_NAME = re.compile(rf"[\w+=@,][\w.\-+=@,]*\.(?:{'|'.join(IMAGE_FORMATS)})")


class OutputStore:
    """Writes and finds outputs below a URL; an `OutputPlace`. Thread-safe. Its creation contacts no store."""

    def __init__(
        self, url: str, thumbnail_pixels: int = 0, is_sharded: bool = False, objects: ObjectPrefix | None = None
    ) -> None:
        """Raises FolderFailed if the library of the scheme is missing. In a sharded place the files of outputs are
        removed when they are packed, so every name there has digits of its output's key: none is used again. `objects`
        are those below `url`, if they are opened already.
        """
        self.path = url
        self._objects = objects or ObjectPrefix(url)
        self.manifest = StoreManifest(self._objects)
        self._thumbnail_pixels = thumbnail_pixels
        self._is_sharded = is_sharded

    @classmethod
    def ordered(
        cls, objects: ObjectPrefix, order: WriteOrder, thumbnail_pixels: int = 0, is_sharded: bool = False
    ) -> OutputStore:
        """Return the store as its owner knows it, to write one output: its manifest is not read."""
        store = cls(objects.url, thumbnail_pixels, is_sharded, objects)
        store.manifest = StoreManifest.ordered(objects, order)
        return store

    def reported(self, written: WrittenOutput, key: str) -> WriteReport:
        """Return what was written of the one output of `ordered`."""
        return WriteReport(written, *self.manifest.record_of(key))

    @property
    def damaged_line_count(self) -> int:
        """See `OutputPlace`."""
        return self.manifest.damaged_line_count

    @property
    def damaged_lines(self) -> list[str]:
        """See `OutputPlace`."""
        return self.manifest.damaged_lines

    @property
    def manifest_path(self) -> str:
        """See `OutputPlace`."""
        return self._objects.url_of(MANIFEST_FOLDER.rstrip("/"))

    def path_of(self, file: str) -> str:
        """See `OutputPlace`."""
        return self._objects.url_of(file)

    def prepare(self) -> None:
        """See `OutputPlace`."""
        self._objects.check_writable()

    def write(self, image: FinishedOutput, content: bytes | None = None) -> WrittenOutput:
        """See `OutputPlace`."""
        recipe, pixels = image.recipe, array_of_output(image.output)
        self.manifest.read_first()
        listed, is_complete = self._latest(image.key)
        if listed is not None and is_complete:
            return self._written(listed, pixels.nbytes)
        content = encoded(image.output, recipe, image.labels) if content is None else content
        facts = StoredFacts(len(content), hashlib.sha256(content).hexdigest(), pixels_sha256(pixels))
        about = about_generation(image)
        name = "" if listed is None else listed.file
        if listed is None:
            name, found, is_stored = self._create(image, content)
            if found is not None:  # of a run that was killed before it listed it, or of another writer
                facts, about = found, about_found_file(image.labels)
            elif not is_stored:
                self.manifest.read()  # another writer may have listed it, and merged that
                listed = self.manifest.listed(image.key)
                self._objects.replace(name, content)
        else:
            self._objects.replace(name, content)
        if self._thumbnail_pixels and isinstance(image.output, ImagePixels):
            thumbnail = encode_thumbnail(image.output.pixels_HWC, self._thumbnail_pixels)
            self._objects.create(thumbnail_name(name), thumbnail)
        if listed is None:
            listed = self._list(recipe, name, facts, about)
        elif not facts.are_listed(listed):
            listed = self.manifest.replace(recipe, listed.file, facts, about)
        return self._written(listed, pixels.nbytes)

    def order(self, facts: OutputFacts) -> WriteOrder:
        """See `OutputPlace`."""
        self.manifest.read_first()
        listed = self.manifest.listed(facts.key)
        taken = self.manifest.taken(possible_names(facts.recipe, facts.labels), facts.key)
        fields = None if listed is None else listed.fields
        return WriteOrder(facts, self.manifest.run, fields, taken, self._is_sharded, self._thumbnail_pixels)

    def note(self, report: WriteReport) -> WrittenOutput:
        """See `OutputPlace`."""
        self.manifest.note(report)
        return report.written

    def _create(self, image: FinishedOutput, content: bytes) -> tuple[str, StoredFacts | None, bool]:
        """Store a new output under the first of its possible names that is not another output's. Return the name; the
        facts of the object, if it was stored before with other bytes; and whether it is stored: not if something else
        is under the last name.
        """
        names = self._free_names(image)
        for name in names:
            if self._objects.create(name, content):
                return name, None, True
            stored = self._objects.read_one(name)
            if stored == content:
                return name, None, True
            if (facts := self._facts_of(name, stored, image.key)) is not None:
                return name, facts, True
        return names[-1], None, False

    def _free_names(self, image: FinishedOutput) -> tuple[str, ...]:
        """Return the possible names of a new output without those that other outputs are listed with: the object of
        such an entry may be in a shard, or missing. The last name always remains.
        """
        names = possible_names(image.recipe, image.labels)
        if self._is_sharded and image.labels.name:
            names = names[1:]
        taken = self.manifest.taken(names, image.key)
        return (*(name for name in names[:-1] if name not in taken), names[-1])

    def kept(self) -> dict[str, KeptImage]:
        """See `OutputPlace`. Lists stored outputs that a killed run has not listed."""
        self.manifest.read()
        sizes = self._objects.sizes()
        self._list_found(sizes, MOST_FOUND)
        kept: dict[str, KeptImage] = {}
        for entry in self.manifest.known():
            size_bytes = sizes.get(entry.file)
            if size_bytes is not None and size_bytes == entry.file_bytes:
                path = self.path_of(entry.file)
                kept[entry.key] = KeptImage(path, entry.recipe, entry.pixels_sha256, entry.fields, size_bytes)
        return kept

    def batch_sizes(self) -> Mapping[BatchKind, tuple[int, ...]]:
        """See `OutputPlace`. In the order in which the manifest was read."""
        self.manifest.read()
        return self.manifest.batch_sizes()

    def has_outputs(self) -> bool:
        """See `OutputPlace`; also true if their objects were removed."""
        return self.manifest.has_entries()

    def entries(self) -> Sequence[ManifestEntry]:
        """See `OutputPlace`. By run and index."""
        self.manifest.read()
        return self.manifest.known()

    def note_failures(self, failures: Sequence[FailedOutput]) -> None:
        """See `OutputPlace`. The last failure of an output replaces the one before."""
        for failure in failures:
            self._objects.replace(f"{FAILURES_FOLDER}{failure.key}.json", failure.as_line())

    def failures(self) -> tuple[FailedOutput, ...]:
        """See `OutputPlace`. By time."""
        self.manifest.read()
        found = []
        for _, content in self._objects.read(self._objects.sizes(FAILURES_FOLDER)):
            with contextlib.suppress(UserError):  # a file of another program
                found.append(parse_failure(parse_json(content)))
        return unresolved(sorted(found, key=lambda each: each.at), lambda key: self.manifest.listed(key) is not None)

    def finish(self) -> None:
        """See `OutputPlace`: nothing is pending."""

    def damaged(self, quick: bool = False) -> Iterator[DamagedOutput]:
        """See `OutputPlace`."""
        entries, sizes = self.entries(), self._objects.sizes()
        present: dict[str, ManifestEntry] = {}
        for entry in entries:
            reason = _size_problem(sizes.get(entry.file), entry)
            if reason:
                yield DamagedOutput(self.path_of(entry.file), entry, reason)
            else:
                present[entry.file] = entry
        if not quick:
            for name, content in self._objects.read({name: sizes[name] for name in present}):
                reason = _content_problem(content, present[name])
                if reason:
                    yield DamagedOutput(self.path_of(name), present[name], reason)

    def problem(self, entry: ManifestEntry, quick: bool = False) -> str:
        """See `OutputPlace`."""
        if quick:
            return _size_problem(self._objects.size(entry.file), entry)
        return _content_problem(self._objects.read_one(entry.file), entry)

    def repair_manifest(self) -> tuple[int, int]:
        """See `OutputPlace`. Lines taken out are moved below `DAMAGED_FOLDER`."""
        return self.manifest.repair(), self._list_found(self._objects.sizes(), None)

    def contact_sheet(self) -> None:
        """Draw nothing: that would download every image."""

    @contextlib.contextmanager
    def local_file(self, file: str) -> Iterator[Path]:
        """See `OutputPlace`: a copy that is removed at the end of the block."""
        url, content = self.path_of(file), self._objects.read_one(file)
        if content is None:
            raise OutputFailed(f"{url}: missing")
        with _local_copy(file, content) as path:
            try:
                yield path
            except OutputFailed as problem:  # of the block, which knows the copy
                raise OutputFailed(str(problem).replace(str(path), url)) from problem

    def _latest(self, key: str) -> tuple[ManifestEntry | None, bool]:
        """Return the entry of an output, and whether its object is what the entry lists. Reads what other writers have
        listed before it finds an object damaged: one of them may have replaced it by other bytes.
        """
        listed = self.manifest.listed(key)
        if listed is None or not self.problem(listed):
            return listed, listed is not None
        self.manifest.read()
        latest = self.manifest.listed(key)
        return latest, latest is not None and latest != listed and not self.problem(latest)

    def _list(self, recipe: Recipe, file: str, facts: StoredFacts, about: Mapping[str, Any]) -> ManifestEntry:
        """List an output; return the entry that counts, which may be another writer's. One that lists other content
        than the object has is replaced.
        """
        found = self.manifest.create(recipe, file, facts, about)
        if found is None or (not facts.are_listed(found) and self.problem(found)):
            return self.manifest.replace(recipe, file, facts, about)
        return found

    def _list_found(self, sizes: Mapping[str, int], most: int | None) -> int:
        """List up to `most` stored outputs that are not listed, by the recipe in them; return their number."""
        listed = {entry.file for entry in self.manifest.known()}
        unlisted = [name for name in sorted(sizes) if name not in listed]
        names = [name for name in unlisted if _DEFAULT_NAME.fullmatch(name)]
        names += [name for name in unlisted if _CHOSEN_NAME.fullmatch(name) and not _DEFAULT_NAME.fullmatch(name)]
        count = 0
        for name, content in self._objects.read({name: sizes[name] for name in names[:most]}):
            with _local_copy(name, content) as path:
                recipe, labels = unlisted_output(path), labels_in(path)
                if recipe is None or name not in possible_names(recipe, labels):
                    continue
                if self.manifest.listed(output_key(recipe.digest, labels.id)) is not None:
                    continue
                facts = _facts(path, content)
            self._list(recipe, name, facts, about_found_file(labels))
            count += 1
        return count

    def _facts_of(self, name: str, content: bytes | None, key: str) -> StoredFacts | None:
        """Return the facts of a stored object if it is the complete output with this key."""
        if content is None:
            return None
        with _local_copy(name, content) as path:
            found = unlisted_output(path)
            is_it = found is not None and output_key(found.digest, labels_in(path).id) == key
            return _facts(path, content) if is_it else None

    def _written(self, entry: ManifestEntry, array_bytes: int) -> WrittenOutput:
        return WrittenOutput(self.path_of(entry.file), entry.pixels_sha256, array_bytes, entry.file_bytes or 0)


@contextlib.contextmanager
def _local_copy(name: str, content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="modelpool-output-") as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        yield path


def _facts(path: Path, content: bytes) -> StoredFacts:
    pixels = pixels_sha256(read_content(path)) if is_lossless(path) else ""
    return StoredFacts(len(content), hashlib.sha256(content).hexdigest(), pixels)


def _size_problem(found_bytes: int | None, entry: ManifestEntry) -> str:
    if found_bytes is None:
        return "missing"
    if found_bytes == entry.file_bytes:
        return ""
    return f"damaged: found {found_bytes} bytes, expected {entry.file_bytes}"


def _content_problem(content: bytes | None, entry: ManifestEntry) -> str:
    problem = _size_problem(None if content is None else len(content), entry)
    if problem or content is None:
        return problem
    return "" if hashlib.sha256(content).hexdigest() == entry.file_sha256 else "damaged: other content than was written"
