"""Identifies a process, and a start of the machine, by facts that no step of the wall clock changes. Where the system
has no such facts, they are "".
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: fields of /proc/PID/stat behind the name of the program, which may contain blanks and parentheses; the 22nd of all
#: is the start
_START_FIELD = 22 - 3
#: state of a process that a signal has stopped, and not a debugger
_STOPPED = "T"
#: states of a process that has ended: it waits for its parent, or goes
_ENDED = "ZX"
#: the kernel reports start times in hundredths of a second
_SAME_START_SECONDS = 0.02


def boot_id() -> str:
    """Return the id of this start of the machine; "" if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """Return what tells the process with this id from others that had it, or will have it: the start of the machine,
    and the kernel's ticks from then to the start of the process. "" if there is no such process, or the system does not
    say.
    """
    return _state_and_start(pid)[1]


def is_stopped(pid: int, start: str) -> bool:
    """Return whether the process with this id and `process_start` is stopped now, as by SIGSTOP. False where the system
    does not say."""
    return bool(start) and _state_and_start(pid) == (_STOPPED, start)


def has_ended(pid: int, start: str) -> bool:
    """Return whether the process with this id had this `process_start`, and runs no more. False where the system does
    not say, as when this process has no file descriptor left to ask."""
    if not start:
        return False
    state, found = _state_and_start(pid)
    if found:
        return found != start or state in _ENDED
    return not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists()


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process, one letter, and its `process_start`; empty where they are unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = stat.rpartition(")")[2].split()
        state, ticks = fields[0], int(fields[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return "", ""
    boot = boot_id()
    return state, f"{boot}/{ticks}" if boot else ""


def found_process(pid: int, start: str, started_at: float) -> psutil.Process | None:
    """Return the process with this id, if it is the one with this `process_start`. Where that is unknown, "", its time
    of start in Unix seconds must be equal, which it is not after a step of the wall clock. None if it has ended, or the
    id belongs to another process by now.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        if start:
            return process if process_start(pid) == start else None
        return process if abs(process.create_time() - started_at) < _SAME_START_SECONDS else None
    except psutil.NoSuchProcess:
        return None
