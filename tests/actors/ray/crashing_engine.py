"""An engine whose process ends while it samples, in the way that the prompt names. Importable in Ray's workers."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from modelpool.pool.core.stage_params import Result, RunHooks, SampleParams
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

    def _sample(self, inputs: tuple[Result, ...], work: SampleParams, hooks: RunHooks) -> None:
        text = text_of(inputs[0])
        for name, end in ENDS.items():
            if name in text and self._first_time(name):
                end()
        super()._sample(inputs, work, hooks)
