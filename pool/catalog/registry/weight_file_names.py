"""Names of files of weights: which file a name means, and the shortest name of each. Pure.

Rules:
1. A file's name is the end of its path: the stem, with as many parent folders as are needed, "sdxl/base".
2. With or without suffix: "base.safetensors" is a name of base.safetensors, and distinguishes it from base.sft.
3. Exact matches precede matches that differ in case. Composed and decomposed letters are equal.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias

from modelpool.pool.files.formats.gguf_parts import part_name

_Parts: TypeAlias = tuple[str, ...]

#: suffixes that are not part of a name, the longer of two matches first
SUFFIXES = (".safetensors.index.json", ".model.json", ".safetensors", ".sft", ".gguf", ".ckpt", ".pth", ".pt", ".bin")
#: of the index of a model in several files, with the variant before or after "index"
_INDEX = re.compile(r"\.(safetensors|bin)(?P<before>\.\w+)?\.index(?P<after>\.\w+)?\.json$")


@dataclass(frozen=True, slots=True)
class PathName:
    """A file's path for comparison with names: its folders, and its name with and without suffix."""

    folders: _Parts
    stem: str
    file_name: str

    def ends_with(self, wanted: _Parts, normalize: Callable[[str], str]) -> bool:
        """Whether `wanted` is a name of the file; both are normalized before the comparison."""
        if not wanted or len(wanted) > len(self.folders) + 1:
            return False
        folders = self.folders[len(self.folders) - len(wanted) + 1 :]
        last = normalize(wanted[-1])
        return last in (normalize(self.stem), normalize(self.file_name)) and all(
            normalize(a) == normalize(b) for a, b in zip(wanted[:-1], folders, strict=True)
        )

    def name(self, folders: int, with_suffix: bool = False) -> str:
        """Return the name with `folders` parent folders."""
        before = self.folders[len(self.folders) - folders :]
        text = "/".join((*before, self.file_name if with_suffix else self.stem))
        return text.replace("//", "/", 1) if text.startswith("//") else text


def path_name(path: PurePath) -> PathName:
    """Return the `PathName` of an absolute path."""
    return PathName(path.parts[:-1], without_suffix(path.name), path.name)


def without_suffix(file_name: str) -> str:
    """Return `file_name` without the suffix of a weights file and the number of a first part. An index keeps its
    variant: "model.fp16"."""
    index = _INDEX.search(file_name)
    if index is not None and index.start():
        return file_name[: index.start()] + (index["before"] or index["after"] or "")
    part = part_name(file_name)
    if part is not None and part.number == 1:
        return part.stem
    low = file_name.lower()
    ending = next((e for e in SUFFIXES if low.endswith(e) and len(low) > len(e)), "")
    return file_name[: len(file_name) - len(ending)]


def folded(text: str) -> str:
    """Return `text` for case-insensitive comparison."""
    return unicodedata.normalize("NFC", text).casefold()


def named(name: str, paths: Iterable[PurePath]) -> list[PurePath]:
    """Return the files of `paths` that `name` can mean, in order: exact matches, else those that differ in case."""
    wanted = PurePath(name).parts
    path_names = [(path, path_name(path)) for path in paths]
    exact = [path for path, candidate in path_names if candidate.ends_with(wanted, _composed)]
    return exact or [path for path, candidate in path_names if candidate.ends_with(wanted, folded)]


def shortest_names(paths: Sequence[PurePath], taken: Collection[str] = ()) -> dict[PurePath, str]:
    """Return the shortest name of each of `paths` (each once) that means no other of them and is none of `taken`.

    `taken` are case-folded.
    """
    found: dict[PurePath, str] = {}
    left = {path: path_name(path) for path in paths}
    folders = 0
    while left:
        meant = Counter(n for candidate in left.values() for n in _names_at(candidate, folders))
        for path, candidate in list(left.items()):
            is_whole = folders >= len(candidate.folders)
            name = candidate.name(folders)
            if meant[_composed(name)] > 1 and is_whole:
                name = candidate.name(folders, with_suffix=True)
            if is_whole or (meant[_composed(name)] == 1 and folded(name) not in taken):
                found[path] = name
                del left[path]
        folders += 1
    return found


def _names_at(candidate: PathName, folders: int) -> set[str]:
    """Return the names of a file with `folders` parent folders."""
    return {_composed(candidate.name(folders)), _composed(candidate.name(folders, with_suffix=True))}


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)
