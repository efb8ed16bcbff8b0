"""Polls a command for the notice that this machine will be taken back.

Providers announce that through their own means: a metadata service, a file, a message. The command of
`[cluster] notice_command` asks them. It prints nothing, or fails, as long as there is no notice; else it prints the
deadline, as `notice_deadline` reads it. Of all workers that a pool has on a node, the one that holds a lock runs the
command: its notice reaches the controller of that pool, and is one of that node of the cluster.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)

#: limit of one run of the command
COMMAND_SECONDS = 10.0
#: numbers below are seconds from now, numbers above are Unix seconds (2001)
_UNIX_FROM = 1e9

_ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_NUMBER = re.compile(r"\+?\d+(?:\.\d+)?")


def notice_deadline(printed: str, now: float) -> float | None:
    """Return the deadline in Unix seconds that a notice command printed at `now`; None if it printed none.

    Forms: a time such as 2026-01-31T12:00:00Z anywhere in the text (UTC unless it names a zone), Unix seconds, or
    seconds from now.
    """
    text = printed.strip()
    if found := _ISO.search(text):
        try:
            moment = datetime.fromisoformat(found[0])
        except ValueError:
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if number >= _UNIX_FROM else now + number


def notice_lock(folder: Path, pool: str, node: str) -> Path:
    """Return the lock of the workers that a pool has on a node, one of several of the machine, say."""
    digest = hashlib.sha256(f"{pool}\0{node}".encode()).hexdigest()
    return folder / f"notices-{digest[:16]}.lock"


class NoticePoller:
    """Runs the command in its own thread, and reports notices that are new, changed or withdrawn (None)."""

    def __init__(
        self,
        command: str,
        interval_seconds: float,
        lock_path: Path | None,
        report: Callable[[float | None, str], None],
        each_time: Callable[[], None] = lambda: None,
    ) -> None:
        """`each_time` is called in the thread once per interval, with or without a command. Without `lock_path`, every
        worker runs the command."""
        self._command = command
        self._interval_seconds = interval_seconds
        self._lock_path = lock_path
        self._report = report
        self._each_time = each_time
        self._lock: int | None = None
        self._deadline: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_polling, name="node notices", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and let another worker of the machine poll."""
        self._ended.set()
        self._thread.join(COMMAND_SECONDS)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def tell_again(self) -> None:
        """Report the notice again at the next poll: the controller that received it may have ended before it acted."""
        self._deadline = None

    def poll(self) -> None:
        """Run the command once if no other worker of the pool on this node does, and report what changed."""
        if not self._command or not self._holds_lock():
            return
        deadline = notice_deadline(_output(self._command), time.time())
        if deadline is None and self._deadline is None:
            return
        # a command that prints seconds from now repeats the same notice with rounding errors
        if None in (deadline, self._deadline) or abs((deadline or 0.0) - (self._deadline or 0.0)) > 1.0:
            self._deadline = deadline
            self._report(deadline, "its notice command reports that it will be taken back")

    def _keep_polling(self) -> None:
        while not self._ended.is_set():
            try:
                self._each_time()
                self.poll()
            except OSError as failed:
                logger.warning("the notice command cannot be run: %s", failed)
            self._ended.wait(self._interval_seconds)

    def _holds_lock(self) -> bool:
        if self._lock_path is not None and self._lock is None:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._lock = lock
        return True


def _output(command: str) -> str:
    """Return what a command prints; "" if it fails or takes too long."""
    try:
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        logger.warning("the notice command took more than %.0f s", COMMAND_SECONDS)
        return ""
    return done.stdout if done.returncode == 0 else ""
