"""The file of a pool's log: entries of the standard `logging` as lines of text, or as JSON lines for programs.

Nothing is installed at import; `open_log_file` adds a handler to the loggers of modelpool in this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import logging.handlers
import os
import stat
import sys
import time
from dataclasses import dataclass
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

from modelpool.pool.values.core.errors import OutputFailed, counted

#: parent of all loggers of modelpool
ROOT_LOGGER = "modelpool"
#: attribute of a log record with the fields of an entry, such as the id of its job
FIELDS = "fields"
#: size at which the file is renamed to NAME.1, which replaces an earlier one
MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the log of a pool is, on the controller's node, and its form.

    path     None for the default of the pool's name
    is_json  JSON lines instead of text
    """

    path: Path | None = None
    is_json: bool = False


class LogFile:
    """An open file. Entries of all loggers of modelpool in this process are written to it."""

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler
        logger = logging.getLogger(ROOT_LOGGER)
        self._previous_level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)

    def close(self) -> None:
        """Write nothing more to it. Idempotent."""
        logger = logging.getLogger(ROOT_LOGGER)
        if self._handler in logger.handlers:
            logger.removeHandler(self._handler)
            logger.setLevel(self._previous_level)
            self._handler.close()


def open_log_file(path: Path, is_json: bool, is_required: bool = True) -> LogFile:
    """Append the entries of this process to the file at `path`, from level INFO. Raises OutputFailed if it is required;
    otherwise each entry tries again to create it, as for a disk that takes none."""
    handler = _LockedFile(path)
    try:
        handler.stream = handler._open()
    except OSError as error:
        if is_required:
            handler.close()
            raise OutputFailed(f"{path}: the log cannot be written ({error.strerror or error})") from error
    handler.setFormatter(JsonLines() if is_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return LogFile(handler)


class _WholeEntries(FileIO):
    """Appends all bytes or raises OSError; keeps none of them for later. Behind a part of an entry, the next one begins
    on a line of its own: other processes may append, so that no part can be cut off."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "ab")
        self._is_torn = False

    def write(self, content: Any, /) -> int:
        """See `io.RawIOBase`, which may write less."""
        rest = memoryview(b"\n" + bytes(content) if self._is_torn else content)
        while rest:
            written = super().write(rest) or 0
            self._is_torn = written < len(rest)
            rest = rest[written:]
        return len(content)


class _LockedFile(logging.handlers.RotatingFileHandler):
    """A log with a lock that several processes can have: `actors.ray.unused_state` leaves locked logs alone. Its
    messages name prompts and files: a new one is private, and a new one after a full one has the permissions of it."""

    def __init__(self, path: Path) -> None:
        self._permissions = 0o600
        #: entries since the last one that was written, and why the file did not take them
        self._lost, self._reason = 0, ""
        #: the entry that counts them, while it is written
        self._notice: logging.LogRecord | None = None
        super().__init__(path, maxBytes=MOST_BYTES, backupCount=1, encoding="utf-8", delay=True)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`. A file that somebody has removed or renamed, as log rotation does, is made again.
        Entries that a full disk does not take are counted in the first one that it takes."""
        with contextlib.suppress(OSError):  # the stream that is open takes the entry, or `handleError` says why not
            self._follow()
        self._tell_lost()
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of `logging`
        """See `logging.Handler`, which writes a traceback to stderr for each entry that a disk does not take."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._reason = error.strerror or str(error)
        if record is self._notice:
            self._notice = None
            return
        self._lost += 1
        if self._lost == 1 and sys.stderr is not None:
            with contextlib.suppress(OSError):  # on the same disk
                print(f"{self.baseFilename}: the log is not written now ({self._reason})", file=sys.stderr, flush=True)

    def close(self) -> None:
        """See `logging.Handler`."""
        if self.stream is not None:
            self._tell_lost()
        super().close()

    def _tell_lost(self) -> None:
        """Write how many entries are lost, if any are, and the file takes it."""
        if not self._lost:
            return
        words = f"{counted(self._lost, 'entry', 'entries')} of this log lost: {self._reason}"
        self._notice = logging.LogRecord(ROOT_LOGGER, logging.WARNING, __file__, 0, words, None, None)
        super().emit(self._notice)
        if self._notice is not None:  # `handleError` was not called
            self._lost, self._notice = 0, None

    def _follow(self) -> None:
        if self.stream is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.baseFilename), os.fstat(self.stream.fileno())):
                return
        before, self.stream = self.stream, self._open()
        with contextlib.suppress(OSError):
            before.close()

    def _open(self) -> TextIOWrapper:
        """See `logging.FileHandler`; also called when the file is rotated."""
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self.baseFilename, flags, self._permissions)
        stream = TextIOWrapper(  # nothing in between keeps what the file does not take
            _WholeEntries(descriptor), encoding=self.encoding, errors=self.errors, write_through=True
        )
        self._permissions = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return stream


class JsonLines(logging.Formatter):
    """Formats an entry as one JSON object: time (UTC), level, logger, message, its fields, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
