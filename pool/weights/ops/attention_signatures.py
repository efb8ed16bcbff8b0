"""Remembers the parameters of attention processors, which diffusers inspects again in each attention of each step.

`Attention.forward` and its relatives read `inspect.signature(self.processor.__call__)` to drop arguments that the
processor does not take. That takes 30 microseconds of the host, as long as the launches of several operations.
"""

from __future__ import annotations

import inspect
from types import FunctionType

from torch import nn

#: how diffusers names the processor of an attention, and the method that it inspects
_PROCESSOR, _CALL = "processor", "__call__"
#: where `inspect` looks for the signature of a function first
_SIGNATURE = "__signature__"


def remember_signatures(module: nn.Module) -> None:
    """Have `inspect` find the signatures of all attention processors in the tree of `module`. Idempotent.

    They become an attribute of the functions, where `inspect` looks first; the functions are otherwise unchanged.
    """
    for attention in module.modules():
        function = inspect.getattr_static(type(getattr(attention, _PROCESSOR, None)), _CALL, None)
        if isinstance(function, FunctionType) and _SIGNATURE not in function.__dict__:
            function.__dict__[_SIGNATURE] = inspect.signature(function)
