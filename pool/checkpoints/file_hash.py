"""The SHA-256 of a file of weights, remembered between runs. Torch-free.

Knows a small JSON file in the user's cache folder. A record counts only while the file's size and both of its times are
unchanged: the modification time alone is kept by tools that copy or unpack, the change time is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, TypeAlias

from pool.checkpoints.files.regular_file import open_regular
from pool.checkpoints.files.weights_file import files_of
from pool.errors import CorruptFile

_Records: TypeAlias = dict[str, dict[str, Any]]

CACHE_FILE = "hashes.json"
#: records kept; the oldest go first
MAX_RECORDS = 4096
#: a file that changed so recently may change again without its times showing it: file systems count in ticks
SETTLED_NANOSECONDS = 2_000_000_000


def default_cache_folder() -> Path:
    """`modelpool` in the user's cache folder: $XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "modelpool"


def file_sha256(path: str | os.PathLike[str], cache_folder: Path | None = None) -> str:
    """The SHA-256 of the whole file at `path`, in hexadecimal.

    Reads the file unless `cache_folder` (the user's cache folder when None) remembers it unchanged. A cache that is
    damaged is ignored; one that cannot be written is done without.
    Raises CorruptFile when the file cannot be read.
    """
    place = os.path.realpath(path)
    cache = (cache_folder if cache_folder is not None else default_cache_folder()) / CACHE_FILE
    try:
        before = _fingerprint(place)
        known = _read(cache).get(place)
        if known is not None and known.get("fingerprint") == before and _is_digest(known.get("sha256")):
            return str(known["sha256"])
        with open_regular(place, "a file of weights") as (file, _):
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        settled = _fingerprint(place) == before and time.time_ns() - before[-1] > SETTLED_NANOSECONDS
    except OSError as error:
        raise CorruptFile(f"{os.fspath(path)}: cannot be read: {error.strerror or error}") from error
    if settled:
        _remember(cache, place, {"fingerprint": before, "sha256": digest})
    return digest


def weights_sha256(path: str | os.PathLike[str], cache_folder: Path | None = None) -> str:
    """What tells the weights at `path` from others: the SHA-256 of a file; of an index, that of its shards' names and
    SHA-256s. The index itself says too little: models that were trained from one another have equal ones.

    Raises CorruptFile and UnsafeFile as reading an index does, and when a file cannot be read.
    """
    index, *shards = files_of(path)
    if not shards:
        return file_sha256(index, cache_folder)
    lines = [f"{os.path.basename(shard)} {file_sha256(shard, cache_folder)}\n" for shard in shards]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _fingerprint(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value)


def _read(cache: Path) -> _Records:
    """The records of `cache`; none when it is missing, unreadable or damaged."""
    try:
        records = json.loads(cache.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(records, dict):
        return {}
    return {key: record for key, record in records.items() if isinstance(record, dict)}


def _remember(cache: Path, path: str, record: dict[str, Any]) -> None:
    """Add `record` to `cache`, which readers see either before or after, never half written.

    Two processes that write at once may lose one record, which costs one more reading of a file.
    """
    records = _read(cache)
    records.pop(path, None)
    records[path] = record
    kept = dict(list(records.items())[-MAX_RECORDS:])
    temporary = None
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, prefix=".hashes-", delete=False) as file:
            temporary = Path(file.name)
            json.dump(kept, file)
        temporary.replace(cache)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
