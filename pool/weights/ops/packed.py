"""A tensor subclass for quantized weights: computes its values from several stored tensors.

From outside a `PackedWeight` is one tensor with the shape of the weight and its nominal dtype; inside are the tensors
of the file. It moves between devices packed and is unpacked only for computation. Knows no format: a `Codec` does
(`pool.weights.quant`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from modelpool.pool.devices.torch_api.torch_private import make_wrapper, no_torch_function

#: default nominal dtype of a file's packed weights: the one in which quantized models are computed
NOMINAL_DTYPE = torch.bfloat16

_aten = torch.ops.aten


class Codec(Protocol):
    """One format of packed weights, with all its parameters that are not tensors."""

    @property
    def name(self) -> str:
        """Name of the format in files."""

    @property
    def row_step(self) -> int:
        """Rows can be separated at multiples of this; 0 where they cannot."""

    def row_dims(self, parts: Mapping[str, Tensor]) -> Mapping[str, int]:
        """Return, for each part with an entry for every row of the weight, its dimension that runs over the rows."""

    def row_entries(self, name: str, rows: int) -> int:
        """Return the number of entries of the part `name` for `rows` rows, a multiple of `row_step`."""

    def reshaped(
        self, parts: Mapping[str, Tensor], before: Sequence[int], after: Sequence[int]
    ) -> Mapping[str, Tensor] | None:
        """Return the parts, as views, of the weight of shape `before` reshaped to `after` (of as many values); None
        where the format cannot represent that."""

    def unpack(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the weight's values as a new tensor of `shape` and `dtype`, on the device of `parts`. Writes
        nothing."""

    def scratch_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Upper bound of the bytes that `unpack` needs besides the parts and its result, for a weight of `elements`
        values."""


class PackedWeight(Tensor):
    """One weight in packed form; created only by `packed_weight`. Read-only.

    An operation without a packed implementation gets its values, unpacked in its nominal dtype. Operations that stay
    packed: detach, clone, copy.deepcopy, a move to another device, and, if the format allows it, row slices and
    reshapes. Embedding lookups unpack only the rows they need.
    """

    codec: Codec
    parts: Mapping[str, Tensor]

    __torch_function__ = no_torch_function  # type: ignore[assignment] # as torch's own wrapper classes do

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # the stubs give the signature of torch's disabled handler
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, cls):
            handler = _HANDLERS.get(func)
            if handler is not None:
                handled = handler(first, *args[1:], **(kwargs or {}))
                if handled is not NotImplemented:
                    return handled
            if func._schema.arguments[0].is_write:
                raise RuntimeError(f"{func} would write to a packed weight: pooled weights are read-only")
        args, kwargs = pytree.tree_map_only(cls, lambda packed: packed.unpack(packed.dtype), (args, kwargs or {}))
        return func(*args, **kwargs)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the values in `dtype`, on the device of the parts."""
        return self.codec.unpack(self.parts, self.shape, dtype)

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Upper bound of the bytes that `unpack` needs besides the parts and its result."""
        return self.codec.scratch_bytes(self.numel(), dtype)

    def moved(self, device: torch.device, move: Callable[[Tensor], Tensor]) -> PackedWeight:
        """Return the same weight on `device`; `move` transfers one part. Returns self if it is on `device` already."""
        if self.device == device:
            return self
        return packed_weight(self.codec, {k: move(p) for k, p in self.parts.items()}, self.shape, self.dtype)

    def rows(self, start: int, count: int) -> PackedWeight | None:
        """Return the rows `start` to `start + count`, packed, as views; None where the format does not allow it."""
        end, step = start + count, self.codec.row_step
        assert 0 <= start <= end <= self.shape[0], f"rows {start} to {end} of {tuple(self.shape)}"
        if count == self.shape[0]:
            return self
        if not step or start % step or (end % step and end != self.shape[0]):
            return None
        dims, parts = self.codec.row_dims(self.parts), dict(self.parts)
        for name, dim in dims.items():
            part, first = self.parts[name], self.codec.row_entries(name, start)
            # formats that pad their rows keep the padding after the last row
            entries = part.shape[dim] - first if end == self.shape[0] else self.codec.row_entries(name, count)
            parts[name] = part.narrow(dim, first, entries)
        return packed_weight(self.codec, parts, (count, *self.shape[1:]), self.dtype)

    def rows_for(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of the rows `ids` (any shape) in `dtype`; unpacks only those rows where possible.

        `ids` are on the device of the parts. Formats with dependent rows are unpacked completely.
        """
        flat = ids.reshape(-1)
        if self.codec.row_step == 1:
            dims = self.codec.row_dims(self.parts)
            parts = {k: _index_select(p, dims[k], flat) if k in dims else p for k, p in self.parts.items()}
            rows = self.codec.unpack(parts, (flat.shape[0], *self.shape[1:]), dtype)
        else:
            rows = self.unpack(dtype).index_select(0, flat)
        return rows.reshape(*ids.shape, *self.shape[1:])

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Return a copy with copied parts and the same codec; a module's parameter stays a parameter."""
        if id(self) in memo:
            known: PackedWeight = memo[id(self)]
            return known
        twin = _clone(self)  # torch's default would copy the storage that a part is a view of: a complete mapped file
        memo[id(self)] = twin
        twin.requires_grad_(self.requires_grad)
        for name, value in vars(self).items():  # torch marks parameters by an attribute
            if name not in ("codec", "parts"):
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # the stub is untyped
        return f"PackedWeight({self.codec.name}, {tuple(self.shape)}, {self.dtype}, {self.device})"


