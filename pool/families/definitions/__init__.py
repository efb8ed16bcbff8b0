"""One module per family of models, or for a few that share an architecture. Each defines `FAMILIES`; adding a module
adds its families everywhere.

`defined_families` and `defined_unets` find the modules. Torch-free to import: functions that call a model receive
tensors and do not import torch at the top of their module.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TypeAlias

from modelpool.pool.families.parts.family import Family
from modelpool.pool.families.parts.unet_definition import UNetDefinition

Definition: TypeAlias = Family | UNetDefinition


@functools.cache
def all_definitions() -> tuple[Definition, ...]:
    """Return the families of all modules of this folder, by module name. Raises AssertionError for a name twice."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    found = tuple(family for name in names for family in importlib.import_module(f"{__name__}.{name}").FAMILIES)
    assert len({family.name for family in found}) == len(found), "two families have one name"
    return found


@functools.cache
def defined_families() -> tuple[Family, ...]:
    """Return the families that are transformers."""
    return tuple(family for family in all_definitions() if isinstance(family, Family))


@functools.cache
def defined_unets() -> tuple[UNetDefinition, ...]:
    """Return the UNets, and the stages of Stable Cascade."""
    return tuple(family for family in all_definitions() if isinstance(family, UNetDefinition))
