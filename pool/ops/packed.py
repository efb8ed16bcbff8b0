"""A weight whose values are computed from several stored tensors: quantized weights, as casting layers see them.

From outside a `PackedWeight` is one tensor with the shape of the weight and the dtype that it stands for; inside are
the tensors of the file. It moves between devices packed and becomes values only where it is computed with. Knows no
format: a `Codec` does (`pool.quantization`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pool.devices.torch_private import make_wrapper, no_torch_function

_DETACH = torch.ops.aten.detach.default


class Codec(Protocol):
    """One format of packed weights, with everything about it that is no tensor."""

    @property
    def name(self) -> str:
        """What files call the format."""

    def unpack(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The weight's values as a fresh tensor of `shape` and `dtype`, on the device of `parts`. Writes nothing."""


class PackedWeight(Tensor):
    """One weight in packed form; made only by `packed_weight`. Read-only.

    An operation that knows nothing of it gets its values, unpacked in the dtype that it stands for.
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
            if func is _DETACH:
                return packed_weight(first.codec, first.parts, first.shape, first.dtype)
            if func._schema.arguments[0].is_write:
                raise RuntimeError(f"{func} would write to a packed weight: pooled weights are read-only")
        args, kwargs = pytree.tree_map_only(cls, lambda packed: packed.unpack(packed.dtype), (args, kwargs or {}))
        return func(*args, **kwargs)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The values, in `dtype`, on the device that the parts are on."""
        return self.codec.unpack(self.parts, self.shape, dtype)

    def moved(self, device: torch.device, move: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The same weight on `device`; `move` brings one part there. Itself when it is there already."""
        if self.device == device:
            return self
        return packed_weight(self.codec, {k: move(p) for k, p in self.parts.items()}, self.shape, self.dtype)

    def rows_for(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the values for `ids`, which are on the device of the parts."""
        return torch.embedding(self.unpack(dtype), ids)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # the stub is untyped
        return f"PackedWeight({self.codec.name}, {tuple(self.shape)}, {self.dtype}, {self.device})"


def packed_weight(codec: Codec, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> PackedWeight:
    """A packed weight of `shape` that stands for values of `dtype`. `parts` are all on one device; kept, not copied."""
    device = next(iter(parts.values())).device
    strides = torch.empty(tuple(shape), device="meta").stride()
    packed: PackedWeight = make_wrapper(PackedWeight, tuple(shape), strides, dtype=dtype, device=device)
    packed.codec = codec
    packed.parts = parts
    return packed


def stored_bytes(weight: Tensor) -> int:
    """Bytes of `weight` as it is stored: of all its parts where it is packed."""
    if isinstance(weight, PackedWeight):
        return sum(part.nbytes for part in weight.parts.values())
    return weight.nbytes