def packed_weight(codec: Codec, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> PackedWeight:
    """Create a packed weight of `shape` with the nominal dtype `dtype`. Keeps `parts`, all on one device."""
    device = next(iter(parts.values())).device
    strides = torch.empty(tuple(shape), device="meta").stride()
    packed: PackedWeight = make_wrapper(PackedWeight, tuple(shape), strides, dtype=dtype, device=device)
    packed.codec = codec
    packed.parts = parts
    return packed


def stored_bytes(weight: Tensor) -> int:
    """Stored bytes of `weight`: of all its parts if it is packed."""
    if isinstance(weight, PackedWeight):
        return sum(part.nbytes for part in weight.parts.values())
    return weight.nbytes


def write_into(held: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Copy `values` into the memory of `held`, of the same form. Returns the tensors that were written."""
    if not isinstance(held, PackedWeight):
        held.copy_(values)
        return (held,)
    assert isinstance(values, PackedWeight), f"{type(values).__name__} into a weight packed as {held.codec.name}"
    for name, part in held.parts.items():
        part.copy_(values.parts[name])
    return tuple(held.parts.values())


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both begin at the same place of the same device."""
    if isinstance(one, PackedWeight) and isinstance(other, PackedWeight):
        return any(shares_memory(part, other.parts[name]) for name, part in one.parts.items())
    if isinstance(one, PackedWeight) or isinstance(other, PackedWeight):
        return False
    return one.device == other.device and one.data_ptr() == other.data_ptr()


def _index_select(part: Tensor, dim: int, ids: Tensor) -> Tensor:
    if part.dtype.itemsize == 1 and part.is_floating_point():  # torch cannot index 8-bit floats
        return part.view(torch.uint8).index_select(dim, ids).view(part.dtype)
    return part.index_select(dim, ids)


def _shared(packed: PackedWeight) -> PackedWeight:
    return packed_weight(packed.codec, packed.parts, packed.shape, packed.dtype)


def _clone(packed: PackedWeight, *, memory_format: Any = None) -> PackedWeight:
    return packed_weight(packed.codec, {k: p.clone() for k, p in packed.parts.items()}, packed.shape, packed.dtype)


def _to_copy(packed: PackedWeight, **options: Any) -> Any:
    """Keep a move packed; unpack for a change of dtype."""
    dtype, device = options.get("dtype"), options.get("device")
    if dtype is not None and dtype != packed.dtype:
        values = packed.unpack(dtype)
        return values if device is None else values.to(device)
    if device is None or torch.device(device) == packed.device:
        return _clone(packed)
    parts = {k: p.to(device) for k, p in packed.parts.items()}
    return packed_weight(packed.codec, parts, packed.shape, packed.dtype)


def _slice(packed: PackedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if dim not in (0, -packed.dim()) or step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(packed.shape[0])
    rows = packed.rows(first, max(last - first, 0))
    if rows is None:
        return NotImplemented
    return _shared(packed) if rows is packed else rows  # torch does not allow a view to be its own base


def _view(packed: PackedWeight, shape: Sequence[int]) -> Any:
    after = _resolved_shape(shape, packed.numel())
    if after == tuple(packed.shape):
        return _shared(packed)
    if after is None:
        return NotImplemented  # torch raises the error
    parts = packed.codec.reshaped(packed.parts, packed.shape, after)
    return NotImplemented if parts is None else packed_weight(packed.codec, parts, after, packed.dtype)


def _resolved_shape(shape: Sequence[int], numel: int) -> tuple[int, ...] | None:
    """Return `shape` with its open size (-1) filled in; None if it does not hold `numel` values."""
    open_sizes, known = [i for i, size in enumerate(shape) if size == -1], math.prod(s for s in shape if s != -1)
    if len(open_sizes) == 1 and known and numel % known == 0:
        return tuple(numel // known if size == -1 else size for size in shape)
    return tuple(shape) if not open_sizes and known == numel else None


def _embedding(packed: PackedWeight, ids: Tensor, *_: Any, **__: Any) -> Any:
    return packed.rows_for(ids, packed.dtype)


def _same_class(packed: PackedWeight, other: Tensor) -> bool:
    return type(other) is type(packed)


#: operations that do not need the values of all rows
_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    _aten.detach.default: _shared,
    _aten.alias.default: _shared,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.slice.Tensor: _slice,
    _aten.view.default: _view,
    _aten.embedding.default: _embedding,
    _aten._has_compatible_shallow_copy_type.default: _same_class,
}
