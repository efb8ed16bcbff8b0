"""Finds operations for which the host waits for a device: a call with one of them cannot be captured as a CUDA graph.

The host waits where it reads a number of the device, where the shape of a result depends on values, and where bytes
cross between the device and pageable memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

#: operations with index tensors: a mask becomes numbers, and the host must know how many
_INDEXED = frozenset({_aten.index.Tensor, _aten._unsafe_index.Tensor})
_INDEXED_WRITES = frozenset({_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default})
_MASKS = (torch.bool, torch.uint8)
#: operations with a shape of the result that depends on values, though torch does not mark them so
_COUNTED = frozenset({_aten.bincount.default})
_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class WaitsForDevice(RuntimeError):
    """A call waits for the device in the named operation, which no CUDA graph may contain."""


class FirstWait(TorchDispatchMode):
    """Notes the first operation of the block for which the host waits for a device of type `device_type`."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's modes are not typed
        self._device_type = device_type
        #: name of the operation; empty if there is none
        self.operation = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run inside: operations inside of its kernels do not wait."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not self.operation and waits(func, args, given, self._device_type):
            self.operation = str(func)
        return func(*args, **given)


def waits(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> bool:
    """Return whether the host waits for a device of `device_type` to carry out `op` with these arguments. Pure."""
    if op is _aten._to_copy.default:
        target = kwargs.get("device")
        is_crossing = target is not None and _is_on(device_type, args[0]) != (torch.device(target).type == device_type)
        return is_crossing and not kwargs.get("non_blocking")
    if op is _aten.copy_.default:
        is_blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return is_blocking and _is_on(device_type, args[0]) != _is_on(device_type, args[1])
    if op in _INDEXED or op in _INDEXED_WRITES:
        return _is_on(device_type, args[0]) and _indexing_waits(op, args, device_type)
    is_read = op in _COUNTED or not _VALUES.isdisjoint(op.tags)
    return is_read and any(_is_on(device_type, each) for each in (*args, *kwargs.values()))


def _indexing_waits(op: OpOverload, args: Sequence[Any], device_type: str) -> bool:
    indices = [index for index in args[1] if index is not None]
    if any(index.dim() and not _is_on(device_type, index) for index in indices):
        return True  # it is copied to the device
    if not any(index.dtype in _MASKS for index in indices):
        return False
    # torch fills by a mask, without numbers, if one value of the host is written
    return op in _INDEXED or args[2].numel() != 1 or _is_on(device_type, args[2])


def _is_on(device_type: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == device_type
