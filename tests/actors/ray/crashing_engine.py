"""An engine with a process that ends while it samples, in the way that the prompt names. Importable in Ray's
workers."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from modelpool.pool.values.core.stage_params import Result, SampleParams, StageParams
from modelpool.pool.values.specs.spec import TaskSpec
from tests.actors.fakes import FakeEngine, text_of

#: each end happens in the first attempt of a prompt with its name
ENDS: dict[str, Callable[[], object]] = {
    "SEGMENTATION-FAULT": lambda: ctypes.string_at(0),
    "ABORT": os.abort,
    "NATIVE-EXIT": lambda: ctypes.CDLL(None).exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class CrashingEngine(FakeEngine):
    """Ends its process once for each prompt of `ENDS`."""

    def run(self, task: TaskSpec, work: StageParams, inputs: Mapping[str, Result], *more: Any, **options: Any) -> Any:
        text = text_of(inputs["positive"]) if isinstance(work, SampleParams) else ""
        for name, end in ENDS.items():
            if name in text and self._first_time(name):
                end()
        return super().run(task, work, inputs, *more, **options)
