"""Finds where a run on a simulated device would make the host wait for a real one, as CUDA does.

The operations are in `pool.devices.device_waits`. A run that waits in each step cannot launch the next step while the
device computes this one. The simulated device carries out the same calls of torch, and a dispatch mode sees each.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from modelpool.pool.devices.device_waits import waits
from modelpool.pool.values.core.stage_params import RunHooks

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
        if self.is_recording and waits(func, args, given, "sim"):
            self.places[_place()] += 1
        return func(*args, **given)

    def hooks_of_step(self, step: int) -> RunHooks:
        """Return hooks of a run: what happens after `step` steps until the next one has ended is recorded."""

        def on_step(done: int, steps: int) -> None:
            self.is_recording = done == step

        return RunHooks(on_step=on_step, should_stop=lambda: False)


def _place() -> str:
    """The innermost function of the product or of a library that calls torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_passed(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname}"


def _is_passed(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _PASSED)
