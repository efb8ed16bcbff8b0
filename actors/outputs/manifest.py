"""The manifest of an output folder: `manifest.jsonl`, one JSON object per line, append-only.

Knows lines and bytes; not what an image is. Rules
1. A line counts if it ends in a newline and is a JSON object. Each is written in one piece and synced.
2. A run that is killed while writing leaves at most one torn line, the last. `repair` removes it; readers skip it.
3. Writers hold the folder's lock (`OutputFolder` takes it), so two runs may share a folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from modelpool.pool.core.errors import OutputFailed

Entry = Mapping[str, Any]


class Manifest:
    """An append-only file of JSON objects, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: bytes at the start of the file that `read_new` has returned
        self._read_bytes = 0

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the entries that were appended since the last call, by any process; at first, all of them.

        A torn last line is left for the next call, which finds it complete or removed. Raises OutputFailed for a
        complete line that is not a JSON object: the file was edited, or is something else.
        """
        with self._opened("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                yield self._parsed(line)
                self._read_bytes += len(line)

    def repair(self) -> bool:
        """Remove a torn last line; return whether there was one. Requires the lock."""
        with self._opened("rb+") as file:
            content_bytes = file.seek(0, os.SEEK_END)
            whole_bytes = _end_of_last_line(file, content_bytes)
            if whole_bytes == content_bytes:
                return False
            file.truncate(whole_bytes)
            os.fsync(file.fileno())
            return True

    def append(self, entry: Entry) -> None:
        """Append one line and wait until it is on disk. Requires the lock, and a `repair` before."""
        line = json.dumps(entry, ensure_ascii=True, allow_nan=False) + "\n"
        with self._opened("ab") as file:
            file.write(line.encode("ascii"))
            file.flush()
            os.fsync(file.fileno())

    def _opened(self, mode: str) -> IO[bytes]:
        try:
            if "r" in mode and not self.path.exists():
                self.path.touch()
            return self.path.open(mode)
        except OSError as error:
            raise OutputFailed(f"{self.path}: cannot be opened ({error.strerror or error})") from error

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise OutputFailed(f"{self.path}: byte {self._read_bytes}: not a line of JSON ({error})") from error
        if not isinstance(entry, dict):
            raise OutputFailed(f"{self.path}: byte {self._read_bytes}: found {line[:40]!r}, expected a JSON object")
        return entry


def _end_of_last_line(file: IO[bytes], content_bytes: int) -> int:
    """Return the end of the last newline, searching backwards in blocks; 0 if there is none."""
    block_bytes, end = 4096, content_bytes
    while end > 0:
        start = max(0, end - block_bytes)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
