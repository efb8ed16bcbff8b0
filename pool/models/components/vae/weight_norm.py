"""Free the weights that torch's older weight norm computes for each call, from direction and length.

Torch leaves the last computed weight on the module, as an attribute that is no parameter: it stays on its device, in no
account, and no unload frees it. For Oobleck that is its complete decoder a second time.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.weight_norm import WeightNorm


def drop_computed_weights(module: nn.Module) -> None:
    """Make every part of `module` drop such a weight after its call, also after an error."""
    for part in module.modules():
        names = [hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
        if names:
            part.register_forward_hook(_Drop(names), always_call=True)


class _Drop:
    """A forward hook that clears these attributes."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Clear them after a call; the next call computes them again."""
        for name in self._names:
            setattr(module, name, None)
