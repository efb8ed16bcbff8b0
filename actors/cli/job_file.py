"""Reads job files: one `GenerateRequest` per row; `actors/job_files` reads the rows.

Knows fields, not which models exist. Rules
1. An invalid line is reported by number and does not affect the others.
2. A line without a seed gets one derived from its content and from how often the same content occurred before, so that
   the same file always means the same images, and a stopped batch can resume.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.actors.job_files.rows import read_rows
from modelpool.actors.request.field_table import LATER_FIELDS
from modelpool.actors.request.qos import QOS_FIELDS
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.errors import UserError

#: longest message about a line; it quotes the value that it refuses
MAX_MESSAGE = 500


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

    path: str | Path
    lines: tuple[JobLine, ...]
    broken: tuple[BrokenLine, ...]


def read_job_file(path: str | Path, defaults: Mapping[str, Any], seed: int = 0) -> JobFile:
    """Read the requests of a job file, at an address of `read_rows`. `defaults` fill in missing
    fields; `seed` varies the seeds of lines without one.

    Raises UserError if the whole file is unusable: missing, empty, of another kind, or with an unknown column.
    """
    lines: list[JobLine] = []
    broken: list[BrokenLine] = []
    occurrences: Counter[str] = Counter()
    for number, found in read_rows(path):
        if isinstance(found, str):
            broken.append(BrokenLine(number, _shortened(found)))
            continue
        try:
            request = GenerateRequest(**{**defaults, **found})
        except UserError as error:
            hint = "" if "model" in {**defaults, **found} else "; --model NAME is for all lines without one"
            broken.append(BrokenLine(number, _shortened(f"{error}{hint}")))
            continue
        lines.append(JobLine(number, _seeded(request, seed, occurrences)))
    if not lines and not broken:
        raise UserError(f"{path}: no lines; expected one request per line")
    return JobFile(path, tuple(lines), tuple(broken))


def _shortened(message: str) -> str:
    """Return `message` without most of a very long value in it."""
    if len(message) <= MAX_MESSAGE:
        return message
    half = MAX_MESSAGE // 2 - 3
    return f"{message[:half]} ... {message[-half:]}"


def _seeded(request: GenerateRequest, seed: int, occurrences: Counter[str]) -> GenerateRequest:
    if request.seed is not None:
        return request
    # if they are not used, seeds stay what they were
    unset = {name for name in LATER_FIELDS if getattr(request, name) == GenerateRequest.model_fields[name].default}
    content = json.dumps(request.model_dump(exclude={"seed", *QOS_FIELDS, *unset}))
    digest = hashlib.sha256(f"{seed} {occurrences[content]} {content}".encode()).digest()
    occurrences[content] += 1
    return request.model_copy(update={"seed": int.from_bytes(digest[:4])})
