"""Locates the folder that modelpool's processes share: run files, logs, the token of local Ray clusters."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from modelpool.pool.core.errors import OutputFailed


def state_folder() -> Path:
    """Return the folder, created for this user only if missing. Raises OutputFailed if none can be created."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = [Path(runtime) / "modelpool"] if runtime else []
    places.append(Path.home() / ".local" / "state" / "modelpool")
    places.append(Path(tempfile.gettempdir()) / f"modelpool-{os.getuid()}")
    for folder in places:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    raise OutputFailed(f"no writable folder for modelpool's state; tried {', '.join(map(str, places))}")


def journal_path(configured: Path | None, pool_name: str) -> Path:
    """Return the file of a pool's journal on this machine: as configured, or in the folder of this user's state, which
    survives a restart of the machine (unlike `state_folder`).
    """
    if configured is not None:
        return configured.expanduser()
    return _lasting_folder() / f"{pool_name}.journal.sqlite"


def pool_log_path(configured: Path | None, pool_name: str) -> Path:
    """Return the file of a pool's log on this machine: as configured, or in `state_folder`. Raises OutputFailed."""
    return state_folder() / f"{pool_name}.log" if configured is None else configured.expanduser()


def own_checkpoints() -> Path:
    """Return the folder for checkpoints of sampling runs on this machine, which survives its restart. It may not exist
    yet."""
    return _lasting_folder() / "checkpoints"


def _lasting_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    if state:
        return Path(state) / "modelpool"
    try:
        return Path.home() / ".local" / "state" / "modelpool"
    except RuntimeError:  # a user without an entry and without HOME, as in some containers
        return Path(tempfile.gettempdir()) / f"modelpool-{os.getuid()}" / "state"
