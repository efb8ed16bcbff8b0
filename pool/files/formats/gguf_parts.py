"""File names of models that are split over several GGUF files, as llama.cpp splits them. Pure.

There is no index: the first part describes the model and represents all of them. Knows names only;
`pool.files.formats.gguf_header` checks that the parts belong together.
Source: llama.cpp, tools/gguf-split, and the `gguf` package 0.19.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

#: more parts than any model has
MAX_PARTS = 4096
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class PartName:
    """The fields of a part's file name.

    stem    name of the model
    number  index of the part, from 1 on
    count   number of parts, at least two
    ending  ".gguf" as it is written
    """

    stem: str
    number: int
    count: int
    ending: str

    def sibling(self, number: int) -> str:
        """Return the file name of another part of the model."""
        return f"{self.stem}-{number:05}-of-{self.count:05}{self.ending}"


def part_name(path: str | os.PathLike[str]) -> PartName | None:
    """Parse the name of `path`; None if it is not the name of one of several parts."""
    found = _PART.fullmatch(os.path.basename(os.fspath(path)))
    if found is None:
        return None
    name = PartName(found["stem"], int(found["number"]), int(found["count"]), found["ending"])
    return name if 2 <= name.count <= MAX_PARTS and 1 <= name.number <= name.count else None


def is_split(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is named as the first part of a model."""
    name = part_name(path)
    return name is not None and name.number == 1


def parts_of(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the paths of all parts of the model of `path`, in order, existing or not; `path` alone for another
    name."""
    text = os.fspath(path)
    name, folder = part_name(text), os.path.dirname(text)
    if name is None:
        return (text,)
    return tuple(os.path.join(folder, name.sibling(number)) for number in range(1, name.count + 1))


def stem_of(path: str | os.PathLike[str]) -> str:
    """Return the name of the model of which `path` is the file or a part: the file name without the ending."""
    name = part_name(path)
    return Path(path).stem if name is None else name.stem


def first_part_of(name: str, names: Collection[str]) -> str | None:
    """Return the first part of the model of which `name` is a later part, if it is among `names`; else None."""
    part = part_name(name)
    first = None if part is None or part.number == 1 else part.sibling(1)
    return first if first in names else None
