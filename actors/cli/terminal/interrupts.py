"""Handles requests to stop a command: Ctrl-C, and SIGTERM and SIGHUP, with which Slurm, Kubernetes, systemd and closed
terminals end a command.

The first request stops the work, and a second Ctrl-C ends the process at once. Later SIGTERM and SIGHUP are ignored: a
closed shell and a service manager send several. Exit codes are 128 + the number of the first signal, as shells report
it. A signal that the starting program ignores (SIGHUP under nohup) stays ignored.

Knows signals, not the work. Handlers run between any two instructions of the main thread, so they only set
flags, raise KeyboardInterrupt, or replace the streams of a terminal that is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGHUP)


def exit_code(number: int) -> int:
    """Return the exit code of a command that this signal ended."""
    return 128 + number


class _Handlers:
    """Installs one handler for the stop signals, and restores the previous ones. Main thread only."""

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        for number in STOP_SIGNALS:
            if number not in _FROM_OUTSIDE or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handler)

    def restore(self, ignore: bool) -> None:
        """Restore the previous handlers; with `ignore`, ignore SIGTERM and SIGHUP instead."""
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_IGN if ignore and number in _FROM_OUTSIDE else previous)


class StopRequest:
    """While entered, the first stop signal sets `requested` and a later Ctrl-C ends the process. Main thread only.

    Afterwards the previous handlers are restored; after a stop, SIGTERM and SIGHUP are ignored, since the command ends
    anyway. `StoppableCommand` restores them.
    """

    def __init__(self) -> None:
        self._number = 0
        self._handlers = _Handlers(self._on_signal)

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._number != 0

    @property
    def exit_code(self) -> int:
        """The exit code for the signal that requested the stop."""
        assert self.requested, "nothing has requested a stop"
        return exit_code(self._number)

    def __enter__(self) -> StopRequest:
        self._handlers.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.restore(ignore=self.requested)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if not self._number:
            self._number = number
        elif number == signal.SIGINT:
            show_cursor = "\x1b[?25h\n" if sys.stderr.isatty() else ""
            os.write(2, f"{show_cursor}modelpool: terminated\n".encode())
            os._exit(exit_code(number))


class StoppableCommand:
    """While entered, the first stop signal raises KeyboardInterrupt in the main thread, so that contexts close what
    they opened. Later ones do so only for Ctrl-C. Main thread only.

    number  the first signal; 0 before
    """

    def __init__(self) -> None:
        self.number = 0
        self._handlers = _Handlers(self._on_signal)

    def __enter__(self) -> StoppableCommand:
        self._handlers.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.restore(ignore=False)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if not self.number or number == signal.SIGINT:
            self.number = self.number or number
            raise KeyboardInterrupt


def leave_closed_terminal() -> None:
    """Send output for a terminal that is gone to /dev/null: each write would fail, in the middle of a stop."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            is_terminal = stat.S_ISCHR(os.fstat(descriptor).st_mode) and os.fstat(descriptor).st_rdev != _null_device()
            if is_terminal and not os.isatty(descriptor):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


def _null_device() -> int:
    return os.stat(os.devnull).st_rdev
