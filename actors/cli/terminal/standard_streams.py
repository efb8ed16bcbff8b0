"""stdout and stderr of a command on a full or broken disk: what a program reads fails by name, what a user reads fails
nothing.

A closed pipe (`modelpool ... | head`) ends a command as ever.
"""

from __future__ import annotations

import abc
import contextlib
import sys
from types import TracebackType
from typing import Any, TextIO, cast

from modelpool.pool.values.core.errors import OutputFailed


class StdoutFailed(OutputFailed):
    """The standard output of a command that cannot be written."""


class _Guarded(abc.ABC):
    """A text stream with another answer to a failed write. All else is of the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        #: why the last write failed; "" if it did not
        self._reason = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _Guarded:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the stream. What a disk does not take was reported by `flush`."""
        try:
            self.flush()
        finally:
            with contextlib.suppress(OSError):
                self._stream.close()

    def write(self, text: str) -> int:
        """See `TextIO`."""
        try:
            return self._written(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """See `TextIO`."""
        try:
            self._flushed()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._failed(error)

    def _written(self, text: str) -> int:
        return self._stream.write(text)

    def _flushed(self) -> None:
        self._stream.flush()

    @abc.abstractmethod
    def _failed(self, error: OSError) -> None:
        """Answer a failed write."""


class _ForPrograms(_Guarded):
    """stdout: the first failed write raises StdoutFailed, and nothing is written after it."""

    def _written(self, text: str) -> int:
        return len(text) if self._reason else super()._written(text)

    def _flushed(self) -> None:
        if not self._reason:
            super()._flushed()

    def _failed(self, error: OSError) -> None:
        self._reason = error.strerror or str(error)
        raise StdoutFailed(f"stdout: cannot be written ({self._reason})") from error


class _ForUsers(_Guarded):
    """stderr: the command goes on, and says that messages are missing once it can."""

    def _written(self, text: str) -> int:
        if self._reason:
            self._stream.flush()  # what the buffer has of before; while this fails, it takes nothing more
            self._stream.write(f"modelpool: messages before this one are missing here: {self._reason}\n")
            self._stream.flush()
            self._reason = ""
        return super()._written(text)

    def _failed(self, error: OSError) -> None:
        self._reason = error.strerror or str(error)


def for_programs(stream: TextIO) -> TextIO:
    """Return the stream with `StdoutFailed` for a write that fails."""
    return cast("TextIO", _ForPrograms(stream))


def guard_streams() -> None:
    """Guard stdout and stderr of this process, where they exist, until it ends."""
    if sys.stderr is not None:
        sys.stderr = cast("TextIO", _ForUsers(sys.stderr))
    if sys.stdout is not None:
        sys.stdout = for_programs(sys.stdout)
