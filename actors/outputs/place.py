"""`OutputPlace`: where outputs are written, a folder or an object store, and the values that it returns."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import BatchKind
from modelpool.actors.outputs.entries import ManifestEntry
from modelpool.actors.outputs.failures import FailedOutput
from modelpool.actors.outputs.output_file import FinishedOutput, OutputFacts
from modelpool.actors.request.labels import NO_LABELS, Labels, output_key
from modelpool.actors.request.requests import GenerateRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: damaged lines of a manifest that are kept with their reason
MOST_DAMAGED_LINES = 20
_SLUG_CHARACTERS = 60
THUMBNAIL_FOLDER = "thumbnails/"


@dataclass(frozen=True, slots=True)
class KeptImage:
    """An image, video or audio clip that is listed in the manifest and exists, with the listed size."""

    path: OutputAddress
    recipe: Recipe
    pixels_sha256: str
    #: the complete manifest entry
    entry: Mapping[str, Any]
    file_bytes: int


@dataclass(frozen=True, slots=True)
class WrittenOutput:
    """An output that is stored and listed.

    pixels_sha256  of the pixels as generated, maybe by an earlier run
    array_bytes    of the pixels in memory
    """

    path: OutputAddress
    pixels_sha256: str
    array_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class DamagedOutput:
    """A listed output with a missing or changed file, and the reason."""

    path: OutputAddress
    entry: ManifestEntry
    reason: str


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """What the manifest records of a file."""

    file_bytes: int
    file_sha256: str
    pixels_sha256: str

    def are_listed(self, entry: ManifestEntry) -> bool:
        """Whether `entry` lists exactly this file, or is of an earlier version and lists its pixels."""
        if entry.file_bytes is None and not entry.file_sha256:
            return entry.pixels_sha256 == self.pixels_sha256
        return (entry.file_bytes, entry.file_sha256) == (self.file_bytes, self.file_sha256)


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """An output that another process is to write, and what the owner of its place knows of it.

    run      number of the run, of the owner
    listed   the fields of its entry in the manifest; None if it is not listed
    taken    its possible names that other outputs are listed with
    is_sharded, thumbnail_pixels  the layout of the place, as its owner knows it
    """

    facts: OutputFacts
    run: int
    listed: Mapping[str, Any] | None = None
    taken: tuple[str, ...] = ()
    is_sharded: bool = False
    thumbnail_pixels: int = 0


@dataclass(frozen=True, slots=True)
class WriteReport:
    """Report of a process that has written an output, for the owner of the place.

    entry   the fields of the entry that lists it
    record  the object of the manifest that was created for the entry, its name and content; None if there was one
    """

    written: WrittenOutput
    entry: Mapping[str, Any]
    record: tuple[str, bytes] | None = None


class OutputPlace(Protocol):
    """Stores outputs, each once, and lists them in a manifest. Several processes may use one place.

    Every method raises OutputFailed naming the place or file; FolderFailed if no other file could be written either.
    """

    @property
    def damaged_line_count(self) -> int:
        """The number of lines of the manifest that cannot be used."""

    @property
    def damaged_lines(self) -> list[str]:
        """The first of them."""

    @property
    def path(self) -> OutputAddress:
        """The address of the place."""

    @property
    def manifest_path(self) -> OutputAddress:
        """The address of its manifest."""

    def path_of(self, file: str) -> OutputAddress:
        """Return the address of a file of this place."""

    def prepare(self) -> None:
        """Check that outputs can be written."""

    def write(self, image: FinishedOutput, content: bytes | None = None) -> WrittenOutput:
        """Store and list an output, unless the file of an equal recipe and id is complete. A damaged file is replaced.
        `content` is what `encoded` returns for it, if it is known already.
        """

    def order(self, facts: OutputFacts) -> WriteOrder | None:
        """Return an order by which another process can write an output (`place_writer`); None if this one must."""

    def note(self, report: WriteReport) -> WrittenOutput:
        """Take in what another process has written, as if it was written here."""

    def note_failures(self, failures: Sequence[FailedOutput]) -> None:
        """Remember outputs that could not be generated, until they are listed."""

    def failures(self) -> tuple[FailedOutput, ...]:
        """Return the last failure of each output that is not listed."""

    def finish(self) -> None:
        """Complete outputs that are written in parts. Called when the writer ends; writing afterwards is allowed."""

    def kept(self) -> Mapping[str, KeptImage]:
        """Return the listed and complete files by their keys (`output_key`). A file counts if it has the listed
        size.
        """

    def batch_sizes(self) -> Mapping[BatchKind, tuple[int, ...]]:
        """Return the batch sizes of all outputs that are listed, by kind, the latest last."""

    def has_outputs(self) -> bool:
        """Return whether there is a listed and complete file."""

    def entries(self) -> Sequence[ManifestEntry]:
        """Return the latest entry of each output that was ever finished."""

    def damaged(self, quick: bool = False) -> Iterator[DamagedOutput]:
        """Yield the listed outputs with a missing or damaged file. Reads every file; only its size if `quick`."""

    def problem(self, entry: ManifestEntry, quick: bool = False) -> str:
        """Return why the file of `entry` is not what was written; "" if it is. Reads only its size if `quick`."""

    def repair_manifest(self) -> tuple[int, int]:
        """Take lines that cannot be used out of the manifest, and list complete files that are not listed, by the
        recipe in them. Return the number of lines taken out and of files listed.
        """

    def contact_sheet(self) -> OutputAddress | None:
        """Draw a contact sheet and return where it is; None where none is drawn."""

    def local_file(self, file: str) -> AbstractContextManager[Path]:
        """Return a context in which a file of this place is on a disk of this machine."""


def file_name(recipe: Recipe, labels: Labels = NO_LABELS) -> str:
    """Return 'a-red-circle-7-1f2e3d4c.png': readable, and different for different recipes and ids."""
    slug = re.sub(r"[^a-z0-9]+", "-", recipe.prompt.lower()).strip("-")[:_SLUG_CHARACTERS].strip("-")
    key = output_key(recipe.digest, labels.id)
    return f"{slug or kind_of_recipe(recipe)}-{recipe.seed}-{key[:8]}.{recipe.ending}"


def name_values(request: GenerateRequest, recipe: Recipe, index: int) -> dict[str, str | int | None]:
    """Return the values of `NAME_FIELDS` for an output."""
    return {
        "id": request.id,
        "index": index,
        "line": request.line,
        "seed": recipe.seed,
        "prompt": recipe.prompt[:_SLUG_CHARACTERS].strip() or kind_of_recipe(recipe),
        "model": recipe.model,
        "width": recipe.width,
        "height": recipe.height,
        "steps": recipe.steps,
        "digest": recipe.digest[:8],
    }


def possible_names(recipe: Recipe, labels: Labels) -> tuple[str, ...]:
    """Return file names for an output, the best first: a later one if an earlier one is taken by another output."""
    if not labels.name:
        return (file_name(recipe, labels),)
    key = output_key(recipe.digest, labels.id)
    return tuple(f"{labels.name}{end}.{recipe.ending}" for end in ("", f"-{key[:8]}", f"-{key}"))


def thumbnail_name(file: str) -> str:
    """Return the name of the thumbnail of an image, below its place. It includes the ending of the file."""
    return f"{THUMBNAIL_FOLDER}{file}.webp"


def kind_of_recipe(recipe: Recipe) -> str:
    """Return the kind of output of a recipe."""
    if recipe.seconds:
        return "audio"
    return "video" if recipe.frames and not recipe.is_layers else "image"


def entry_fields(recipe: Recipe, file: str, run: int, facts: StoredFacts, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest entry; `about` is how the output was generated."""
    return {
        "digest": recipe.digest,
        "file": file,
        "run": run,
        "pixels_sha256": facts.pixels_sha256,
        "file_bytes": facts.file_bytes,
        "file_sha256": facts.file_sha256,
        "recipe": recipe.as_json(),
        **about,
    }


def about_generation(image: FinishedOutput) -> dict[str, Any]:
    """Return the fields of a manifest entry about the generation of an output."""
    return {
        "index": image.index,
        **image.labels.as_json(),
        "job_id": image.job_id,
        "worker": image.worker,
        "seconds": round(image.seconds, 4),
        "tasks": [plain(task) for task in image.tasks],
    }


def about_found_file(labels: Labels = NO_LABELS) -> dict[str, Any]:
    """Return these fields for a file that was found, with its labels: who generated it is not known any more."""
    return {"index": 0, **labels.as_json(), "worker": "", "seconds": 0.0, "tasks": []}


def plain(value: DataclassInstance) -> dict[str, Any]:
    """Convert a dataclass instance to JSON values: enum members to their values, and values with `words` to these."""
    return {field.name: _plain_item(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain_item(item: Any) -> Any:
    if isinstance(item, Enum):
        return item.value
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return item.words if hasattr(item, "words") else dataclasses.asdict(item)
    return item
