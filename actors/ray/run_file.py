"""The run files of pools on this machine, for `modelpool status`, `modelpool down` and `ModelPool.connect`.

One file per pool, written by the process that owns it. A file without a live process is stale and ignored; process ids
are reused, so the process's start must match too. Knows neither Ray nor how a pool is started.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from modelpool.pool.values.core.process_identity import found_process
from modelpool.pool.values.core.user_folders import former_machine_folders, machine_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningPool:
    """A pool that a process of this machine keeps running.

    started_at  of the process, in Unix seconds
    start       of the process, see `process_start`; "" if unknown
    log         output of the process and its workers
    drain_seconds  time that running tasks get when the pool is asked to end
    history     file of the events and costs of the pool, on the node of its controller; "" if it keeps none
    status_socket  path of a socket that answers with the status of the pool; "" if there is none
    """

    name: str
    namespace: str
    address: str
    pid: int
    started_at: float
    log: str
    drain_seconds: float = 0.0
    status_socket: str = ""
    start: str = ""
    history: str = ""


def write_run_file(pool: RunningPool) -> None:
    """Write the run file of `pool`, atomically."""
    path = _path(pool.name)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(dataclasses.asdict(pool), indent=2) + "\n")
    draft.replace(path)


def remove_run_file(pool: RunningPool) -> None:
    """Remove the run file of `pool`. Leaves the file of another pool that took the name."""
    if _read(_path(pool.name)) == pool:
        _path(pool.name).unlink(missing_ok=True)


def running_pool(name: str | None = None) -> RunningPool | None:
    """Return the pool called `name`, or without a name the one that was started last. None if none runs."""
    running = _running_in(machine_folder(), name)
    if not running:  # started by an earlier version
        for folder in former_machine_folders():
            running += (former := _running_in(folder, name))
            for pool in former:
                logger.warning(
                    "the pool %r was started by an earlier version; its run file is in %s", pool.name, folder
                )
    return max(running, key=lambda pool: pool.started_at, default=None)


def _running_in(folder: Path, name: str | None) -> list[RunningPool]:
    paths = [folder / f"{name}{_SUFFIX}"] if name is not None else folder.glob(f"*{_SUFFIX}")
    return [pool for path in paths if (pool := _read(path)) is not None and is_running(pool)]


def is_running(pool: RunningPool) -> bool:
    """Whether the process of `pool` still exists."""
    return process_of(pool) is not None


def process_of(pool: RunningPool) -> psutil.Process | None:
    """Return the process of `pool`; None if it has ended, its id was reused, or it is a zombie."""
    try:
        process = found_process(pool.pid, pool.start, pool.started_at)
        return None if process is None or process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


_SUFFIX = ".pool.json"


def _path(name: str) -> Path:
    return machine_folder() / f"{name}{_SUFFIX}"


def _read(path: Path) -> RunningPool | None:
    """Read a run file; None if it is missing or not one of ours."""
    try:
        return RunningPool(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
