"""Handles Ctrl-C: the first requests a stop, the second ends the process at once.

Knows signals, not what is running. The handler only sets a flag, because it may run in the middle of any call.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

#: 128 + the number of SIGINT, as shells report it
EXIT_INTERRUPTED = 130


class StopRequest:
    """While entered, the first Ctrl-C sets `requested` and the second ends the process. Main thread only.

    Afterwards the previous handler is restored.
    """

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._previous: Any = None

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._requested.is_set()

    def __enter__(self) -> StopRequest:
        self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._requested.is_set():
            show_cursor = "\x1b[?25h\n" if sys.stderr.isatty() else ""
            os.write(2, f"{show_cursor}modelpool: terminated\n".encode())
            os._exit(EXIT_INTERRUPTED)
        self._requested.set()
