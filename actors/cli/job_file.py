"""Reads job files: one `GenerateRequest` per line, as JSON lines or as CSV with a header of field names.

Knows text and field names, not which models exist. Rules
1. An invalid line is reported by number and does not affect the others.
2. A line without a seed gets one derived from its content and from how often the same content occurred before, so that
   the same file always means the same images, and a stopped batch can resume.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.actors.request.field_table import LATER_FIELDS
from modelpool.actors.request.json_text import NotJson, parse_json
from modelpool.actors.request.qos import QOS_FIELDS
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.errors import UserError, unknown_name, unusable_field

#: longest message about a line; it quotes the value that it refuses
MAX_MESSAGE = 500
#: largest file whose lines are counted before they are read, which takes about a second
MAX_COUNTED_BYTES = 1 << 30
#: between the LoRAs, ControlNets, regions or references of a CSV cell: "light:0.8; outline:1"
LORA_SEPARATOR = ";"


@dataclass(frozen=True, slots=True)
class JobLine:
    """A valid line. `request.seed` is set."""

    number: int
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """An invalid line, with the reason."""

    number: int
    message: str


@dataclass(frozen=True, slots=True)
class JobFile:
    """The lines of a file, in order."""

    path: Path
    lines: tuple[JobLine, ...]
    broken: tuple[BrokenLine, ...]


def read_job_file(path: Path, defaults: Mapping[str, Any], seed: int = 0) -> JobFile:
    """Read all requests of a file; see `job_lines`."""
    lines: list[JobLine] = []
    broken: list[BrokenLine] = []
    for line in job_lines(path, defaults, seed):
        if isinstance(line, JobLine):
            lines.append(line)
        else:
            broken.append(line)
    return JobFile(path, tuple(lines), tuple(broken))


def job_lines(path: Path, defaults: Mapping[str, Any], seed: int = 0) -> Iterator[JobLine | BrokenLine]:
    """Yield the requests of a .jsonl or .csv file, as they are read. `defaults` fill in missing fields; `seed` varies
    the seeds of lines without one.

    Raises UserError if the whole file is unusable: missing, empty, of another kind, or with an unknown column.
    """
    occurrences: Counter[bytes] = Counter()
    number = 0
    for number, found in _rows(path):
        if isinstance(found, str):
            yield BrokenLine(number, _shortened(found))
            continue
        try:
            request = GenerateRequest(**{**defaults, **found})
        except UserError as error:
            hint = "" if "model" in {**defaults, **found} else "; --model NAME is for all lines without one"
            yield BrokenLine(number, _shortened(f"{error}{hint}"))
            continue
        yield JobLine(number, _seeded(request, seed, occurrences))
    if not number:
        raise UserError(f"{path}: no lines; expected one request per line")


def line_count(path: Path) -> int | None:
    """Return about how many requests a file has, for the display of progress; None if counting would take long."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size <= MAX_COUNTED_BYTES:
            with path.open("rb") as file:
                count = sum(1 for line in file if line.strip())
            return count - 1 if path.suffix.lower() == ".csv" else count
    return None


def _shortened(message: str) -> str:
    """Return `message` without most of a very long value in it."""
    if len(message) <= MAX_MESSAGE:
        return message
    half = MAX_MESSAGE // 2 - 3
    return f"{message[:half]} ... {message[-half:]}"


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield each line's number with its fields, or with its problem."""
    readers = {".jsonl": _json_rows, ".ndjson": _json_rows, ".csv": _csv_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise unusable_field("job file", str(path), f"a name that ends in {', '.join(readers)}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    return reader(path, content.removeprefix(b"\xef\xbb\xbf"))


def _json_rows(_path: Path, content: bytes) -> Iterator[tuple[int, dict[str, Any] | str]]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, _json_row(line)


def _json_row(line: bytes) -> dict[str, Any] | str:
    try:
        fields = parse_json(line)
    except NotJson as error:
        return str(error)
    if not isinstance(fields, dict):
        return f"found {type(fields).__name__}, expected an object such as " + '{"model": "shapes", "prompt": "..."}'
    return fields


def _csv_rows(path: Path, content: bytes) -> Iterator[tuple[int, dict[str, Any] | str]]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names: list[str] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not names:
                names = _header(path, cells)
            elif len(cells) > len(names):
                yield reader.line_num, f"found {len(cells)} cells, expected at most the {len(names)} of the header"
            else:
                yield reader.line_num, _csv_row(names, cells)
    except csv.Error as error:
        yield reader.line_num, f"not CSV: {error}; later lines are not read"


def _header(path: Path, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    for name in names:
        if name not in GenerateRequest.model_fields:
            raise UserError(f"{path}: header: {unknown_name('column', name, GenerateRequest.model_fields)}")
        if names.count(name) > 1:
            raise UserError(f"{path}: header: column {name!r} occurs twice")
    return names


def _csv_row(names: list[str], cells: list[str]) -> dict[str, Any]:
    """Return the fields of one row; an empty cell is a field that is not set."""
    fields: dict[str, Any] = {name: cell for name, cell in zip(names, cells, strict=False) if cell.strip()}
    for several in ("loras", "controls", "regions", "reference"):
        if several in fields:
            fields[several] = [part.strip() for part in fields[several].split(LORA_SEPARATOR) if part.strip()]
    return fields


def _seeded(request: GenerateRequest, seed: int, occurrences: Counter[bytes]) -> GenerateRequest:
    if request.seed is not None:
        return request
    # if they are not used, seeds stay what they were
    unset = {name for name in LATER_FIELDS if getattr(request, name) == GenerateRequest.model_fields[name].default}
    content = json.dumps(request.model_dump(exclude={"seed", *QOS_FIELDS, *unset}))
    key = hashlib.sha256(content.encode()).digest()  # a batch may have millions of long prompts
    digest = hashlib.sha256(f"{seed} {occurrences[key]} {content}".encode()).digest()
    occurrences[key] += 1
    return request.model_copy(update={"seed": int.from_bytes(digest[:4])})
