"""Fits the key map of a file to the module that is built for it, the same for every component.

A tensor that the module has no parameter for changes nothing: training tools leave such tensors in files. They are left
out of the key map, and `Checkpoint.build` names them. A parameter without a tensor, another shape, and a layer that the
module lacks are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from modelpool.pool.models.components.common.diffusers_private import differing_state
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.weights.keymaps.key_map import KeyMap, key_map_of


def fitted(key_map: KeyMap, module: nn.Module, recognized: str, state: Mapping[str, Tensor] | None = None) -> KeyMap:
    """Return `key_map` without tensors that `module` has no parameter for; `key_map` itself if there are none.

    state       the part of the module's state that the file must hold; None for all of it
    recognized  begins the message of errors: "recognised as Flux dev, but"

    Raises UnknownArchitecture for parameters without a tensor, for other shapes, and for tensors of a layer behind the
    last one of the module: their configuration has too few layers.
    """
    own = module.state_dict() if state is None else state
    used = within(key_map, own)
    difference = differing_state(used, own) or _missing_layer(key_map, used, module)
    if difference:
        raise UnknownArchitecture(f"{recognized} {difference}")
    return used


def within(key_map: KeyMap, state: Mapping[str, Tensor]) -> KeyMap:
    """Return `key_map` without parameters that are not in `state`; `key_map` itself if it has none."""
    if key_map.origins.keys() <= state.keys():
        return key_map
    return key_map_of(key_map.sources, {key: origin for key, origin in key_map.origins.items() if key in state})


def _missing_layer(key_map: KeyMap, used: KeyMap, module: nn.Module) -> str:
    """Return the words for a parameter outside of `used` that is of a layer which a list of the module lacks; "" if
    there is none."""
    for key in sorted(key_map.origins.keys() - used.origins.keys()):
        parent: Any = module
        for part in key.split("."):
            if isinstance(parent, nn.ModuleList | nn.Sequential) and part.isdecimal() and int(part) >= len(parent):
                return f"it has {key}, and the configuration has {counted(len(parent), 'such layer')}"
            parent = getattr(parent, part, None)
    return ""
