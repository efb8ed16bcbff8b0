"""Finds models and LoRAs by their names on the Hugging Face hub, ORG/NAME, in the hub's cache on this machine.

Downloads nothing: a misspelled name in a request must not fetch files of any size. The cache is
huggingface_hub's, with its environment variables (HF_HOME, HF_HUB_CACHE).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.catalog.registry.folder_scan import PIPELINE_FILE
from modelpool.pool.catalog.registry.weight_file_names import without_suffix
from modelpool.pool.files.formats.weights_file import PLAIN_SUFFIXES
from modelpool.pool.values.core.errors import AmbiguousName, UnknownName, counted

_WORD = r"[A-Za-z0-9][\w.\-]{0,95}"
#: ORG/NAME, perhaps with a file of the repository and a revision: ORG/NAME/FILE@REVISION
_NAME = re.compile(rf"({_WORD}/{_WORD})(?:/([^@\0]+?))?(?:@([\w./\-]+))?")
#: files that libraries write under fixed names; one of them is what the repository is for
_FIXED = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
_SNAPSHOTS = "snapshots"


@dataclass(frozen=True, slots=True)
class HubName:
    """A name on the hub. `file` is a path inside the repository, `revision` a branch, tag or commit; "" for none."""

    repository: str
    file: str = ""
    revision: str = ""

    @staticmethod
    def parse(text: str) -> HubName | None:
        """Return the name that `text` is, None if it cannot be one."""
        found = _NAME.fullmatch(text)
        if found is None or ".." in Path(found[2] or "").parts:
            return None
        return HubName(found[1], found[2] or "", found[3] or "")

    @property
    def fetch(self) -> str:
        """The command that fetches it into a folder of models."""
        file, revision = self.file and f":{self.file}", self.revision and f"@{self.revision}"
        return f"modelpool models get {self.repository}{file}{revision}"

    @property
    def download(self) -> str:
        """The command that brings its repository, or its file, into the cache of the hub."""
        words = ["hf download", self.repository, *([self.file] if self.file else [])]
        return " ".join((*words, *([f"--revision {self.revision}"] if self.revision else [])))


def cached_weights(text: str) -> Path | None:
    """Return the file of weights, or the diffusers folder, that `text` names in the cache of the hub; None if it names
    no cached repository.

    Raises UnknownName for a file that the cache does not have, and AmbiguousName for a repository with several.
    """
    name = HubName.parse(text)
    folder = None if name is None else _snapshot(name)
    if name is None or folder is None:
        return None
    if name.file:
        if not (folder / name.file).is_file():
            raise UnknownName(f"{text}: the cache of the hub has no such file; bring it there: {name.download}")
        return folder / name.file
    if (folder / PIPELINE_FILE).is_file():
        return folder
    files = sorted(path for path in folder.iterdir() if path.suffix in PLAIN_SUFFIXES)
    chosen = next((path for path in files if path.name in _FIXED), files[0] if len(files) == 1 else None)
    if chosen is None and files:
        listed = ", ".join(f"{name.repository}/{path.name}" for path in files[:5])
        raise AmbiguousName(
            f"{text}: the repository has {counted(len(files), 'file')} of weights; name one of them: {listed}"
        )
    if chosen is None:
        raise UnknownName(f"{text}: the cache of the hub has no weights of it; bring them there: {name.download}")
    return chosen


def is_of_repository(path: Path, repository: str) -> bool:
    """Whether the file is in a folder ORG/NAME, as `modelpool models get ORG/NAME` places files, or is that folder."""
    return f"/{repository}/" in f"{path.as_posix()}/"


def hub_name(path: Path) -> str | None:
    """Return the name on the hub of a file or folder in the cache, with its commit; None for another path.

    With the commit, the name in a recipe means the same weights after a branch has moved.
    """
    parts = path.parts
    place = next((n for n in range(len(parts) - 2, 0, -1) if parts[n] == _SNAPSHOTS), 0)
    found = re.fullmatch(r"models--(.+?)--(.+)", parts[place - 1]) if place else None
    return None if found is None else "/".join((found[1], found[2], *parts[place + 2 :])) + f"@{parts[place + 1]}"


def name_of_file(path: Path) -> str:
    """Return the name of a file of weights in recipes: on the hub if it is in the cache, else without its suffix."""
    return hub_name(path) or without_suffix(path.name)


def _snapshot(name: HubName) -> Path | None:
    """Return the folder of a revision in the cache. Imports huggingface_hub, which torch's libraries need as well."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name.repository, revision=name.revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
