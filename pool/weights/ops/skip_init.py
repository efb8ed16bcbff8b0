"""Builds modules without initialising weights that a file will replace.

Knows how torch's layers and its `nn.init` fill their parameters. Where a builder allows it, the meta device is better
(`uninitialised_on_meta`); `without_initialisation` is for code that needs real memory, computed tables, or both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors

#: functions by which `reset_parameters` and `nn.init` fill a tensor
_FILLERS = frozenset(
    {
        Tensor.uniform_,
        Tensor.normal_,
        Tensor.fill_,
        Tensor.zero_,
        Tensor.random_,
        Tensor.erfinv_,
        Tensor.clamp_,
        Tensor.mul_,
        Tensor.add_,
        torch.nn.init.kaiming_uniform_,
        torch.nn.init.kaiming_normal_,
        torch.nn.init.uniform_,
        torch.nn.init.normal_,
        torch.nn.init.constant_,
    }
)


def _sinc_on_meta(x: Tensor) -> Tensor:
    dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()
    return torch.empty(x.shape, dtype=dtype, device="meta")


def _window_on_meta(window_length: int, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    return torch.empty(window_length, dtype=dtype, device="meta")


#: functions that torch decomposes in Python on the meta device, which took most of the time of a vocoder with hundreds
#: of filters; here their shape and dtype, which are all that a tensor there has
_DECOMPOSED: Mapping[Any, Callable[..., Tensor]] = {torch.sinc: _sinc_on_meta, torch.kaiser_window: _window_on_meta}


class _NoFilling(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _FILLERS:
            filled = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(filled, nn.Parameter):
                return filled
        return func(*args, **(kwargs or {}))


def _is_on_meta(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call inside `uninitialised_on_meta` makes a tensor there: it names no other device."""
    if not args or "out" in kwargs:
        return False
    device = args[0].device if isinstance(args[0], Tensor) else kwargs.get("device")
    return device is None or torch.device(device).type == "meta"


class _OnMeta(DeviceContext):
    """`torch.device("meta")` and `_NoFilling` in one mode: each mode costs time in every call of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLERS:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, nn.Parameter):
                return filled
        elif func in _DECOMPOSED and _is_on_meta(args, kwargs):
            return _DECOMPOSED[func](*args, **kwargs)
        elif func in _device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = self.device
        return func(*args, **kwargs)


@contextmanager
def uninitialised_on_meta() -> Iterator[None]:
    """Create tensors inside the block on the meta device unless the code names a device, parameters without filling
    them: that does nothing there, but takes a third of the time. Affects this thread only."""
    with _OnMeta(torch.device("meta")):
        yield


@contextmanager
def without_initialisation() -> Iterator[None]:
    """Leave the parameters of modules built inside the block as allocated: no random numbers, no page touched.

    Their values are arbitrary: load weights over all of them. Buffers are computed as usual. Affects this thread only.
    `nn.init.trunc_normal_` and `orthogonal_`, which use temporary tensors, still draw numbers.
    """
    with _NoFilling():
        yield
