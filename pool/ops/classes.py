"""Casting layers: any tree of torch modules, made to compute with weights that are elsewhere or in another dtype.

Each instance gets a cached subclass of its own class, so `isinstance`, `state_dict`, `named_parameters`, `deepcopy` and
`.to()` keep working. Stock layers get a forward of their own, whose weights follow the input. Every other parameter or
buffer that a forward reads comes back cast while a `compute` context is open, which also answers code that asks a
module for its dtype or device. Knows no patch and no plan.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.ops.cast import WeightFunction
from modelpool.pool.ops.context import check_interrupt, current
from modelpool.pool.ops.convolution import conv3d, this_torch_has_conv3d_fault
from modelpool.pool.ops.deferred import as_computed
from modelpool.pool.ops.layers import FORWARDS

#: where an instance keeps its weight functions: a dictionary from own parameter name to an ordered tuple
FUNCTIONS_ATTRIBUTE = "_weight_functions"


class Casting:
    """First base of every casting class."""

    def __getattr__(self, name: str) -> Any:
        """Own parameters and buffers, cast while a context is open.

        torch keeps them out of the instance's dictionary, so every read of one comes here.
        """
        held = self.__dict__
        child = held["_modules"].get(name)  # what is read most
        if child is not None:
            return child
        context = current()
        if context is not None:
            parameter = held["_parameters"].get(name)
            if parameter is not None:
                check_interrupt()  # the forward of a class that is no stock layer
                functions = held.get(FUNCTIONS_ATTRIBUTE, _NO_FUNCTIONS).get(name, ())
                return as_computed(parameter, context.device, context.dtype, functions)
            buffer = held["_buffers"].get(name)
            if buffer is not None:
                return as_computed(buffer, context.device, _buffer_dtype(buffer, context.dtype))
        return super().__getattr__(name)  # type: ignore[misc]

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        """As torch's; inside a context with the dtype and device that they will be computed with."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As torch's; inside a context with the dtype and device that they will be computed with."""
        named = super().named_parameters(*args, **kwargs)  # type: ignore[misc]
        context = current()
        if context is None:
            return named  # type: ignore[no-any-return]
        return ((name, as_computed(parameter, context.device, context.dtype)) for name, parameter in named)


_NO_FUNCTIONS: dict[str, tuple[WeightFunction, ...]] = {}


def swap_to_casting(module: nn.Module) -> None:
    """Give every instance in the tree of `module` its casting class. Does nothing to one that has it."""
    for instance in module.modules():
        if not isinstance(instance, Casting):
            own_weight = "weight" in instance._parameters
            instance.__class__ = casting_class(type(instance), own_weight)  # type: ignore[arg-type] # classes are hashable


def restore_classes(module: nn.Module) -> None:
    """Undo `swap_to_casting`. Weight functions stay on the instances and are no longer applied."""
    for instance in module.modules():
        if isinstance(instance, Casting):
            instance.__class__ = type(instance).__bases__[1]


def set_weight_functions(module: nn.Module, parameter: str, functions: Sequence[WeightFunction]) -> None:
    """Apply `functions`, in order, whenever `module` uses its own `parameter`. An empty sequence takes them off."""
    assert parameter in module._parameters, f"{type(module).__name__} has no parameter {parameter!r} of its own"
    held = dict(module.__dict__.get(FUNCTIONS_ATTRIBUTE, _NO_FUNCTIONS))
    held.pop(parameter, None)
    if functions:
        held[parameter] = tuple(functions)
    module.__dict__[FUNCTIONS_ATTRIBUTE] = held


@functools.cache
def casting_class(cls: type[nn.Module], own_weight: bool) -> type[nn.Module]:
    """The casting subclass of `cls`: one a class, with a forward of its own where torch's is a stock layer's.

    A stock layer that makes its weight from others (a weight norm) is not `own_weight` and keeps torch's forward.
    It goes by the name of `cls`: transformers finds what a model can record (its hidden states) by the class's name.
    """
    members: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    forward = FORWARDS.get(cls.forward)
    if forward is not None and own_weight:
        members["forward"] = forward
    if getattr(cls, "_conv_forward", None) is nn.Conv3d._conv_forward and this_torch_has_conv3d_fault():
        members["_conv_forward"] = conv3d
    for name in ("dtype", "device"):
        if isinstance(getattr(cls, name, None), property):
            members[name] = _answering(cls, name)
    return type(cls.__name__, (Casting, cls), members)


def _answering(cls: type[nn.Module], name: str) -> property:
    """`cls.name`, answered by the open context when there is one."""
    asked = getattr(cls, name)

    def answer(self: nn.Module) -> Any:
        context = current()
        return asked.fget(self) if context is None else getattr(context, name)

    return property(answer)


def _buffer_dtype(buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What to compute with: a table that is kept more precise than `dtype` stays so, any other is brought to it."""
    return buffer.dtype if buffer.dtype.itemsize > dtype.itemsize else dtype
