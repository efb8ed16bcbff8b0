"""The images of detached submissions on disk: a folder `inputs/ID` for each, from which its jobs read them.

A folder lives as long as jobs may read it. It is removed with its submission (`Submissions`), and by `sweep` for
submissions that ended, or were removed from the journal, while no server ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelpool.actors.http.service.caller_images import IMAGE_FIELDS, LIST_FIELDS, PART_FIELDS
from modelpool.actors.http.service.ports import HttpPool
from modelpool.actors.outputs.atomic_write import make_private_folder
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.strict import Strict
from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from modelpool.actors.control.detached.records import SubmissionRecord

#: in the folder of a server
INPUTS_FOLDER = "inputs"
#: between two sweeps, and the age of a folder below which its submission may not be in the journal yet
SWEEP_SECONDS, YOUNG_SECONDS = 3600.0, 3600.0


def unneeded(folders: Mapping[str, float], records: Iterable[SubmissionRecord], now: float) -> list[str]:
    """Return the folders, by name with the time of their last change, from which no job will read: of submissions whose
    jobs have all succeeded, and of those that the journal does not have. Failed jobs may be submitted again."""
    known = {record.submission_id: record for record in records}

    def is_needed(name: str, changed_at: float) -> bool:
        record = known.get(name)
        if record is None:
            return abs(now - changed_at) < YOUNG_SECONDS
        return record.succeeded < record.request_count

    return sorted(name for name, changed_at in folders.items() if not is_needed(name, changed_at))


def sweep(pool: HttpPool, folder: Path) -> list[str]:
    """Remove the images of submissions that need none, and return their ids. Does nothing if the pool has no journal,
    or does not answer: without the journal nobody knows which are needed."""
    root = folder / INPUTS_FOLDER
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(root):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_mtime
    if not found:
        return []
    try:
        records: Sequence[SubmissionRecord] = pool.detached()
    except (UserError, PoolLost):
        return []
    removed = unneeded(found, records, time.time())
    for name in removed:
        shutil.rmtree(root / name, ignore_errors=True)
    return removed


@contextlib.asynccontextmanager
async def written_for_submission(folder: Path | None) -> AsyncIterator[None]:
    """Remove `folder`, if it is new, when the block refuses a submission (UserError). After other errors, and when the
    server ends in the block, the journal may have the submission, and its jobs read the images: `sweep` removes them if
    it has not. None for a submission without a folder."""
    is_new = folder is not None and await asyncio.to_thread(_is_new, folder)
    try:
        yield
    except UserError:
        if folder is not None and is_new:  # another submission under this id has the images otherwise
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise


def _is_new(folder: Path) -> bool:
    """Whether there is no such folder. One that exists is young again: a call that failed may have left it, and a sweep
    must not remove what this call finds in it."""
    try:
        os.utime(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def with_own_inputs(request: GenerateRequest, root: Path, folder: Path) -> GenerateRequest:
    """Return the request with its images below `root` in `folder`: the folder of another submission may be removed
    before the job of this one runs. Raises UserError for an image that is gone."""
    names = (*IMAGE_FIELDS, *LIST_FIELDS, *PART_FIELDS)
    changed = {}
    for name in names:
        value = getattr(request, name, None)
        moved = _moved(value, PART_FIELDS.get(name, ()), root, folder)
        if moved is not value:
            changed[name] = moved
    return request.model_copy(update=changed) if changed else request


def _moved(value: Any, keys: Sequence[str], root: Path, folder: Path) -> Any:
    """`value` with every path below `root` replaced by one in `folder`; of a part of a request, that of `keys`."""
    match value:
        case Strict():
            fields = {key: getattr(value, key, None) for key in keys}
            found = {key: _moved(each, (), root, folder) for key, each in fields.items()}
            changed = {key: each for key, each in found.items() if each is not fields[key]}
            return value.model_copy(update=changed) if changed else value
        case tuple() | list():
            moved = [_moved(each, keys, root, folder) for each in value]
            return value if all(new is old for new, old in zip(moved, value, strict=True)) else type(value)(moved)
        case Path() if value.is_relative_to(root):
            return _linked(value, folder)
        case str() if Path(value).is_absolute() and Path(value).is_relative_to(root):
            return str(_linked(Path(value), folder))
    return value


def _linked(path: Path, folder: Path) -> Path:
    """Return a second name of a file in `folder`, or a copy where the file system has no links."""
    target = folder / path.name
    make_private_folder(folder)
    try:
        os.link(path, target)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise UserError(f"{path.name}: this image of the submission was removed; send the request again") from None
    except OSError:
        shutil.copy2(path, target)
    return target
