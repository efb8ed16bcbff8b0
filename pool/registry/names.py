"""How files of weights are named by people: which file a name means, and the shortest name of each. Pure.

Rules:
1. A file's name is the end of its path: the stem, or as many folders before it as are needed, "sdxl/base".
2. With the ending or without: "base.safetensors" is a name of base.safetensors, and tells it from base.sft.
3. Names that are written exactly so go before names that differ in case. Composed and decomposed letters are equal.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias

from modelpool.pool.formats.gguf_parts import part_name

_Parts: TypeAlias = tuple[str, ...]

#: endings that are no part of a name, the longer of two that fit first
ENDINGS = (".safetensors.index.json", ".model.json", ".safetensors", ".sft", ".gguf", ".ckpt", ".pth", ".pt", ".bin")
#: of several files that are one model, with the variant before or after "index"
_INDEX = re.compile(r"\.(safetensors|bin)(?P<before>\.\w+)?\.index(?P<after>\.\w+)?\.json$")


@dataclass(frozen=True, slots=True)
class Spelling:
    """A file's path as names are compared with it: its folders, and its own name with and without ending."""

    folders: _Parts
    stem: str
    file_name: str

    def ends_with(self, wanted: _Parts, alike: Callable[[str], str]) -> bool:
        """Whether `wanted` is a name of the file, both made alike before they are compared."""
        if not wanted or len(wanted) > len(self.folders) + 1:
            return False
        folders = self.folders[len(self.folders) - len(wanted) + 1 :]
        own = alike(wanted[-1])
        return own in (alike(self.stem), alike(self.file_name)) and all(
            alike(a) == alike(b) for a, b in zip(wanted[:-1], folders, strict=True)
        )

    def name(self, folders: int, with_ending: bool = False) -> str:
        """The name with so many folders before it."""
        before = self.folders[len(self.folders) - folders :]
        text = "/".join((*before, self.file_name if with_ending else self.stem))
        return text.replace("//", "/", 1) if text.startswith("//") else text


def spelling(path: PurePath) -> Spelling:
    """The spelling of an absolute path."""
    return Spelling(path.parts[:-1], without_ending(path.name), path.name)


def without_ending(file_name: str) -> str:
    """`file_name` without the ending of a file of weights, nor what says that it is the first of several parts. An
    index keeps the variant that it is of: "model.fp16"."""
    index = _INDEX.search(file_name)
    if index is not None and index.start():
        return file_name[: index.start()] + (index["before"] or index["after"] or "")
    part = part_name(file_name)
    if part is not None and part.number == 1:
        return part.whole
    low = file_name.lower()
    ending = next((e for e in ENDINGS if low.endswith(e) and len(low) > len(e)), "")
    return file_name[: len(file_name) - len(ending)]


def folded(text: str) -> str:
    """`text` as names are compared where case does not count."""
    return unicodedata.normalize("NFC", text).casefold()


def named(name: str, paths: Iterable[PurePath]) -> list[PurePath]:
    """The files of `paths` that `name` can mean, in their order: those written exactly so, else those that differ in
    case."""
    wanted = PurePath(name).parts
    spellings = [(path, spelling(path)) for path in paths]
    exact = [path for path, own in spellings if own.ends_with(wanted, _composed)]
    return exact or [path for path, own in spellings if own.ends_with(wanted, folded)]


def shortest_names(paths: Sequence[PurePath], taken: Collection[str] = ()) -> dict[PurePath, str]:
    """The shortest name of each of `paths` (each once) that means no other of them and is none of `taken`.

    `taken` are folded.
    """
    found: dict[PurePath, str] = {}
    left = {path: spelling(path) for path in paths}
    folders = 0
    while left:
        meant = Counter(n for own in left.values() for n in _meanings(own, folders))
        for path, own in list(left.items()):
            is_whole = folders >= len(own.folders)
            name = own.name(folders)
            if meant[_composed(name)] > 1 and is_whole:
                name = own.name(folders, with_ending=True)
            if is_whole or (meant[_composed(name)] == 1 and folded(name) not in taken):
                found[path] = name
                del left[path]
        folders += 1
    return found


def _meanings(own: Spelling, folders: int) -> set[str]:
    """What a file is called with so many folders before its name."""
    return {_composed(own.name(folders)), _composed(own.name(folders, with_ending=True))}


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)
