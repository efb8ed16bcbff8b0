"""`CheckpointFolder`: the checkpoints of one place, by task, within a bound.

Several processes use a folder at the same time: the workers of a node, and the controller. A file appears complete or
not at all, and its name has the task and the step. Every valid checkpoint of a task leads to the same result, so it is
never wrong that another process removes or adds one; it only takes more or fewer steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelpool.actors.worker.step_checkpoints.checkpoint_file import OtherVersions, read_checkpoint, write_checkpoint
from modelpool.pool.files.formats.atomic_write import PARTIAL_SUFFIX
from modelpool.pool.values.core.errors import CorruptFile, OutputFailed, format_bytes
from modelpool.pool.values.core.installed_versions import installed_versions
from modelpool.pool.values.core.results import RunState
from modelpool.pool.values.specs.spec import TaskId

logger = logging.getLogger(__name__)

SUFFIX = ".checkpoint"
_NAME = re.compile(rf"(?P<task>[A-Za-z0-9._-]+)\.(?P<step>[0-9]+){re.escape(SUFFIX)}")
#: checkpoints without a change for so long are removed at the start of a pool: longer than an outage over a holiday
MOST_AGE_SECONDS = 14 * 86400.0
#: unfinished files, of processes that were killed, are removed after this time: no write takes so long
MOST_WRITE_SECONDS = 600.0
#: left free on the disk for others: journal and outputs matter more than checkpoints
LEAST_FREE_BYTES = 512 << 20
#: bytes of a file besides its tensors, at most: header and metadata
_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """How a pool saves the states of sampling runs.

    seconds      of work between two checkpoints of a run
    bound_bytes  maximum of each folder
    folder       of the controller's node, for the checkpoints of all workers; None for the one in the user's state
                 folder, which the workers of every node use too
    computed_by  further settings that the last bits of a state depend on, by name: only a pool with the same resumes it
    """

    seconds: float
    bound_bytes: int
    folder: Path | None = None
    computed_by: Mapping[str, str] = field(default_factory=dict)

    def folder_at(self, path: Path) -> CheckpointFolder:
        """Return the checkpoints in `path`."""
        return CheckpointFolder(path, self.bound_bytes, {**installed_versions(), **self.computed_by})


@dataclass(frozen=True, slots=True)
class _Stored:
    entry: os.DirEntry[str]
    task_id: TaskId
    step: int

    @property
    def path(self) -> Path:
        return Path(self.entry.path)


@dataclass(frozen=True, slots=True)
class _Sized:
    path: Path
    task_id: TaskId
    step: int
    file_bytes: int
    changed_at: float


class CheckpointFolder:
    """A private folder of checkpoints, created when the first one is saved. Its methods block on the disk."""

    def __init__(
        self,
        path: Path,
        bound_bytes: int,
        versions: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`versions` has the versions of packages that compute, by default the installed ones, and whatever else the
        last bits of a state depend on; `now` is wall-clock time, with which the ages of files are compared."""
        self.path = path
        self._bound_bytes = bound_bytes
        self._versions = installed_versions() if versions is None else versions
        self._now = now

    def steps(self) -> dict[TaskId, int]:
        """Return the newest step of each task by the names of the files, oldest file first; {} if nothing can be
        read."""
        found: dict[TaskId, int] = {}
        for stored in self._oldest_first():
            found[stored.task_id] = max(stored.step, found.get(stored.task_id, 0))
        return found

    def newest(self, task_id: TaskId, steps: int, above: int = 0) -> RunState | None:
        """Return the newest valid state of a run of `steps` steps that is beyond step `above`; None without one. Files
        that cannot be used are logged."""
        own = [stored for stored in self._stored() if stored.task_id == task_id and stored.step > above]
        for stored in sorted(own, key=lambda each: each.step, reverse=True):
            try:
                state = read_checkpoint(stored.path, task_id, steps, self._versions)
            except OtherVersions as other:
                logger.info("a checkpoint is not used: %s", other)
            except CorruptFile as corrupt:
                if os.path.lexists(stored.path):  # else it was removed meanwhile: its task has succeeded
                    logger.warning("a checkpoint is not used: %s", corrupt)
            else:
                if state.step > above:
                    return state
        return None

    def save(self, task_id: TaskId, state: RunState) -> bool:
        """Save a state in place of earlier ones of its task, after removing as many of the oldest of others as the
        bound requires. False if it exceeds the bound by itself. Raises OutputFailed, also if it would leave less than
        `LEAST_FREE_BYTES` on the disk."""
        path = self.path / f"{task_id}.{state.step}{SUFFIX}"
        assert _NAME.fullmatch(path.name), f"{task_id!r} is not the name of a file"
        file_bytes = sum(array.nbytes for array in state.arrays) + _HEADER_BYTES
        if file_bytes > self._bound_bytes:
            return False
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(task_id, file_bytes)
            free_bytes = shutil.disk_usage(self.path).free
        except OSError as error:
            raise OutputFailed(f"{self.path}: cannot be created: {error.strerror or error}") from error
        if free_bytes < file_bytes + LEAST_FREE_BYTES:
            raise OutputFailed(
                f"{self.path}: found {format_bytes(free_bytes)} free, expected {format_bytes(file_bytes)} and "
                f"{format_bytes(LEAST_FREE_BYTES)} for others"
            )
        write_checkpoint(path, task_id, state, self._versions)
        for stored in self._stored():
            if stored.task_id == task_id and stored.step < state.step:
                _remove(stored.path)
        return True

    def remove(self, task_id: TaskId) -> None:
        """Remove all checkpoints of a task."""
        for stored in self._stored():
            if stored.task_id == task_id:
                _remove(stored.path)

    def clean(self) -> None:
        """Remove checkpoints that are too old, files that were never finished, and the oldest ones beyond the bound."""
        for stored in self._oldest_first():
            if self._now() - stored.changed_at > MOST_AGE_SECONDS:
                _remove(stored.path)
        self._make_room(None, 0)

    def _make_room(self, task_id: TaskId | None, file_bytes: int) -> None:
        """Remove files that were never finished, and the oldest checkpoints of other tasks until one of `file_bytes`
        fits. The earlier one of the task is needed until the new one is complete: meanwhile the folder may be larger
        by one file."""
        for path, changed_at in self._unfinished():
            if self._now() - changed_at > MOST_WRITE_SECONDS:
                _remove(path)
        stored = self._oldest_first()
        excess = sum(each.file_bytes for each in stored if each.task_id != task_id) + file_bytes - self._bound_bytes
        for each in stored:
            if excess <= 0:
                return
            if each.task_id != task_id:
                logger.info("%s: removed for newer checkpoints, of which %s are kept", each.path, self._bound)
                _remove(each.path)
                excess -= each.file_bytes

    @property
    def _bound(self) -> str:
        return format_bytes(self._bound_bytes)

    def _stored(self) -> list[_Stored]:
        named = [(entry, _NAME.fullmatch(entry.name)) for entry in self._entries()]
        return [_Stored(entry, TaskId(name["task"]), int(name["step"])) for entry, name in named if name is not None]

    def _oldest_first(self) -> list[_Sized]:
        found = []
        for stored in self._stored():
            with contextlib.suppress(OSError):  # another process may have removed it
                status = stored.entry.stat(follow_symlinks=False)
                found.append(_Sized(stored.path, stored.task_id, stored.step, status.st_size, status.st_mtime))
        return sorted(found, key=lambda each: each.changed_at)

    def _unfinished(self) -> Iterator[tuple[Path, float]]:
        for entry in self._entries():
            if entry.name.endswith(PARTIAL_SUFFIX) and SUFFIX in entry.name:
                with contextlib.suppress(OSError):
                    yield self.path / entry.name, entry.stat(follow_symlinks=False).st_mtime

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as entries:
                return list(entries)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                logger.warning("%s: checkpoints cannot be read: %s", self.path, error.strerror or error)
            return []


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
