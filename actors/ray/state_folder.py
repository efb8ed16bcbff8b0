"""Where modelpool keeps what several of its processes share: which pools run, their logs, the token of local ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from modelpool.pool.core.errors import OutputFailed


def state_folder() -> Path:
    """The folder; made when missing, for this user only. Raises OutputFailed when there is no place for one."""
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
    raise OutputFailed(f"no folder for modelpool's own files can be written; tried {', '.join(map(str, places))}")
