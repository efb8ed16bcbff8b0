"""Replaces the classes of a module tree by casting layers, which compute with weights of another device or dtype.

Each instance gets a cached subclass of its class, so `isinstance`, `state_dict`, `named_parameters`, `deepcopy` and
`.to()` keep working. Stock layers get a new forward that casts weights like the input. Every other parameter or buffer
that a forward reads is cast while a `compute` context is open; the context also answers code that asks a module for its
dtype or device. Knows no patch and no plan.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.weights.ops.cast import WeightFunction
from modelpool.pool.weights.ops.context import check_interrupt, current
from modelpool.pool.weights.ops.convolution import conv3d, installed_torch_has_conv3d_fault
from modelpool.pool.weights.ops.deferred import deferred_cast
from modelpool.pool.weights.ops.layers import FORWARDS, WEIGHTLESS_FORWARDS

#: attribute of an instance with its weight functions: a dictionary from parameter name to an ordered tuple
FUNCTIONS_ATTRIBUTE = "_weight_functions"


class Casting:
    """First base class of every casting class."""

    def __getattr__(self, name: str) -> Any:
        """Return parameters and buffers of the module, cast while a context is open.

        torch keeps them outside the instance's dictionary, so every read comes here.
        """
        held = self.__dict__
        child = held["_modules"].get(name)  # the most frequent case
        if child is not None:
            return child
        context = current()
        if context is not None:
            parameter = held["_parameters"].get(name)
            if parameter is not None:
                check_interrupt()  # for classes that are not stock layers
                functions = held.get(FUNCTIONS_ATTRIBUTE, _NO_FUNCTIONS).get(name, ())
                return deferred_cast(parameter, context.device, context.dtype, functions)
            buffer = held["_buffers"].get(name)
            if buffer is not None:
                return deferred_cast(buffer, context.device, _buffer_dtype(buffer, context.dtype))
        return super().__getattr__(name)  # type: ignore[misc]

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        """As torch's; inside a context with the dtype and device of the computation."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As torch's; inside a context with the dtype and device of the computation."""
        named = super().named_parameters(*args, **kwargs)  # type: ignore[misc]
        context = current()
        if context is None:
            return named  # type: ignore[no-any-return]
        return ((name, deferred_cast(parameter, context.device, context.dtype)) for name, parameter in named)


_NO_FUNCTIONS: dict[str, tuple[WeightFunction, ...]] = {}


def swap_to_casting(module: nn.Module) -> None:
    """Give every instance in the tree of `module` its casting class. Idempotent."""
    for instance in module.modules():
        if not isinstance(instance, Casting):
            has_weight = "weight" in instance._parameters
            instance.__class__ = casting_class(type(instance), has_weight)  # type: ignore[arg-type] # classes are hashable


def restore_classes(module: nn.Module) -> None:
    """Undo `swap_to_casting`. Weight functions stay on the instances and no longer apply."""
    for instance in module.modules():
        if isinstance(instance, Casting):
            instance.__class__ = type(instance).__bases__[1]


def set_weight_functions(module: nn.Module, parameter: str, functions: Sequence[WeightFunction]) -> None:
    """Apply `functions`, in order, whenever `module` uses its `parameter`. An empty sequence removes them."""
    assert parameter in module._parameters, f"{type(module).__name__} has no parameter {parameter!r}"
    held = dict(module.__dict__.get(FUNCTIONS_ATTRIBUTE, _NO_FUNCTIONS))
    held.pop(parameter, None)
    if functions:
        held[parameter] = tuple(functions)
    module.__dict__[FUNCTIONS_ATTRIBUTE] = held


@functools.cache
def casting_class(cls: type[nn.Module], has_weight: bool) -> type[nn.Module]:
    """Return the casting subclass of `cls`, with a new forward if `cls` has the forward of a stock layer.

    A stock layer without `has_weight` computes its weight from others (a weight norm) and keeps torch's forward.
    The subclass has the name of `cls`: transformers finds the outputs that a model can record (its hidden states) by
    class name.
    """
    members: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    forward = FORWARDS.get(cls.forward) if has_weight else WEIGHTLESS_FORWARDS.get(cls.forward)
    if forward is not None:
        members["forward"] = forward
    if getattr(cls, "_conv_forward", None) is nn.Conv3d._conv_forward and installed_torch_has_conv3d_fault():
        members["_conv_forward"] = conv3d
    for name in ("dtype", "device"):
        if isinstance(getattr(cls, name, None), property):
            members[name] = _context_property(cls, name)
    return type(cls.__name__, (Casting, cls), members)


def _context_property(cls: type[nn.Module], name: str) -> property:
    """Return the property `cls.name`, replaced by the value of the open context if there is one."""
    original = getattr(cls, name)

    def answer(self: nn.Module) -> Any:
        context = current()
        return original.fget(self) if context is None else getattr(context, name)

    return property(answer)


def _buffer_dtype(buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute with: a buffer more precise than `dtype` stays so, any other is cast to it."""
    return buffer.dtype if buffer.dtype.itemsize > dtype.itemsize else dtype
