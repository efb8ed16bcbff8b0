"""Wraps the `forward` of modules for the duration of one run.

An overlay is an instance attribute named `forward`, which torch calls instead of the class's. Removing it restores the
module exactly, so nothing needs to be saved. Knows no architecture and no option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from modelpool.pool.weights.options.run_context import ModuleRun, current_run

#: (the wrapped forward, *the module's arguments) -> the module's result
ForwardWrapper: TypeAlias = Callable[..., Any]

_NONE = object()


class Overlays:
    """The overlays of one run, installed in order and removed in the opposite order.

    They act only while that run is the current one of its module: another run of the module that is nested in this one,
    or runs in another thread, uses the plain module, even with the same options.
    """

    def __init__(self, run: ModuleRun) -> None:
        self._run = run
        self._below: list[tuple[nn.Module, object]] = []

    def put(self, module: nn.Module, wrapper: ForwardWrapper) -> None:
        """Call `wrapper` instead of `module`'s forward. A later overlay wraps the earlier ones."""
        run = self._run
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if current_run(run.module) is not run:
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        self._below.append((module, module.__dict__.get("forward", _NONE)))
        module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Remove all overlays. Every module is as before `put`."""
        while self._below:
            module, before = self._below.pop()
            if before is _NONE:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
