"""The manifest of an output folder: `manifest.jsonl`, one JSON object per line, append-only.

Knows lines and bytes; not what an image is. Rules
1. A line counts if it ends in a newline and is a JSON object. Each is written in one piece and synced.
2. A run that is killed while writing leaves at most one torn line, the last. `repair` removes it; readers skip it.
3. A complete line that is not a JSON object is damage: readers get its problem, and the others count.
4. Writers hold the folder's lock (`OutputFolder` takes it), so two runs may share a folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from modelpool.actors.request.json_text import MAX_BYTES, NotJson, parse_json

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A complete line of a manifest.

    at_byte  where it begins in the file
    fields   None if it is not a JSON object; `problem` says what was found and what was expected
    """

    at_byte: int
    fields: dict[str, Any] | None
    problem: str = ""


class ReplacedMeanwhile(OSError):
    """The file is not the one that was read before: lines begin elsewhere in it."""


class Manifest:
    """An append-only file of JSON objects, read as it grows. Every method raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: bytes at the start of the file that `read_new` has returned, and which file that was
        self._read_bytes = 0
        self._read_file: tuple[int, int] | None = None

    def is_replaced(self) -> bool:
        """Return whether the file is not the one that was read before, or has lost some of its content. Then the next
        `read_new` starts at the beginning.
        """
        if self._read_file is None:
            return False
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            replaced = True
        else:
            replaced = (found.st_dev, found.st_ino) != self._read_file or found.st_size < self._read_bytes
        if replaced:
            self.begin_again()
        return replaced

    def read_new(self) -> Iterator[Line]:
        """Yield the entries that were appended since the last call, by any process; at first, all of them.

        A torn last line is left for the next call, which finds it complete or removed.
        """
        with self._opened("rb") as file:
            found = os.fstat(file.fileno())
            self._read_file = (found.st_dev, found.st_ino)
            file.seek(self._read_bytes)
            while line := file.readline(MAX_BYTES + 1):
                line_bytes = len(line)
                while not line.endswith(b"\n") and (rest := file.readline(MAX_BYTES)):
                    line, line_bytes = rest, line_bytes + len(rest)
                if not line.endswith(b"\n"):
                    break
                at_byte, self._read_bytes = self._read_bytes, self._read_bytes + line_bytes
                yield _parsed(line, line_bytes, at_byte)

    def read_at(self, begins: Iterable[int]) -> Iterator[Line]:
        """Yield the lines that begin there, which `read_new` has returned before. Raises ReplacedMeanwhile."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self._read_file or found.st_size < self._read_bytes:
                    raise ReplacedMeanwhile(f"{self.path}: another file than before")
                for begin in begins:
                    file.seek(begin)
                    line = file.readline(MAX_BYTES + 1)
                    yield _parsed(line, len(line), begin)
        except FileNotFoundError as error:
            raise ReplacedMeanwhile(f"{self.path}: removed") from error

    def begin_again(self) -> None:
        """Have the next `read_new` start at the beginning."""
        self._read_bytes, self._read_file = 0, None

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
        if "r" in mode and not self.path.exists():
            self.path.touch()
        return self.path.open(mode)


def _parsed(line: bytes, line_bytes: int, at_byte: int) -> Line:
    """Parse a line; `line` is only its end if it is longer than any of ours."""
    if line_bytes > MAX_BYTES:
        return Line(at_byte, None, f"found a line of {line_bytes} bytes, expected up to {MAX_BYTES}")
    try:
        fields = parse_json(line)
    except NotJson as problem:
        return Line(at_byte, None, str(problem))
    if not isinstance(fields, dict):
        return Line(at_byte, None, f"found {type(fields).__name__}, expected a JSON object")
    return Line(at_byte, fields)


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
