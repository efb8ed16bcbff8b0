"""Functions around the `forward` of modules, for the time of one run.

An overlay is an instance attribute named `forward`, which torch calls in place of the class's. Taking it away restores
the module exactly, so nothing needs to be remembered. Knows no architecture and no option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from modelpool.pool.options.run_context import Run, current_run

#: (the forward below it, *the module's arguments) -> the module's result
Around: TypeAlias = Callable[..., Any]

_NONE = object()


class Overlays:
    """The overlays of one run, put on in order and taken off in the opposite order.

    They act only while that run is the current one of its module: another run of the module that is nested in this one,
    or goes on in another thread, sees the plain module, even with the very same options.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._below: list[tuple[nn.Module, object]] = []

    def put(self, module: nn.Module, around: Around) -> None:
        """Call `around` in place of `module`'s forward. One that is put on later is further out."""
        run = self._run
        below = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if current_run(run.module) is not run:
                return below(*args, **kwargs)
            return around(below, *args, **kwargs)

        self._below.append((module, module.__dict__.get("forward", _NONE)))
        module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Take all off. Every module is as it was before `put`."""
        while self._below:
            module, before = self._below.pop()
            if before is _NONE:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
