"""Traces that a worker leaves in case its process ends: fatal signals, exits of libraries, OOM kills by the kernel.

A worker that is gone cannot report why. At its start it creates two files in a private folder of its machine:

NAME.trace   faulthandler writes fatal signals (SIGSEGV, SIGABRT, ...) and the Python stack to it
NAME.alive   the machine's number of OOM kills, as the worker last read it. The C library removes the file if the
             process calls exit, so that only a fatal signal, SIGKILL or _exit leaves it

Another process of the machine reads them after the loss. SIGKILL leaves both files, with an empty trace.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelpool.actors.outputs.atomic_write import private_opener

#: characters of a trace that are read
_TRACE_CHARACTERS = 4000
#: traces that remain in the folder, most recently used first; a living worker uses its own every few seconds
TRACES_KEPT = 256
#: files that count the processes that the kernel killed because memory ran out: in this container (control
#: groups of version 2, then 1), else on the machine
OOM_COUNTERS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)

_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CrashEvidence:
    """The traces of a worker that is gone.

    found        whether any were found
    fatal_error  the fatal signal in words ("Segmentation fault"); "" if there was none
    place        file and line of the Python code that ran then; "" if unknown
    exited       the process called exit
    oom_kills    processes that the kernel killed on the machine since the worker last counted, for want of memory
    """

    found: bool = False
    fatal_error: str = ""
    place: str = ""
    exited: bool = False
    oom_kills: int = 0


class CrashTrace:
    """The two files of this process. The fatal signals of a process go to one trace at a time."""

    def __init__(self, folder: Path, name: str, counters: Sequence[Path] = OOM_COUNTERS) -> None:
        """Create the files; `folder` is created if missing, for this user only. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _prune(folder)
        self._counters = counters
        self._trace_path, self._alive_path = _paths(folder, name)
        self._alive = os.open(self._alive_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._trace = open(self._trace_path, "w", opener=private_opener)  # noqa: SIM115  faulthandler writes to it
        self.refresh()
        faulthandler.enable(self._trace, all_threads=False)
        _remove_on_exit(self._alive_path)

    def refresh(self) -> None:
        """Count the OOM kills again: only later ones can have ended this process."""
        os.pwrite(self._alive, f"{count_oom_kills(self._counters):<20}".encode(), 0)
        with contextlib.suppress(OSError):
            os.utime(self._trace_path)

    def close(self) -> None:
        """Remove the files. Call it when the process ends in order."""
        faulthandler.disable()
        self._trace.close()
        os.close(self._alive)
        remove_trace(self._trace_path.parent, self._trace_path.stem)


def read_evidence(folder: Path, name: str, counters: Sequence[Path] = OOM_COUNTERS) -> CrashEvidence:
    """Read the traces of a worker that is gone."""
    trace_path, alive_path = _paths(folder, name)
    try:
        trace = trace_path.read_text(errors="replace")[:_TRACE_CHARACTERS]
    except OSError:
        return CrashEvidence()
    fatal, frame = _FATAL.search(trace), _FRAME.search(trace)
    try:
        counted = int(alive_path.read_text())
    except FileNotFoundError:
        counted = None
    except (OSError, ValueError):
        counted = count_oom_kills(counters)
    return CrashEvidence(
        found=True,
        fatal_error=fatal[1].strip() if fatal else "",
        place=f"{Path(frame[1]).name}, line {frame[2]}" if frame else "",
        exited=counted is None,
        oom_kills=0 if counted is None else max(0, count_oom_kills(counters) - counted),
    )


def remove_trace(folder: Path, name: str) -> None:
    """Remove the traces of a worker, if they exist."""
    for path in _paths(folder, name):
        path.unlink(missing_ok=True)


def count_oom_kills(counters: Sequence[Path] = OOM_COUNTERS) -> int:
    """Return how many processes the kernel has killed for want of memory, by the first file that counts them; 0 if
    none does."""
    for path in counters:
        try:
            count = _OOM_KILLS.search(path.read_text())
        except OSError:
            continue
        if count:
            return int(count[1])
    return 0


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.trace", folder / f"{name}.alive"


def _prune(folder: Path) -> None:
    """Remove the least recently used traces, so that the folder stays small."""
    used: list[tuple[float, str]] = []
    for path in folder.glob("*.trace"):
        with contextlib.suppress(OSError):
            used.append((path.stat().st_mtime, path.stem))
    for _, name in sorted(used, reverse=True)[TRACES_KEPT - 1 :]:
        remove_trace(folder, name)


def _remove_on_exit(path: Path) -> None:
    """Have the C library remove `path` when any code of this process calls exit: Python's atexit would not notice the
    exits of native libraries."""
    library = ctypes.CDLL(None)
    library.strdup.restype = ctypes.c_void_p
    with contextlib.suppress(AttributeError):  # a C library without this function: exits count as kills
        register = library.__cxa_atexit
        # C memory, which is never freed: Python frees its own before the handlers run
        copy = ctypes.c_void_p(library.strdup(os.fsencode(path)))
        register(ctypes.cast(library.unlink, ctypes.c_void_p), copy, None)
