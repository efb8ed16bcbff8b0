"""Models that are split over several GGUF files, as llama.cpp splits them: how their parts are called. Pure.

There is no index: the first part says what the model is, and stands for all of them. Knows names only; whether the
parts belong together is for `pool.formats.gguf_header`.
Source: llama.cpp, tools/gguf-split, and the `gguf` package 0.19.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

#: more parts than any model has
MOST_PARTS = 4096
_PART = re.compile(r"(?P<whole>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class PartName:
    """What the name of a part says.

    whole   what the model is called
    number  which of its parts this is, from 1 on
    count   how many there are, at least two
    ending  ".gguf" as it is written
    """

    whole: str
    number: int
    count: int
    ending: str

    def named(self, number: int) -> str:
        """The name of another part of the model."""
        return f"{self.whole}-{number:05}-of-{self.count:05}{self.ending}"


def part_name(path: str | os.PathLike[str]) -> PartName | None:
    """What the name of `path` says, when it is that of one of several parts."""
    found = _PART.fullmatch(os.path.basename(os.fspath(path)))
    if found is None:
        return None
    name = PartName(found["whole"], int(found["number"]), int(found["count"]), found["ending"])
    return name if 2 <= name.count <= MOST_PARTS and 1 <= name.number <= name.count else None


def is_split(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is called as the first part of a model, which stands for all of them."""
    name = part_name(path)
    return name is not None and name.number == 1


def parts_of(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The parts of the model that `path` is called as one of, there or not, in order. `path` alone for another name."""
    place = os.fspath(path)
    name, folder = part_name(place), os.path.dirname(place)
    if name is None:
        return (place,)
    return tuple(os.path.join(folder, name.named(number)) for number in range(1, name.count + 1))


def stem_of(path: str | os.PathLike[str]) -> str:
    """What the model is called that `path` is, or that it is called as a part of: its name without the ending."""
    name = part_name(path)
    return Path(path).stem if name is None else name.whole


def stands_for(name: str, names: Collection[str]) -> str | None:
    """The first part of the model that `name` is called as a later part of, where it is among `names`."""
    part = part_name(name)
    first = None if part is None or part.number == 1 else part.named(1)
    return first if first in names else None
