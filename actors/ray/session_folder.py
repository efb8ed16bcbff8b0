"""The folder of a local Ray, and the removal of what hard terminations left behind.

Ray makes its own folder accessible to every user (mode 0777) and names the folders of its sessions by time and process
id, so another user could replace its sockets. It is therefore inside a folder with a random name that only this user
can enter. A lock in that folder is held as long as the program lives that started Ray: the kernel releases it with the
process, in whatever way that ends, and other containers that share the disk see it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

PREFIX = "modelpool-"
LOCK_NAME = "owner"
#: Ray's part; short, since paths of sockets may have 107 bytes, of which Ray uses about 70
RAY_NAME = "r"
#: logs of ended drivers and workers that are kept: Ray keeps the logs of all that have ever joined
MOST_LOGS = 1000
#: names of such logs, with the process
_LOG = re.compile(r"(?:python-core-(?:driver|worker)-|worker-)[0-9a-f_-]*[_-](\d+)\.(?:log|out|err)(?:\.\d+)?")
#: how long killed processes may take to end before their folder is removed
_END_SECONDS = 3.0
#: the script of `actors.ray.fork_client`
_FORK_CLIENT = "/actors/ray/fork_client.py"
#: in the arguments of Ray's processes: programs of its package, and the titles of workers and agents. Not its name
#: alone: the home folder in Ray's images has it, too
_OF_RAY = re.compile(r"/ray/(core/src/ray|dashboard|_private|autoscaler)/|/ray/agent_stand_in\.py$|^ray::")


class SessionFolder:
    """A new folder for one Ray, or for what its processes need; `path` is for them."""

    def __init__(self, parent: Path, name: str = "") -> None:
        """`name` tells what it is for."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}", dir=parent))
        self.path = self._folder / RAY_NAME
        # locked before it has its name: a folder without a lock, or with a locked one, is left alone
        draft = self._folder / f"{LOCK_NAME}.new"
        self._lock = os.open(draft, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(self._folder / LOCK_NAME)
        self.path.mkdir()

    def kill_processes(self) -> None:
        """Kill Ray's processes with this folder."""
        _kill(self._folder)

    def remove_old_logs(self, most: int = MOST_LOGS) -> None:
        """Remove Ray's logs of drivers and workers that have ended, except the `most` latest. Never raises."""
        found = []
        for path in self.path.glob("session_2*/logs/*"):
            name = _LOG.fullmatch(path.name)
            if name is not None and not psutil.pid_exists(int(name[1])):
                with contextlib.suppress(OSError):
                    found.append((path.stat().st_mtime, path))
        found.sort()
        for _, path in found[: max(0, len(found) - most)]:
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(parents: Iterable[Path]) -> list[Path]:
    """Remove this user's folders of programs that are gone, after killing Ray's processes that still use them. Leaves
    everything else alone: folders of other users, of living programs, and those without a lock. Never raises. Returns
    the removed folders.
    """
    removed = []
    for parent in dict.fromkeys(parents):
        with contextlib.suppress(OSError):
            for folder in sorted(parent.glob(f"{PREFIX}*")):
                with _abandoned(folder) as is_abandoned:
                    if is_abandoned:
                        _kill(folder)
                        shutil.rmtree(folder, ignore_errors=True)
                        removed.append(folder)
    if removed:
        logger.info("removed what ended programs left behind: %s", ", ".join(map(str, removed)))
    return removed


@contextlib.contextmanager
def _abandoned(folder: Path) -> Iterator[bool]:
    """Return whether nobody holds the lock of a folder of this user, and hold it meanwhile."""
    descriptor = -1
    try:
        if _is_own(folder):
            with contextlib.suppress(OSError):
                descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
        yield False
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_own(folder: Path) -> bool:
    """Whether it is a folder, not a link, of this user, that nobody else can change."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _kill(folder: Path) -> None:
    """Kill the processes of Ray that use this folder, and wait a moment for their end."""
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == os.getuid() and _is_ray_of(process, folder):
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=_END_SECONDS)


def _without_fork_server(arguments: list[str]) -> list[str]:
    """Return the arguments without the socket of the fork server, which follows the script of a fork client."""
    client = next((place for place, argument in enumerate(arguments) if argument.endswith(_FORK_CLIENT)), None)
    return arguments if client is None else arguments[: client + 1] + arguments[client + 2 :]


def _is_ray_of(process: psutil.Process, folder: Path) -> bool:
    """Return whether a process belongs to the Ray of this folder: a program of Ray's package, or a worker or agent,
    which replace their arguments by a title, with the folder in its arguments or an open file there. Arguments that
    name a fork server's folder do not count: its forks may serve another controller with a Ray that still runs.
    """
    arguments = _without_fork_server(process.cmdline())
    if process.pid == os.getpid() or not any(map(_OF_RAY.search, arguments)):
        return False
    inside = f"{folder}/"
    if any(inside in argument for argument in arguments):
        return True
    descriptors = Path(f"/proc/{process.pid}/fd")
    return descriptors.is_dir() and any(os.readlink(file).startswith(inside) for file in descriptors.iterdir())
