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
    held: Any = x
    held_weight: Any = weight
    held_bias: Any = bias
    inner_bias = None if bias is None else held_bias._inner
    return wrap_fresh(torch.nn.functional.linear(held._inner, held_weight._inner, inner_bias), sim)


def layer(
    function: Callable[..., Tensor], module: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """`function(module, x, weight, bias)`, which calls one operation of torch with a fresh result. Declines weights of
    another dtype, too."""
    sim = common_device(x, weight, bias)
    if sim is None:
        return None
    held: Any = x
    held_weight: Any = weight
    held_bias: Any = bias
    inner_weight = None if weight is None else held_weight._inner
    inner_bias = None if bias is None else held_bias._inner
    return wrap_fresh(function(module, held._inner, inner_weight, inner_bias), sim)
