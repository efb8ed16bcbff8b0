"""Sizes of a model, read off the shapes of its tensors: one small function for each, put together to configurations.

Knows how to find a number in a shape and how to count blocks. Does not know any architecture. A size that a file must
have and has not, or has in another number of dimensions, is an UnknownArchitecture that names the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.formats.safetensors_file import Shape

#: what a configuration's fields hold: numbers, yes or no, words, None for what a model does not have
Value: TypeAlias = "int | float | bool | str | tuple[Value, ...] | None"
Config: TypeAlias = Mapping[str, Value]

#: more digits than any model has blocks; longer ones are names, not numbers
_NUMBER = re.compile(r"\d{1,6}(?=\.)")


class ShapeReader:
    """The shapes of one model's tensors, keys without prefix, and the numbers in their keys."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._numbers: dict[str, set[int]] | None = None

    def has(self, *keys: str) -> bool:
        """Whether all of `keys` are there."""
        return all(key in self._shapes for key in keys)

    def size(self, key: str, axis: int, rank: int = 2) -> int:
        """The size of `key` along `axis`, a tensor of `rank` dimensions.

        Raises UnknownArchitecture when it is missing or of another number of dimensions.
        """
        if key not in self._shapes:
            raise UnknownArchitecture(f"found no tensor {key!r}, expected one")
        shape = self._shapes[key]
        if len(shape) != rank:
            raise UnknownArchitecture(f"tensor {key!r}: found shape {shape}, expected {rank} dimensions")
        return shape[axis]

    def rank(self, key: str) -> int:
        """How many dimensions `key` has; 0 when it is missing."""
        return len(self._shapes.get(key, ()))

    def shape(self, key: str) -> Shape:
        """The shape of `key`. Raises UnknownArchitecture when it is missing."""
        if key not in self._shapes:
            raise UnknownArchitecture(f"found no tensor {key!r}, expected one")
        return self._shapes[key]

    def numbers(self, beginning: str) -> tuple[int, ...]:
        """The numbers that follow `beginning` in keys, with a dot after them, in order: ("blocks.") -> (0, 1, 2)."""
        if self._numbers is None:
            self._numbers = {}
            for key in self._shapes:
                for found in _NUMBER.finditer(key):
                    self._numbers.setdefault(key[: found.start()], set()).add(int(found[0]))
        return tuple(sorted(self._numbers.get(beginning, ())))


#: one field of a configuration, from the shapes
Measure: TypeAlias = Callable[[ShapeReader], Value]


def sizes(**measures: Measure) -> Callable[[ShapeReader], Config]:
    """A configuration of which each field is measured by itself."""

    def measure(reader: ShapeReader) -> Config:
        return {name: take(reader) for name, take in measures.items()}

    return measure


def dim(key: str, axis: int, rank: int = 2, divide: int = 1) -> Measure:
    """The size of `key` along `axis`, divided by `divide`."""
    return lambda reader: exactly(reader.size(key, axis, rank), divide, key)


def maybe(key: str, axis: int, rank: int = 2, divide: int = 1) -> Measure:
    """As `dim`, None where there is no such tensor."""
    return lambda reader: exactly(reader.size(key, axis, rank), divide, key) if reader.has(key) else None


def either(*measures: tuple[str, Measure]) -> Measure:
    """The measure beside the first key that is there; None where none is."""

    def take(reader: ShapeReader) -> Value:
        return next((measure(reader) for key, measure in measures if reader.has(key)), None)

    return take


def count(*beginnings: str) -> Measure:
    """How many blocks there are whose keys begin with any of `beginnings` and a number."""
    return lambda reader: sum(len(reader.numbers(beginning)) for beginning in beginnings)


def has(*keys: str) -> Measure:
    """Whether all of `keys` are there."""
    return lambda reader: reader.has(*keys)


def always(value: Value) -> Measure:
    """A field that is the same for all models of an architecture."""
    return lambda reader: value


def heads(width: tuple[str, int] | tuple[str, int, int], head: str) -> Measure:
    """How many heads fit into the width of the tensor and axis `width`, each as wide as the norm `head`."""
    return lambda reader: exactly(reader.size(*width), reader.size(head, 0, 1), width[0])


def numbered(beginning: str, end: str) -> Measure:
    """The numbers of the blocks whose keys begin with `beginning` and that have a tensor `end`."""
    return lambda reader: tuple(i for i in reader.numbers(beginning) if reader.has(f"{beginning}{i}.{end}"))


def exactly(size: int, divide: int, key: str) -> int:
    """`size` divided by `divide`. Raises UnknownArchitecture naming `key` when that leaves a rest."""
    if not divide or size % divide:
        raise UnknownArchitecture(f"tensor {key!r}: found size {size}, expected a multiple of {divide}")
    return size // divide
