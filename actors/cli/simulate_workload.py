"""The work to simulate, as it is named on the command line: a trace file, or a built-in workload with parameters.

Knows files and words; what a trace says is read by `scheduler.workloads.trace_lines`, built-in work is drawn by
`scheduler.workloads.built_in`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from modelpool.pool.core.errors import CorruptFile, OutputFailed, UserError, unknown_name

if TYPE_CHECKING:
    from modelpool.scheduler.workloads.workload import Workload

#: enough to see what a file is
_FIRST_BYTES = 4096
_EXPECTED = "a trace file, or a built-in workload such as zipf:jobs=2000,models=12"


@dataclass(frozen=True, slots=True)
class Work:
    """What to simulate. `make` gives the workload of a seed; where there are none, the same every time."""

    name: str
    has_seeds: bool
    make: Callable[[int], Workload]


def load_work(text: str) -> Work:
    """The work of that name; a file goes before a built-in one. Raises UserError."""
    path = Path(text)
    if path.is_file():
        workload = read_trace(path)
        if not workload.jobs:
            raise CorruptFile(f"{path}: found no jobs, expected at least one")
        return Work(workload.name or path.name, has_seeds=False, make=lambda seed: workload)
    from modelpool.actors.cli.simulate_lab import LAB_WORKLOADS, lab_missing, workloads

    built_in = workloads()
    name, _, parameters = text.partition(":")
    if name not in built_in:
        if path.is_dir():
            raise UserError(f"{text}: is a folder; expected {_EXPECTED}")
        if os.sep in text or path.suffix:
            raise UserError(f"{text}: no such file; expected {_EXPECTED}")
        if name in LAB_WORKLOADS:
            raise lab_missing("workload", name)
        raise unknown_name("workload", name, built_in)
    entry = built_in[name]
    given = entry.parse(parameters)
    return Work(text, has_seeds=True, make=lambda seed: entry.make(Random(seed), **given))


def read_trace(path: Path) -> Workload:
    """The workload in a file. Raises CorruptFile, whose message names the file, and the line and field in it."""
    from modelpool.scheduler.workloads.trace_lines import from_lines

    try:
        with path.open(encoding="utf-8") as file:
            return from_lines(file)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{path}: found {error.reason} at byte {error.start}, expected text in UTF-8") from None
    except UserError as error:
        raise CorruptFile(f"{path}: {error}") from None


def require_replaceable(field: str, path: Path) -> None:
    """Raise OutputFailed unless a trace may be written there: where there is nothing, or an older trace."""
    if not path.exists():
        return
    if not path.is_file():
        raise OutputFailed(f"{field}: {path} is no plain file; expected a name for a new file")
    try:
        with path.open("rb") as file:
            begin = file.read(_FIRST_BYTES)
    except OSError as error:
        raise OutputFailed(f"{field}: {path} cannot be written: {error.strerror}") from None
    if begin.strip() and b'"modelpool_trace"' not in begin.partition(b"\n")[0]:
        raise OutputFailed(f"{field}: {path} is there and is no trace, so it is not written over")


def save_trace(field: str, path: Path, workload: Workload) -> None:
    """Write a workload as a trace: whole or not at all. Raises OutputFailed, naming `field`."""
    from modelpool.scheduler.workloads.trace_lines import to_lines

    require_replaceable(field, path)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(line.rstrip("\n") + "\n" for line in to_lines(workload))
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise OutputFailed(f"{field}: {path} cannot be written: {error.strerror}") from None
