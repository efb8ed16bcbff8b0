"""Locates the files of a pool in the folder of this user's state, unless they are configured elsewhere."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from modelpool.pool.values.core.user_folders import machine_folder, state_folder

logger = logging.getLogger(__name__)


def journal_path(configured: Path | None, pool_name: str) -> Path:
    """Return the file of a pool's journal on this machine: as configured, or in the folder of this user's state.

    A journal that an earlier version has written where no home can be written continues there, and a warning says so.
    """
    if configured is not None:
        return configured.expanduser()
    path = state_folder() / f"{pool_name}.journal.sqlite"
    former = path.parent / "state" / path.name
    if path.is_relative_to(tempfile.gettempdir()) and former.exists() and not path.exists():
        logger.warning("%s is used, where an earlier version wrote it; new journals are in %s", former, path.parent)
        return former
    return path


def pool_log_path(configured: Path | None, pool_name: str) -> Path:
    """Return the file of a pool's log on this machine: as configured, or in `machine_folder`. Raises OutputFailed."""
    return machine_folder() / f"{pool_name}.log" if configured is None else configured.expanduser()


def own_checkpoints() -> Path:
    """Return the folder for checkpoints of sampling runs on this machine, which survives its restart. It may not exist
    yet."""
    return state_folder() / "checkpoints"


def trace_folder() -> Path:
    """Return the folder of this machine with the traces of workers. Raises OutputFailed."""
    return machine_folder() / "traces"
