"""Identifies a process, and a start of the machine, by facts that no step of the wall clock changes. Linux first:
elsewhere the facts are unknown, "" and 0.
"""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: fields of /proc/PID/stat behind the name of the program, which may contain blanks and parentheses; the 22nd of all
#: is the start
_START_FIELD = 22 - 3


def boot_id() -> str:
    """Return the id of this start of the machine; "" if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks since the start of the machine; 0 if there is no such
    process, or the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(stat.rpartition(")")[2].split()[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return 0
