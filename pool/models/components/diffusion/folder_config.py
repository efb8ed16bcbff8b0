"""Validate the config.json of a diffusers folder and return the class arguments in it. The file is untrusted.

Only arguments of the class are passed on. It may not request more layers than there are tensors, nor larger position
tables than any published model has.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from modelpool.pool.families.parts.forward import Arguments
from modelpool.pool.models.components.common.infer_config import whole_numbers
from modelpool.pool.values.core.errors import UnknownArchitecture

#: limits for the side of a position table in cells, and for numbers in lists (reach and width of tables): several
#: times the largest published values
MOST_CELLS, MOST_IN_LISTS = 1 << 9, 1 << 13


def config_arguments(
    module: type[nn.Module], config: Mapping[str, Any], tensors: int, lengths: frozenset[str] = frozenset()
) -> Arguments:
    """Return the arguments in `config` that the class `module` takes, for a model of `tensors` tensors. Those in
    `lengths` allocate nothing, and may be any number.

    Drops metadata (versions, names). Raises UnknownArchitecture if it names another class, or requests more layers than
    there are tensors or larger tables than any model has.
    """
    named = config.get("_class_name", module.__name__)
    if named != module.__name__:
        raise UnknownArchitecture(
            f"diffusion model: its configuration names the class {named!r}, expected {module.__name__}"
        )
    taken = set(inspect.signature(module.__init__).parameters) - {"self"}
    own = {key: value for key, value in config.items() if key in taken}
    for key, value in own.items():
        most = math.inf if key in lengths else _most(key, value, tensors)
        if max(whole_numbers(value), default=0) > most:
            of_tensors = " (the number of tensors)" if most == tensors else ""
            raise UnknownArchitecture(
                f"diffusion model: {module.__name__}: found {key} {value!r}, expected at most {most}{of_tensors}"
            )
    return own


def _most(key: str, value: Any, tensors: int) -> float:
    """Return the largest allowed value of the argument `key`."""
    if "layers" in key or "blocks" in key:
        return tensors
    if key == "sample_size":
        return MOST_CELLS
    return MOST_IN_LISTS if isinstance(value, list | tuple) else math.inf
