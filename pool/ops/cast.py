"""One weight, brought to where and how it is computed with. Pure functions of tensors.

Move first in storage dtype (fewer bytes over the bus), then convert. A weight with functions is the same bit for bit
whether it is made here for one call or kept by the patcher: both use `apply_weight_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pool.ops.context import current

#: takes a fresh float32 (or float64) copy of a weight, which it may write into, and returns the changed weight
WeightFunction: TypeAlias = Callable[[Tensor], Tensor]


def cast(weight: Tensor, device: torch.device, dtype: torch.dtype, functions: Sequence[WeightFunction] = ()) -> Tensor:
    """`weight` on `device` in `dtype` with `functions` applied; itself when there is nothing to do.

    What is not floating point is moved and never converted. The result may share memory with `weight`: do not write.
    """
    if functions:
        return apply_weight_functions(weight, functions, device, dtype)
    if weight.device != device:
        weight = _moved(weight, device)
    if weight.dtype != dtype and weight.is_floating_point():
        weight = weight.to(dtype)
    return weight


def apply_weight_functions(
    weight: Tensor, functions: Sequence[WeightFunction], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """`weight` moved to `device`, converted to float32, changed by `functions` in order, and converted to `dtype`.

    Computes in float64 when `dtype` is that. Without functions nothing passes through float32. `weight` is not written.
    """
    moved = weight.detach()
    if moved.device != device:
        moved = _moved(moved, device)
    if not functions:
        return moved.to(dtype) if moved.is_floating_point() else moved
    working = moved.to(torch.float64 if dtype is torch.float64 else torch.float32).contiguous()
    if working.data_ptr() == weight.data_ptr():
        working = working.clone()
    del moved
    for function in functions:
        working = function(working)
    return working.to(dtype)


def _moved(weight: Tensor, device: torch.device) -> Tensor:
    context = current()
    if context is not None and context.ledger is not None and weight.device.type == "cpu":
        context.ledger.add_h2d(weight.nbytes)
    return weight.to(device)
