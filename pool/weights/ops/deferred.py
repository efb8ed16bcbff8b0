"""A tensor that stands for a weight and is computed when an operation reads it.

Models ask their weights for a dtype or a device more often than for values (`x.to(self.weight.dtype)`). A deferred
weight answers that without moving data, and a streamed weight crosses the bus exactly once per use. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from modelpool.pool.devices.torch_api.torch_private import make_wrapper, no_torch_function
from modelpool.pool.weights.ops.cast import WeightFunction, cast, gather_rows
from modelpool.pool.weights.ops.packed import PackedWeight

_EMBEDDING = torch.ops.aten.embedding.default


class DeferredWeight(Tensor):
    """Stands for `source` cast for computation; created only by `deferred_cast`."""

    source: Tensor  # the stored weight
    functions: Sequence[WeightFunction]

    __torch_function__ = no_torch_function  # type: ignore[assignment] # as torch's own wrapper classes do

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # the stubs give the signature of torch's disabled handler
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        table = args[0] if args else None
        if isinstance(table, cls):
            if func._schema.arguments[0].is_write:
                raise RuntimeError(f"{func} would write to a weight that is not resident: pooled weights are read-only")
            if func is _EMBEDDING and not table.functions and not isinstance(args[1], cls):
                return gather_rows(table.source, args[1], table.dtype)
        args, kwargs = pytree.tree_map_only(cls, _computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # the stub is untyped
        return f"DeferredWeight({tuple(self.shape)}, {self.dtype}, {self.device})"


def deferred_cast(
    weight: Tensor, device: torch.device, dtype: torch.dtype, functions: Sequence[WeightFunction] = ()
) -> Tensor:
    """Return the result of `cast`, computed when it is read; `weight` itself when there is nothing to do.

    While a graph is compiled, and where a gradient may be needed, it is computed at once.
    """
    is_packed = isinstance(weight, PackedWeight)
    is_ready = weight.device == device and (weight.dtype == dtype or not weight.is_floating_point())
    if is_ready and not functions and not is_packed:
        return weight
    if torch.compiler.is_compiling() or (weight.requires_grad and torch.is_grad_enabled()):
        return cast(weight, device, dtype, functions)
    deferred: DeferredWeight = make_wrapper(
        DeferredWeight,
        weight.shape,
        weight.stride(),
        dtype=dtype if weight.is_floating_point() else weight.dtype,
        device=device,
    )
    deferred.source = weight
    deferred.functions = functions
    return deferred


def _computed(deferred: DeferredWeight) -> Tensor:
    return cast(deferred.source, deferred.device, deferred.dtype, deferred.functions)
