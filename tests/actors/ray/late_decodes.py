"""An engine with a device that decodes while the next runs begin, and a value that is slow to read. Importable in Ray's
workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from modelpool.actors.worker.wire.packing import unpacked
from modelpool.pool.values.core.stage_params import DecodeParams, Result, StageParams
from modelpool.pool.values.specs.spec import RunCost, TaskSpec
from tests.actors.fakes import FakeEngine

#: how long a decode takes without a run behind it
ALONE_SECONDS = 0.05
READ_SECONDS = 0.3


class LateDecodes(FakeEngine):
    """A decode is over when the next run has begun, or after a moment."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._next_began = threading.Event()

    def begin(
        self, task: TaskSpec, work: StageParams, *args: Any, **named: Any
    ) -> Callable[[], tuple[Result, RunCost]]:
        self._next_began.set()
        made = self.run(task, work, *args, **named)
        if not isinstance(work, DecodeParams):
            return lambda: made
        next_began = self._next_began = threading.Event()

        def end() -> tuple[Result, RunCost]:
            next_began.wait(ALONE_SECONDS)
            return made

        return end

    @property
    def is_pending(self) -> bool:
        return True


class Slow:
    """A value that takes long to unpickle, as a large input does."""

    def __reduce__(self) -> Any:
        return _read, ()


def _read() -> Slow:
    time.sleep(READ_SECONDS)
    return Slow()


class Recorder:
    """An actor that notes its calls, when it has unpacked what comes with them, as a worker does."""

    def __init__(self) -> None:
        self._calls: list[str] = []

    def note(self, name: str, *inputs: bytes) -> None:
        for value in inputs:
            unpacked(value)
        self._calls.append(name)

    def calls(self) -> list[str]:
        return self._calls
