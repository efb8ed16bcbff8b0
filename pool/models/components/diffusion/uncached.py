"""Remove tensor caches from diffusers' modules: cached methods compute their result each time.

Some classes cache position tables per image size and device in a method cache that lives as long as the process: GPU
memory that no account includes and no unload frees. Computing the tables is cheap compared with a step. Knows Python's
caches; no class of diffusers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from torch import nn


def without_caches(module: nn.Module) -> None:
    """Replace cached methods in all parts of `module` with their uncached functions."""
    known: dict[type[nn.Module], type[nn.Module] | None] = {}
    for part in module.modules():
        cls = type(part)
        if cls not in known:
            known[cls] = _uncached(cls)
        if (own := known[cls]) is not None:
            part.__class__ = own


def _uncached(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return a subclass of `cls` without method caches; None if it has none."""
    found: dict[str, Any] = {}
    for name, method in _own_members(cls).items():
        if (plain := _behind_cache(method)) is not None:
            found[name] = plain
    return type(cls.__name__, (cls,), {**found, "__module__": cls.__module__}) if found else None


def _own_members(cls: type[nn.Module]) -> dict[str, Any]:
    """Return the members of a class and its bases, except `nn.Module`'s, which cache nothing."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(nn.Module, base):
            members.update(vars(base))
    return members


def _behind_cache(method: Any) -> Any | None:
    """Return the function that `method` caches, directly or through a closure; None if it caches nothing."""
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
    except ValueError:  # not assigned yet
        return None
    return contents


def _is_cache(value: object) -> bool:
    """Return whether it is a `functools.lru_cache` wrapper."""
    return hasattr(value, "cache_clear") and hasattr(value, "cache_info")
