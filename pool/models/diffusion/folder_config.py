"""The config.json of a diffusers folder as arguments of a class. It comes from outside and is not trusted.

Only arguments that the class has are passed on. It may not ask for more layers than there are tensors, nor for tables
of positions larger than any model has.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.models.diffusion.architecture import Arguments

#: cells along a side of a table of positions, and numbers in lists (how far tables reach, how wide they are): several
#: times what any published model has
MOST_CELLS, MOST_IN_LISTS = 1 << 9, 1 << 13
#: classes that make no table of what others make one of
_LENGTHS = frozenset({("StableAudioDiTModel", "sample_size")})


def given_arguments(module: type[nn.Module], config: Mapping[str, Any], tensors: int) -> Arguments:
    """What of `config` the class `module` takes, for a model of so many `tensors`.

    What a configuration says of itself (versions, names) is left out. Raises UnknownArchitecture when it names another
    class, asks for more layers than there are tensors, or for larger tables than any model has.
    """
    named = config.get("_class_name", module.__name__)
    if named != module.__name__:
        raise UnknownArchitecture(
            f"diffusion model: its configuration names the class {named!r}, expected {module.__name__}"
        )
    taken = set(inspect.signature(module.__init__).parameters) - {"self"}
    own = {key: value for key, value in config.items() if key in taken}
    for key, value in own.items():
        most = math.inf if (module.__name__, key) in _LENGTHS else _most(key, value, tensors)
        if max(_numbers(value), default=0) > most:
            of_tensors = " (there are no more tensors)" if most == tensors else ""
            raise UnknownArchitecture(
                f"diffusion model: {module.__name__}: found {key} {value!r}, expected at most {most}{of_tensors}"
            )
    return own


def _most(key: str, value: Any, tensors: int) -> float:
    """The largest number that the argument `key` may have."""
    if "layers" in key or "blocks" in key:
        return tensors
    if key == "sample_size":
        return MOST_CELLS
    return MOST_IN_LISTS if isinstance(value, list | tuple) else math.inf


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
