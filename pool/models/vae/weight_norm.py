"""Convolutions whose weight is made anew for each call, of a direction and a length (torch's older weight norm).

Torch leaves the last weight made on the module, as an attribute that is no parameter: on the device where it was made,
counted by nobody and taken back by no unloading. For Oobleck that is its whole decoder a second time.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.weight_norm import WeightNorm


def drop_made_weights(module: nn.Module) -> None:
    """Have every part of `module` let go of such a weight when its call is over, also where that fails."""
    for part in module.modules():
        names = [hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
        if names:
            part.register_forward_hook(_Drop(names), always_call=True)


class _Drop:
    """A hook that forgets these attributes."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """After a call: the next one makes them again."""
        for name in self._names:
            setattr(module, name, None)
