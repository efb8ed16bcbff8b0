"""Finds where a run on a simulated device would make the host wait for a real one, as CUDA does.

The host waits where it reads a number of the device, where the shape of a result depends on values, and where bytes
cross between the device and pageable memory. A run that waits in each step cannot launch the next step while the device
computes this one. The simulated device carries out the same calls of torch, and a dispatch mode sees each of them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from modelpool.pool.devices.sim.tensor import SimTensor
from modelpool.pool.values.core.stage_params import RunHooks

aten = torch.ops.aten

#: operations with index tensors: a mask becomes numbers, whose count the host must know
_INDEXED = {aten.index.Tensor, aten._unsafe_index.Tensor}
_INDEXED_WRITES = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_MASKS = (torch.bool, torch.uint8)
#: operations whose result has a shape that depends on values, though torch does not mark them so
_COUNTED = {aten.bincount.default}
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

#: modules that are no place: torch's own, the simulated device, and this one
_PASSED = ("torch", "modelpool.pool.devices.sim", __name__)


class WaitRecorder(TorchDispatchMode):
    """While active and `is_recording`, counts the waits by the function that causes each: "module:function"."""

    def __init__(self, is_recording: bool = True) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self.is_recording = is_recording

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if self.is_recording and waits(func, args, given):
            self.places[_place()] += 1
        return func(*args, **given)

    def hooks_of_step(self, step: int) -> RunHooks:
        """Return hooks of a run: what happens after `step` steps until the next one has ended is recorded."""

        def on_step(done: int, steps: int) -> None:
            self.is_recording = done == step

        return RunHooks(on_step=on_step, should_stop=lambda: False)


def waits(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host would wait for the device to carry out `op`."""
    if op is aten._to_copy.default:
        target = kwargs.get("device")
        is_crossing = target is not None and _is_on_sim(args[0]) != (torch.device(target).type == "sim")
        return is_crossing and not kwargs.get("non_blocking")
    if op is aten.copy_.default:
        is_blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return is_blocking and _is_on_sim(args[0]) != _is_on_sim(args[1])
    if op in _INDEXED or op in _INDEXED_WRITES:
        return _is_on_sim(args[0]) and _indexing_waits(op, args)
    is_read = op in _COUNTED or not _VALUES.isdisjoint(op.tags)
    return is_read and any(_is_on_sim(each) for each in (*args, *kwargs.values()))


def _indexing_waits(op: OpOverload, args: Sequence[Any]) -> bool:
    indices = [index for index in args[1] if index is not None]
    if any(index.dim() and not _is_on_sim(index) for index in indices):
        return True  # it is copied to the device
    if not any(index.dtype in _MASKS for index in indices):
        return False
    # torch fills by a mask, without numbers, if one value of the host is written
    return op in _INDEXED or args[2].numel() != 1 or _is_on_sim(args[2])


def _is_on_sim(value: Any) -> bool:
    return isinstance(value, SimTensor)


def _place() -> str:
    """The innermost function of the product or of a library that calls torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_passed(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname}"


def _is_passed(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _PASSED)
