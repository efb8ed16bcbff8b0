"""Building blocks that measure model sizes from tensor shapes, and combine them to configurations.

Finds numbers in shapes and counts blocks; knows no architecture. A missing required tensor, or one with another number
of dimensions, raises UnknownArchitecture naming the tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture

#: values of configuration fields: numbers, booleans, strings, None for absent features
Value: TypeAlias = "int | float | bool | str | tuple[Value, ...] | None"
Config: TypeAlias = Mapping[str, Value]

#: more digits than any block number; longer ones are names, not numbers
_NUMBER = re.compile(r"\d{1,6}(?=\.)")


class ShapeReader:
    """The shapes of one model's tensors, keys without prefix, and the numbers in their keys."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._numbers: dict[str, set[int]] | None = None

    def has(self, *keys: str) -> bool:
        """Return whether all of `keys` exist."""
        return all(key in self._shapes for key in keys)

    def size(self, key: str, axis: int, rank: int = 2) -> int:
        """Return the size of `key` along `axis`, a tensor of `rank` dimensions.

        Raises UnknownArchitecture if it is missing or has another number of dimensions.
        """
        if key not in self._shapes:
            raise UnknownArchitecture(f"missing tensor {key!r}")
        shape = self._shapes[key]
        if len(shape) != rank:
            raise UnknownArchitecture(f"tensor {key!r}: found shape {shape}, expected {rank} dimensions")
        return shape[axis]

    def rank(self, key: str) -> int:
        """Return the number of dimensions of `key`; 0 if it is missing."""
        return len(self._shapes.get(key, ()))

    def shape(self, key: str) -> Shape:
        """Return the shape of `key`. Raises UnknownArchitecture if it is missing."""
        if key not in self._shapes:
            raise UnknownArchitecture(f"missing tensor {key!r}")
        return self._shapes[key]

    def numbers(self, beginning: str) -> tuple[int, ...]:
        """Return the sorted numbers that follow `beginning` in keys, followed by a dot: ("blocks.") -> (0, 1, 2)."""
        if self._numbers is None:
            self._numbers = {}
            for key in self._shapes:
                for found in _NUMBER.finditer(key):
                    self._numbers.setdefault(key[: found.start()], set()).add(int(found[0]))
        return tuple(sorted(self._numbers.get(beginning, ())))


#: one field of a configuration, from the shapes
Measure: TypeAlias = Callable[[ShapeReader], Value]


def sizes(**measures: Measure) -> Callable[[ShapeReader], Config]:
    """Combine measures, one per field, to a configuration."""

    def measure(reader: ShapeReader) -> Config:
        return {name: take(reader) for name, take in measures.items()}

    return measure


def dim(key: str, axis: int, rank: int = 2, divide: int = 1) -> Measure:
    """Measure the size of `key` along `axis`, divided by `divide`."""
    return lambda reader: exactly(reader.size(key, axis, rank), divide, key)


def maybe(key: str, axis: int, rank: int = 2, divide: int = 1) -> Measure:
    """Measure as `dim`; None if the tensor is missing."""
    return lambda reader: exactly(reader.size(key, axis, rank), divide, key) if reader.has(key) else None


def either(*measures: tuple[str, Measure]) -> Measure:
    """Use the measure of the first existing key; None if no key exists."""

    def take(reader: ShapeReader) -> Value:
        return next((measure(reader) for key, measure in measures if reader.has(key)), None)

    return take


def count(*beginnings: str) -> Measure:
    """Count the blocks with keys that begin with any of `beginnings` and a number."""
    return lambda reader: sum(len(reader.numbers(beginning)) for beginning in beginnings)


def has(*keys: str) -> Measure:
    """Measure whether all of `keys` exist."""
    return lambda reader: reader.has(*keys)


def always(value: Value) -> Measure:
    """A constant field, for all models of an architecture."""
    return lambda reader: value


def heads(width: tuple[str, int] | tuple[str, int, int], head: str) -> Measure:
    """Measure how many heads, each as wide as the norm `head`, fit into the tensor and axis `width`."""
    return lambda reader: exactly(reader.size(*width), reader.size(head, 0, 1), width[0])


def square_side(key: str, axis: int, rank: int, times: int = 1) -> Measure:
    """Measure the side of the square grid with one row of `key` per cell, multiplied by `times`."""
    return lambda reader: math.isqrt(reader.size(key, axis, rank)) * times


def numbered(beginning: str, end: str) -> Measure:
    """Measure the numbers of the blocks under `beginning` that have a tensor `end`."""
    return lambda reader: tuple(i for i in reader.numbers(beginning) if reader.has(f"{beginning}{i}.{end}"))


def exactly(size: int, divide: int, key: str) -> int:
    """Return `size / divide`. Raises UnknownArchitecture naming `key` if there is a remainder."""
    if not divide or size % divide:
        raise UnknownArchitecture(f"tensor {key!r}: found size {size}, expected a multiple of {divide}")
    return size // divide
