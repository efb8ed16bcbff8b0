"""`WireValue`: base class of values that travel between processes. `evolve`: a fast `dataclasses.replace`, for values
that are made for each task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

_T = TypeVar("_T")
#: kinds of values; there are some hundred
_MOST_KINDS = 1024


@lru_cache(_MOST_KINDS)
def _values_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return the function from a value of this kind to its constructor arguments, in order."""
    names: tuple[str, ...] = kind.__match_args__
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


@lru_cache(_MOST_KINDS)
def _places_of(kind: Any) -> Mapping[str, int]:
    """Return the places of the constructor arguments of this kind, by name."""
    return {name: place for place, name in enumerate(kind.__match_args__)}


def evolve(value: _T, /, **changes: Any) -> _T:
    """Return a dataclass with some fields replaced, as `dataclasses.replace`, which takes twice as long. All its fields
    must be positional arguments of its constructor."""
    kind: Any = type(value)
    values, places = list(_values_of(kind)(value)), _places_of(kind)
    for name, new in changes.items():
        values[places[name]] = new
    evolved: _T = kind(*values)
    return evolved


# The build of the compiled scheduler lets Python classes derive from it (setup.py): most messages are Python.
class WireValue:
    """A dataclass that is pickled as its constructor arguments, in order.

    A value of the compiled scheduler (setup.py) can thus be read by the Python one and the other way round; it is also
    faster than pickling the state of a frozen dataclass with slots.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = type(self)
        return kind, _values_of(kind)(self)
