"""The images of detached submissions on disk: a folder `inputs/ID` for each, from which its jobs read them.

A folder lives as long as jobs may read it. It is removed with its submission (`Submissions`), and by `sweep` for
submissions that succeeded while no server ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
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
#: between two sweeps
SWEEP_SECONDS = 3600.0


def unneeded(folders: Collection[str], records: Iterable[SubmissionRecord]) -> list[str]:
    """Return the folders from which no job will read: of submissions with all jobs succeeded. Failed jobs may be
    submitted again. A folder without a record stays: its submission may be on its way, or in the journal of another
    pool with the same folder of outputs."""
    over = {record.submission_id for record in records if 0 < record.request_count == record.succeeded}
    return sorted(over.intersection(folders))


def sweep(pool: HttpPool, folder: Path) -> list[str]:
    """Remove the images of submissions that need none, and return their ids. Does nothing if the pool has no journal,
    or does not answer: without the journal nobody knows which are needed."""
    root = folder / INPUTS_FOLDER
    found: list[str] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(root):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    found.append(entry.name)
    if not found:
        return []
    try:
        records: Sequence[SubmissionRecord] = pool.detached()
    except (UserError, PoolLost):
        return []
    removed = unneeded(found, records)
    for name in removed:
        shutil.rmtree(root / name, ignore_errors=True)
    return removed


@contextlib.asynccontextmanager
async def written_for_submission(folder: Path | None) -> AsyncIterator[None]:
    """Remove `folder`, if it is new, when the block refuses a submission (UserError). After other errors, and when the
    server ends in the block, the journal may have the submission, and its jobs read the images: they stay. None for a
    submission without a folder."""
    is_new = folder is not None and not await asyncio.to_thread(folder.exists)
    try:
        yield
    except UserError:
        if folder is not None and is_new:  # another submission under this id has the images otherwise
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise


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
    """`value` with every path below `root` replaced by one in `folder`; of a part of a request, only at `keys`."""
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
