"""Removes what ended programs left in the folder of this user's state: folders of machines that are gone, old logs.

Machines may share a home, and in containers each start is another machine: their folders would accumulate. A folder of
another machine is removed if nothing in it has changed for `UNUSED_SECONDS` and no file in it is locked; of the own
machine, logs, run files and notes that old which no process uses. Journals, the registry and checkpoints have bounds of
their own. Processes of other machines cannot be seen, so a pool that lives shows it by changes: workers change their
traces every few seconds, and `modelpool up` its lock every hour (`StateUpkeep`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from modelpool.pool.values.core.errors import OutputFailed
from modelpool.pool.values.core.process_identity import found_process
from modelpool.pool.values.core.user_folders import machine_folder

logger = logging.getLogger(__name__)

#: what has not changed for so long and is not in use is removed: longer than a machine is usually away
UNUSED_SECONDS = 30 * 86400.0
#: how often a pool of `modelpool up` shows that it lives, and looks for what can be removed
UPKEEP_SECONDS = 3600.0
#: beginning of the names of folders that are being removed
_REMOVED = ".removed-"
#: files of the own machine that belong to one process or pool. Locks are empty, and one for each name of a pool
_OF_POOLS = (".log", ".log.1", ".pool.json")
_OWN_FILES = (
    *(f"*{suffix}" for suffix in _OF_POOLS),
    *("*.pool.json.*", "ray-at-*.json", "ray_token.*", "traces/notices-*.lock"),
)


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A file or folder of state. `changed_at` is the newest change of it and of what it contains, wall-clock time."""

    path: Path
    changed_at: float


def unused_entries(entries: Iterable[StateEntry], now: float) -> list[StateEntry]:
    """Return the entries that have not changed for longer than `UNUSED_SECONDS`. Clocks of machines may differ: a
    change in the future is a recent one."""
    return [entry for entry in entries if now - entry.changed_at > UNUSED_SECONDS]


def remove_unused_state() -> list[Path]:
    """Remove what no machine and no process has used for `UNUSED_SECONDS`. Never raises. Returns what was removed."""
    try:
        own = machine_folder()
    except OutputFailed:
        return []
    now = time.time()
    folders = [path for path in _children(own.parent) if path.is_dir() and not path.is_symlink() and path != own]
    others = [_entry(path) for path in folders if not path.name.startswith(_REMOVED)]
    removed = [each.path for each in unused_entries(others, now) if not _has_lock(each.path) and _remove(each.path)]
    for path in folders:
        if path.name.startswith(_REMOVED):  # its program ended while it removed them
            shutil.rmtree(path, ignore_errors=True)
    files = [StateEntry(path, _changed_at(path)) for pattern in _OWN_FILES for path in own.glob(pattern)]
    for each in unused_entries(files, now):
        if not _is_used(each.path):
            with contextlib.suppress(OSError):
                each.path.unlink()
                removed.append(each.path)
    if removed:
        logger.info("removed state that nothing has used for 30 days: %s", ", ".join(map(str, removed)))
    return removed


class StateUpkeep:
    """Shows other machines that a pool lives, and removes what others left behind, every `UPKEEP_SECONDS`."""

    def __init__(self, lock: Path, now: float, tidy: Callable[[], None] | None = None) -> None:
        """`lock` is a file in `machine_folder`; `now` is a monotonic clock. `tidy` removes more, and never raises."""
        self._lock = lock
        self._tidy = tidy
        self._due = now

    def beat(self, now: float) -> None:
        """Do it if it is time. Never raises."""
        if now < self._due:
            return
        self._due = now + UPKEEP_SECONDS
        with contextlib.suppress(OSError):
            os.utime(self._lock)
        remove_unused_state()
        if self._tidy is not None:
            self._tidy()


def _entry(folder: Path) -> StateEntry:
    return StateEntry(folder, max(map(_changed_at, _all_in(folder)), default=_changed_at(folder)))


def _all_in(folder: Path) -> list[Path]:
    """Return a folder and everything in it; links are not followed."""
    found = [folder]
    for place, folders, files in os.walk(folder):
        found += [Path(place) / name for name in (*folders, *files)]
    return found


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _changed_at(path: Path) -> float:
    """Return when it was changed; the future if that is unknown: another program may be removing it."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return float("inf")


def _remove(folder: Path) -> bool:
    """Remove a folder of another machine as a whole: a program that starts there at this moment creates a new one."""
    away = folder.with_name(f"{_REMOVED}{secrets.token_hex(8)}")
    try:
        folder.rename(away)
    except OSError:
        return False
    shutil.rmtree(away, ignore_errors=True)
    return True


def _has_lock(folder: Path) -> bool:
    return any(_is_locked(path) for pattern in ("*.lock", "*.log") for path in folder.glob(pattern))


def _is_locked(path: Path) -> bool:
    """Whether a process has locked a file. Network file systems tell locks of other machines, too, as far as they
    have locks."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _is_used(path: Path) -> bool:
    """Whether a process of this machine uses one of the own files: the process that it names lives, or the file is
    locked, or the lock file of its pool, which lives or starts. Files that were never finished are not used."""
    pool = path.name
    for suffix in _OF_POOLS:
        pool = pool.removesuffix(suffix)
    return _is_locked(path) or _is_locked(path.with_name(f"{pool}.lock")) or _is_process_of(path)


def _is_process_of(note: Path) -> bool:
    """Whether the process lives that a run file or a note names."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
        named = json.loads(note.read_text())
        return found_process(named["pid"], named.get("start", ""), named["started_at"]) is not None
    return False
