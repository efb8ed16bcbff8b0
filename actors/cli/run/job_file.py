"""Reads job files: one `GenerateRequest` per row; `actors/request/job_files` reads the rows.

Knows fields, not which models exist. Rules
1. An invalid line is reported by number and does not affect the others.
2. A line without a seed gets one derived from its content and from how often the same content occurred before, so that
   the same file always means the same images, and a stopped batch can resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.actors.request.field_table import LATER_FIELDS
from modelpool.actors.request.job_files.columns import NO_CHOICE, ColumnChoice
from modelpool.actors.request.job_files.rows import read_rows
from modelpool.actors.request.labels import LABEL_FIELDS
from modelpool.actors.request.qos import QOS_FIELDS
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError

#: longest message about a line; it quotes the value that it refuses
MAX_MESSAGE = 500
#: options that nodes of workflows have had since seeds are made so
_LATER_OPTIONS = (
    *("fresca", "apg", "tcfg", "epsilon_scaling", "perp_neg", "deep_shrink", "cfg_override", "sound"),
    *("kv_cache", "windows"),
)
#: fields of nodes that came later, of which the default is nothing
_LATER_OF_NODES = frozenset(
    (
        *("video_stops", "guides", "camera", "track", "gligen", "pooled", "prompt_without_image", "nested"),
        *("voice_scale", "tracks"),
    )
)
#: the same of guides of nodes
_LATER_OF_GUIDES = frozenset(("appended", "lora"))
#: largest file with lines that are counted before they are read, which takes about a second
MAX_COUNTED_BYTES = 1 << 30
#: files with a row in each line
_COUNTED = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")


@dataclass(frozen=True, slots=True)
class JobLine:
    """A valid line. `request.seed` is set."""

    number: int
    request: GenerateRequest

    @property
    def labelled(self) -> GenerateRequest:
        """The request with the number of its line, unless it has one."""
        if self.request.line is not None:
            return self.request
        return self.request.model_copy(update={"line": self.number})


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """An invalid line, with the reason."""

    number: int
    message: str


@dataclass(frozen=True, slots=True)
class JobFile:
    """The lines of a file, in order."""

    path: str | Path
    lines: tuple[JobLine, ...]
    broken: tuple[BrokenLine, ...]


def read_job_file(path: str | Path, defaults: Mapping[str, Any], seed: int = 0) -> JobFile:
    """Read all requests of a file; see `job_lines`."""
    lines: list[JobLine] = []
    broken: list[BrokenLine] = []
    for line in job_lines(path, defaults, seed):
        if isinstance(line, JobLine):
            lines.append(line)
        else:
            broken.append(line)
    return JobFile(path, tuple(lines), tuple(broken))


def job_lines(
    path: str | Path, defaults: Mapping[str, Any], seed: int = 0, choice: ColumnChoice = NO_CHOICE
) -> Iterator[JobLine | BrokenLine]:
    """Yield the requests of a job file at an address of `read_rows`, as they are read. `defaults` fill in missing
    fields; `seed` varies the seeds of lines without one; `choice` says which fields columns are.

    Raises UserError if the whole file is unusable: missing, empty, of another kind, or with an unknown column.
    """
    occurrences: Counter[bytes] = Counter()
    number = 0
    for number, found in read_rows(path, choice):
        if isinstance(found, str):
            yield BrokenLine(number, _shortened(found))
            continue
        # null is no value: the default of the command, else of the request, fills it in
        set_here = {name: value for name, value in found.items() if value is not None or name not in defaults}
        given = {**defaults, **set_here}
        try:
            request = GenerateRequest(**given)
        except UserError as error:
            has_model = any(given.get(name) is not None for name in ("model", "workflow"))
            hint = "" if has_model else "; --model NAME is for all lines without one"
            yield BrokenLine(number, _shortened(f"{error}{hint}"))
            continue
        for one in _seeded(request, seed, occurrences).expanded():
            yield JobLine(number, one)
    if not number:
        raise UserError(f"{path}: no lines; expected one request per line")


def line_count(address: str | Path) -> int | None:
    """Return about how many requests a file has, for the display of progress; None if counting would take long."""
    path = Path(address)
    if path.suffix.lower() not in _COUNTED:
        return None
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size <= MAX_COUNTED_BYTES:
            with path.open("rb") as file:
                count = sum(1 for line in file if line.strip())
            return count - 1 if path.suffix.lower() in (".csv", ".tsv") else count
    return None


def _shortened(message: str) -> str:
    """Return `message` without most of a very long value in it."""
    if len(message) <= MAX_MESSAGE:
        return message
    half = MAX_MESSAGE // 2 - 3
    return f"{message[:half]} ... {message[-half:]}"


def _without_later(value: Any) -> Any:
    """Return fields without the options of a workflow's nodes that came later, where they are not set: so seeds stay
    what they were."""
    if isinstance(value, dict):
        found = {name: _without_later(part) for name, part in value.items()}
        if "kind" in found:
            found = {name: part for name, part in found.items() if part or name not in _LATER_OF_NODES}
        if "frame" in found:
            found = {name: part for name, part in found.items() if part or name not in _LATER_OF_GUIDES}
        if isinstance(options := found.get("options"), dict):
            found["options"] = {name: part for name, part in options.items() if name not in _LATER_OPTIONS or part}
        return found
    return [_without_later(part) for part in value] if isinstance(value, list | tuple) else value


def _seeded(request: GenerateRequest, seed: int, occurrences: Counter[bytes]) -> GenerateRequest:
    if request.seed is not None:
        return request
    # if they are not used, seeds stay what they were
    unset = {name for name in LATER_FIELDS if getattr(request, name) == GenerateRequest.model_fields[name].default}
    unset |= {"batch", "gpus"}  # how an image is computed is not what it shows
    fields = request.model_dump(exclude={"seed", *QOS_FIELDS, *LABEL_FIELDS, *unset})
    parts = {"hires": request.hires, "options": request.options}
    fields = {name: _without_later(value) for name, value in fields.items()}
    content = json.dumps(fields | {name: part.recorded() for name, part in parts.items() if part is not None})
    key = hashlib.sha256(content.encode()).digest()  # a batch may have millions of long prompts
    digest = hashlib.sha256(f"{seed} {occurrences[key]} {content}".encode()).digest()
    occurrences[key] += 1
    return request.model_copy(update={"seed": int.from_bytes(digest[:4])})
