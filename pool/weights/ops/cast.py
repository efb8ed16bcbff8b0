"""Moves a weight to the device and dtype that it is computed with. Pure functions of tensors.

Moves in storage dtype first (fewer bytes over the bus), then converts. A patched weight is the same bit for bit whether
it is computed for one call or kept by the patcher: both use `apply_weight_functions`.

Torch converts 8-bit floats on the CPU one by one; `converted` is several times faster: two neighbours form one 16-bit
number, and a table maps every such pair to its values. Torch computes the table, so the result equals torch's bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeAlias

import torch
from torch import Tensor, nn

from modelpool.pool.weights.ops.context import current
from modelpool.pool.weights.ops.packed import PackedWeight

#: below this, computing the table takes as long as the conversion
MIN_ELEMENTS = 1 << 18
#: converted at once: input and output stay in the processor's cache, and the indices take little memory
_BLOCK_PAIRS = 1 << 16
_TENSORS = (Tensor, nn.Parameter)
_NARROW = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
#: integer type with the size of a pair of results
_PAIRS = {torch.float16: torch.int32, torch.bfloat16: torch.int32, torch.float32: torch.int64}


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.to(dtype)`, by the table where that is possible."""
    if x.dtype not in _NARROW or dtype not in _PAIRS or not _is_plain(x):
        return x.to(dtype)
    table = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(x.dtype).to(dtype).view(_PAIRS[dtype])
    result = torch.empty(x.shape, dtype=dtype)
    pairs, into = x.detach().view(-1).view(torch.uint16), result.view(-1).view(_PAIRS[dtype])
    for indices, block in zip(pairs.split(_BLOCK_PAIRS), into.split(_BLOCK_PAIRS), strict=True):
        torch.index_select(table, 0, indices.to(torch.int32), out=block)
    return result


def _is_plain(x: Tensor) -> bool:
    """Whether `x` is a contiguous host tensor of an even number of elements, large enough for the table."""
    return (
        type(x) in _TENSORS
        and x.device.type == "cpu"
        and x.numel() >= MIN_ELEMENTS
        and x.numel() % 2 == x.storage_offset() % 2 == 0
        and x.is_contiguous()
        and not x.requires_grad
        and not torch.compiler.is_compiling()
    )


#: moves a tensor to a device; the result is new memory, unless the tensor was there already
Move: TypeAlias = Callable[[Tensor, torch.device], Tensor]
#: gets a new float32 (or float64) copy of a weight, which it may modify, and returns the changed weight
WeightFunction: TypeAlias = Callable[[Tensor], Tensor]

#: moves the tensors of the patches that are computed now; None: they are copied from where they are
_FACTOR_MOVE: ContextVar[Move | None] = ContextVar("factor_move", default=None)


def cast(weight: Tensor, device: torch.device, dtype: torch.dtype, functions: Sequence[WeightFunction] = ()) -> Tensor:
    """Return `weight` on `device` in `dtype` with `functions` applied; `weight` itself when there is nothing to do.

    Tensors that are not floating point are moved, never converted. The result may share memory with `weight`: do not
    write to it.
    """
    if functions:
        return apply_weight_functions(weight, functions, device, dtype)
    if isinstance(weight, PackedWeight):
        return weight.moved(device, lambda part: _moved(part, device)).unpack(dtype)
    if weight.device != device:
        weight = _moved(weight, device)
    if weight.dtype != dtype and weight.is_floating_point():
        weight = converted(weight, dtype)
    return weight


def cast_kept(weight: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """As `cast`, for a small plain tensor that every pass reads: its copy stays on the device until the run ends, where
    the uploader has room for it."""
    context = current()
    uploader = None if context is None else context.uploader
    if context is None or uploader is None or weight.device == device or torch.compiler.is_compiling():
        return cast(weight, device, dtype)
    copy = uploader.kept(weight)
    if copy is None:
        if context.ledger is not None:
            context.ledger.add_h2d(weight.nbytes)
        copy = uploader.upload_to_keep(weight)
    return cast(copy, device, dtype)


def apply_weight_functions(
    weight: Tensor,
    functions: Sequence[WeightFunction],
    device: torch.device,
    dtype: torch.dtype,
    move: Move | None = None,
) -> Tensor:
    """Return `weight` moved to `device`, unpacked and in float32, changed by `functions` in order, and converted to
    `dtype`.

    `move` transfers it, and what the functions read of patches; None uses the current compute context. Computes in
    float64 when `dtype` is float64. Without functions nothing passes through float32. `weight` is not modified.
    """
    given, move = move, move or _moved
    working_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    if isinstance(weight, PackedWeight):
        packed = weight.moved(device, lambda part: move(part, device))
        working, is_copy = packed.unpack(working_dtype if functions else dtype), True
    else:
        working = weight.detach()
        is_copy = working.device != device
        if is_copy:
            working = move(working, device)
    if not functions:
        return converted(working, dtype) if working.is_floating_point() else working
    is_copy = is_copy or working.dtype is not working_dtype
    if is_copy:
        working = converted(working, working_dtype).contiguous()
    else:
        working = working.clone(memory_format=torch.contiguous_format)
    token = _FACTOR_MOVE.set(given)
    try:
        for function in functions:
            working = function(working)
    finally:
        _FACTOR_MOVE.reset(token)
    return working.to(dtype)


def moved_factor(factor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of a patch on `device`, as `apply_weight_functions` moves the weight: a copy from pageable memory
    would wait for all work of the device. May be `factor` itself: do not write to it."""
    move = _FACTOR_MOVE.get()
    if move is None or factor.device == device:
        return factor.to(device)
    if isinstance(factor, PackedWeight):
        return factor.moved(device, lambda part: move(part, device))
    return move(factor, device)


def gather_rows(table: Tensor, ids: Tensor, dtype: torch.dtype, padding_idx: int = -1) -> Tensor:
    """Return the rows of `table` for `ids`, on the device of `ids` in `dtype`: only these rows are moved and converted.

    This matters for tables of 250,000 rows.
    """
    local_ids = ids if table.device == ids.device else ids.to(table.device)
    if isinstance(table, PackedWeight):
        return cast(table.rows_for(local_ids, dtype), ids.device, dtype)
    if table.dtype.itemsize == 1 and table.is_floating_point():  # torch cannot gather 8-bit floats
        rows = torch.embedding(table.view(torch.uint8), local_ids, padding_idx).view(table.dtype)
    else:
        rows = torch.embedding(table, local_ids, padding_idx)
    return cast(rows, ids.device, dtype)


def _moved(weight: Tensor, device: torch.device) -> Tensor:
    context = current()
    if context is not None and weight.device.type == "cpu":
        if context.peers is not None and device == context.device and not torch.compiler.is_compiling():
            copy = context.peers.get(weight)
            if copy is not None:
                return copy
        if context.ledger is not None:
            context.ledger.add_h2d(weight.nbytes)
        if context.uploader is not None and device == context.device and not torch.compiler.is_compiling():
            return context.uploader.upload(weight)
    return weight.to(device)
