"""`OutputFolder`: a folder of finished images, videos and audio clips: one file per recipe, manifest, contact sheet.

Knows files and names; not jobs, workers or Ray. Rules
1. A file under its final name is complete: it is written under a temporary name, synced and renamed.
2. An output counts as finished when its manifest line exists, and the line is written after the file.
3. Same recipe, same file name; it is neither written nor listed twice.
4. Every change happens under one lock (`LOCK_NAME`), so several runs may share the folder, and the holder of the lock
   knows that any temporary file is left over from a killed run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.outputs.atomic_write import TEMPORARY_SUFFIX as TEMPORARY_SUFFIX
from modelpool.actors.outputs.atomic_write import write_atomically as write_atomically
from modelpool.actors.outputs.contact_sheet import LabelledImage, make_contact_sheet
from modelpool.actors.outputs.manifest import Manifest
from modelpool.actors.outputs.output_file import FinishedOutput as FinishedOutput
from modelpool.actors.outputs.output_file import array_of_output, encoded
from modelpool.actors.outputs.png import recipe_from_json
from modelpool.pool.core.errors import OutputFailed
from modelpool.pool.core.stage_params import FloatArray, PixelArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MANIFEST_NAME = "manifest.jsonl"
CONTACT_SHEET_NAME = "contact_sheet.png"
LOCK_NAME = ".lock"
_SLUG_CHARACTERS = 60


@runtime_checkable
class _HasWords(Protocol):
    """A value that describes itself in a sentence."""

    @property
    def words(self) -> str: ...


@dataclass(frozen=True, slots=True)
class KeptImage:
    """An image, video or audio clip that is listed in the manifest and exists."""

    path: Path
    recipe: Recipe
    pixels_sha256: str
    #: the complete manifest entry
    entry: dict[str, Any]


class OutputFolder:
    """Writes and finds outputs in one folder.

    Creating it creates the folder, checks that it is writable and removes temporary files of a killed run. Every
    method raises OutputFailed naming the folder or file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._manifest = Manifest(self.path / MANIFEST_NAME)
        self._entries: dict[str, dict[str, Any]] = {}
        #: the number of this run among those that wrote here; 0 until it has written
        self._run = 0
        with self._failures_named(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._clear_leftovers()
                self._prove_writable()
                self._read_new_entries()

    def write(self, image: FinishedOutput) -> Path:
        """Write and list an output; return its path, also if this recipe was written before."""
        digest = image.recipe.digest
        path = self.path / file_name(image.recipe)
        with self._failures_named(path):
            content = encoded(image.output, image.recipe)
            with self._locked():
                self._read_new_entries()
                listed = digest in self._entries
                if not listed or not path.exists():  # an unlisted file is from a run that was killed in between
                    write_atomically(path, content)
                if not listed:
                    self._append(digest, path, image)
        return path

    def finished(self) -> dict[str, Path]:
        """Return the listed and existing files by the digest of their recipe, in order of creation."""
        return {digest: kept.path for digest, kept in self.kept().items()}

    def kept(self) -> dict[str, KeptImage]:
        """Return `finished` with the manifest entries."""
        with self._failures_named(self.path):
            self._read_new_entries()
        kept: dict[str, KeptImage] = {}
        for digest, entry in self._entries.items():
            path = self.path / str(entry["file"])
            if path.exists():
                recipe = recipe_from_json(entry["recipe"])
                kept[digest] = KeptImage(path, recipe, str(entry["pixels_sha256"]), entry)
        return kept

    def contact_sheet(self) -> Path:
        """Draw a contact sheet of this folder, run by run in order of submission; return its path."""
        images = sorted(self.kept().values(), key=lambda kept: (kept.entry["run"], kept.entry["index"]))
        path = self.path / CONTACT_SHEET_NAME
        with self._failures_named(path):
            content = make_contact_sheet([LabelledImage(kept.path, kept.recipe) for kept in images])
            with self._locked():
                write_atomically(path, content)
        return path

    def _append(self, digest: str, path: Path, image: FinishedOutput) -> None:
        if self._run == 0:
            self._run = 1 + max((int(entry["run"]) for entry in self._entries.values()), default=0)
        self._manifest.repair()
        self._manifest.append(
            {
                "digest": digest,
                "file": path.name,
                "run": self._run,
                "index": image.index,
                "job_id": image.job_id,
                "worker": image.worker,
                "seconds": round(image.seconds, 4),
                "pixels_sha256": pixels_sha256(array_of_output(image.output)),
                "recipe": image.recipe.as_json(),
                "tasks": [plain(task) for task in image.tasks],
            }
        )
        self._read_new_entries()

    def _read_new_entries(self) -> None:
        for entry in self._manifest.read_new():
            missing = [key for key in ("digest", "file", "run", "index", "recipe", "pixels_sha256") if key not in entry]
            if missing:
                raise OutputFailed(f"{self._manifest.path}: a line without {missing[0]!r}; is it a modelpool manifest?")
            self._entries.setdefault(str(entry["digest"]), entry)

    def _clear_leftovers(self) -> None:
        for leftover in self.path.glob(f".*{TEMPORARY_SUFFIX}"):
            leftover.unlink(missing_ok=True)
        self._manifest.repair()

    def _prove_writable(self) -> None:
        """Write and remove a small file: only this detects permissions, read-only mounts and full disks."""
        probe = self.path / f".probe{TEMPORARY_SUFFIX}"
        probe.write_bytes(b"modelpool")
        probe.unlink()

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
            raise OutputFailed(f"{path}: cannot be written ({_reason(error)})") from error


def file_name(recipe: Recipe) -> str:
    """Return 'a-red-circle-7-1f2e3d4c.png': readable, and different for different recipes."""
    slug = re.sub(r"[^a-z0-9]+", "-", recipe.prompt.lower()).strip("-")[:_SLUG_CHARACTERS].strip("-")
    return f"{slug or kind_of_recipe(recipe)}-{recipe.seed}-{recipe.digest[:8]}.{recipe.ending}"


def kind_of_recipe(recipe: Recipe) -> str:
    """Return the kind of output of a recipe."""
    return "video" if recipe.frames else "audio" if recipe.seconds else "image"


def pixels_sha256(pixels: PixelArray | FloatArray) -> str:
    """Return the SHA-256 of the pixels, independent of the file: of their bytes, row by row, red green blue; of a
    video's frames one after the other, of an audio clip's samples channel by channel.
    """
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def plain(value: DataclassInstance) -> dict[str, Any]:
    """Convert a dataclass instance to JSON values: enum members to their values, and values with `words` to these."""
    return {field.name: _plain_item(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain_item(item: Any) -> Any:
    if isinstance(item, Enum):
        return item.value
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return item.words if isinstance(item, _HasWords) else dataclasses.asdict(item)
    return item


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
