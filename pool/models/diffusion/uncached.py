"""Parts of diffusers' models that remember tensors for good, made to compute them anew.

Some classes keep tables of positions in a cache of their method, one for each size of image and each device, which
lives as long as the process: memory of the GPU that nobody counts and no unloading gives back. The tables are small
work beside a step. Knows Python's caches; no class of diffusers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from torch import nn


def without_caches(module: nn.Module) -> None:
    """Have no part of `module` keep what a method of it made: those methods make it anew each time."""
    known: dict[type[nn.Module], type[nn.Module] | None] = {}
    for part in module.modules():
        cls = type(part)
        if cls not in known:
            known[cls] = _uncached(cls)
        if (own := known[cls]) is not None:
            part.__class__ = own


def _uncached(cls: type[nn.Module]) -> type[nn.Module] | None:
    """A class as `cls`, with the functions that its caching methods are made of; None where it has none."""
    found: dict[str, Any] = {}
    for name, method in _own_members(cls).items():
        if (plain := _behind_cache(method)) is not None:
            found[name] = plain
    return type(cls.__name__, (cls,), {**found, "__module__": cls.__module__}) if found else None


def _own_members(cls: type[nn.Module]) -> dict[str, Any]:
    """What is written in a class and its bases, below torch's own, whose methods keep nothing."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(nn.Module, base):
            members.update(vars(base))
    return members


def _behind_cache(method: Any) -> Any | None:
    """The function whose results `method` keeps, itself or by what it calls; None where it keeps nothing."""
    if isinstance(method, staticmethod | classmethod):
        own = _behind_cache(method.__func__)
        return None if own is None else type(method)(own)
    plain: Callable[..., Any] | None = getattr(method, "__wrapped__", None)
    if plain is None:
        return None
    cells = method.__closure__ or () if isinstance(method, FunctionType) else ()
    is_cached = _is_cache(method) or any(_is_cache(_in_cell(cell)) for cell in cells)
    return plain if is_cached else None


def _in_cell(cell: CellType) -> object:
    try:
        contents: object = cell.cell_contents
    except ValueError:  # nothing was put there yet
        return None
    return contents


def _is_cache(value: object) -> bool:
    """Of `functools.lru_cache`."""
    return hasattr(value, "cache_clear") and hasattr(value, "cache_info")
