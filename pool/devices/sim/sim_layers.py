"""Layers of a model on a simulated device, above torch's dispatcher: on the CPU tensors inside, as the methods of
`operations.DIRECT_METHODS`.

Each is one operation to the device's account. They decline, by returning None, where the dispatcher decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.devices.sim.tensor import common_device, wrap_fresh


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """`torch.nn.functional.linear`, for the layer that a model calls most. Declines weights of another dtype, too."""
    sim = common_device(x, weight, bias)
    if sim is None:
        return None
    inner: Any = x
    return wrap_fresh(
        torch.nn.functional.linear(inner._inner, weight._inner, None if bias is None else bias._inner),  # type: ignore[attr-defined]
        sim,
    )


def layer(
    function: Callable[..., Tensor], module: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """`function(module, x, weight, bias)`, which calls one operation of torch with a fresh result. Declines weights of
    another dtype, too."""
    sim = common_device(x, weight, bias)
    if sim is None:
        return None
    inner: Any = x
    inner_weight: Any = None if weight is None else weight._inner  # type: ignore[attr-defined]
    inner_bias: Any = None if bias is None else bias._inner  # type: ignore[attr-defined]
    return wrap_fresh(function(module, inner._inner, inner_weight, inner_bias), sim)
