"""Folders of the user in which modelpool keeps its own files: state, and caches that can be computed again.

Everything that a command writes without being given a place is here, apart from its outputs and from Ray's temporary
folder. The only module that reads the variables which name these folders.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import tempfile
from importlib.metadata import version
from pathlib import Path

from modelpool.pool.values.core.errors import OutputFailed

#: the folder of the state itself, in place of `modelpool` in $XDG_STATE_HOME
STATE_VARIABLE = "MODELPOOL_STATE_DIR"
#: the same for caches, in place of `modelpool` in $XDG_CACHE_HOME
CACHE_VARIABLE = "MODELPOOL_CACHE_DIR"
_MACHINES = "machines"
_OWN_MODE = 0o700


def state_folder() -> Path:
    """Return the folder of this user's state, which survives a restart of the machine: $MODELPOOL_STATE_DIR, else
    `modelpool` in $XDG_STATE_HOME, else ~/.local/state/modelpool, else (without a home that can be written) a folder
    of the user in the machine's temporary folder. Relative values of the variables do not count. It may not exist yet.

    Raises OutputFailed if none of them can be written.
    """
    return _first_usable("state", STATE_VARIABLE, "XDG_STATE_HOME", ".local/state", _in_temporary_folder())


def cache_folder() -> Path:
    """Return the folder of this user's caches: $MODELPOOL_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache, as `state_folder`
    does. It may not exist yet. Raises OutputFailed.
    """
    place = _in_temporary_folder()
    return _first_usable("cache", CACHE_VARIABLE, "XDG_CACHE_HOME", ".cache", place.with_name(f"{place.name}-cache"))


def folder_name(device_name: str) -> str:
    """Return the name of a folder or file for a kind of device, from its vendor's name and the version of torch: what
    was compiled or measured for one is not valid for another."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{device_name}-torch-{version('torch')}").strip("-")


def machine_folder() -> Path:
    """Return the part of `state_folder` that belongs to this machine, created if missing: run files, locks, logs,
    traces of workers, and the token of local Ray clusters. Machines may share a home, but not their processes.

    Raises OutputFailed if it cannot be created.
    """
    state = state_folder()
    folder = state / _MACHINES / (platform.node() or "localhost")
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        for each in (state, state / _MACHINES, folder):  # with this mode; `parents` would use the default
            each.mkdir(mode=_OWN_MODE, exist_ok=True)
    except OSError as error:
        raise OutputFailed(f"{folder}: cannot be created ({error.strerror or error})") from None
    for each in (state, folder):  # another user may have created the first one a moment ago
        if not _is_own(each):
            raise OutputFailed(f"{each}: belongs to another user, expected a folder of this one")
    return folder


def former_machine_folders() -> tuple[Path, ...]:
    """Return the folders that earlier versions used as `machine_folder` and that exist, without this one. Programs read
    the files of running pools there, and write nothing.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [Path(runtime) / "modelpool"] if runtime else []
    places += [state_folder(), *_in_home(".local/state"), _in_temporary_folder()]
    return tuple(place for place in dict.fromkeys(places) if _is_own(place))


def _first_usable(what: str, variable: str, base_variable: str, in_home: str, in_temporary: Path) -> Path:
    own, base = os.environ.get(variable, ""), os.environ.get(base_variable, "")
    places = [Path(own)] if Path(own).is_absolute() else []
    places += [Path(base) / "modelpool"] if Path(base).is_absolute() else []
    places += [*_in_home(in_home), in_temporary]
    usable = next((place for place in places if _is_usable(place)), None)
    if usable is None:
        raise OutputFailed(f"no writable folder for modelpool's {what}; tried {', '.join(map(str, places))}")
    return usable


def _in_home(folder: str) -> tuple[Path, ...]:
    try:
        return (Path.home() / folder / "modelpool",)
    except RuntimeError:  # a user without an entry and without HOME, as in some containers
        return ()


def _in_temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"modelpool-{_user()}"


def _is_usable(folder: Path) -> bool:
    """Whether this user can write the folder, or create it."""
    for place in (folder, *folder.parents):
        if os.path.exists(place):  # Path.exists raises below a folder that this user must not enter
            can_write = os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)
            return can_write and (place != folder or _is_own(folder))
    return False


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user. In the shared temporary folder, another user may have created one with our
    name, or a link to a folder of ours that everybody can write, such as Ray's: neither counts there.
    """
    is_shared = folder.parent == Path(tempfile.gettempdir())
    try:
        found = folder.lstat() if is_shared else folder.stat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == _user()
    return is_ours and not (is_shared and found.st_mode & stat.S_IWOTH)


def _user() -> int:
    """Return the number of this user; 0 on systems without such numbers, where files have 0, too."""
    return os.getuid() if hasattr(os, "getuid") else 0
