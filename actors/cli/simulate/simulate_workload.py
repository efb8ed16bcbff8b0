"""Resolves the workload named on the command line: a trace file, or a built-in workload with parameters.

Knows files and words; `scheduler.simulator.workloads.trace_lines` reads traces,
`scheduler.simulator.workloads.built_in` draws built-in workloads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from modelpool.pool.values.core.errors import CorruptFile, OutputFailed, UserError, unknown_name

if TYPE_CHECKING:
    from modelpool.scheduler.simulator.workloads.workload import Workload

#: enough to identify a file
_FIRST_BYTES = 4096
_EXPECTED = "a trace file, or a built-in workload such as zipf:jobs=2000,models=12"


@dataclass(frozen=True, slots=True)
class NamedWorkload:
    """A workload to simulate. `make` returns the workload of a seed; without seeds, always the same one."""

    name: str
    has_seeds: bool
    make: Callable[[int], Workload]


def load_work(text: str) -> NamedWorkload:
    """Return the named workload; files take precedence over built-in ones. Raises UserError."""
    path = Path(text)
    if path.is_file():
        workload = read_trace(path)
        if not workload.jobs:
            raise CorruptFile(f"{path}: no jobs; expected at least one")
        return NamedWorkload(workload.name or path.name, has_seeds=False, make=lambda seed: workload)
    from modelpool.actors.cli.simulate.simulate_lab import LAB_WORKLOADS, lab_missing, workloads

    built_in = workloads()
    name, _, parameters = text.partition(":")
    if name not in built_in:
        if path.is_dir():
            raise UserError(f"{text} is a folder; expected {_EXPECTED}")
        if os.sep in text or path.suffix:
            raise UserError(f"{text}: no such file; expected {_EXPECTED}")
        if name in LAB_WORKLOADS:
            raise lab_missing("workload", name)
        raise unknown_name("workload", name, built_in)
    entry = built_in[name]
    passed = entry.parse(parameters)
    return NamedWorkload(text, has_seeds=True, make=lambda seed: entry.make(Random(seed), **passed))


def read_trace(path: Path) -> Workload:
    """Read the workload in a file. Raises CorruptFile naming the file, line and field."""
    from modelpool.scheduler.simulator.workloads.trace_lines import from_lines

    try:
        with path.open(encoding="utf-8") as file:
            return from_lines(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{path}: found {error.reason} at byte {error.start}, expected text in UTF-8") from None
    except UserError as error:
        raise CorruptFile(f"{path}: {error}") from None


def require_replaceable(field: str, path: Path) -> None:
    """Raise OutputFailed unless the path is free or holds an older trace."""
    if not path.exists():
        return
    if not path.is_file():
        raise OutputFailed(f"{field}: {path} is not a regular file; expected the name of a new file")
    try:
        with path.open("rb") as file:
            begin = file.read(_FIRST_BYTES)
    except OSError as error:
        raise OutputFailed(f"{field}: {path} cannot be written: {error.strerror}") from None
    if begin.strip() and b'"modelpool_trace"' not in begin.partition(b"\n")[0]:
        raise OutputFailed(f"{field}: {path} exists and is not a trace; it is not overwritten")


def save_trace(field: str, path: Path, workload: Workload) -> None:
    """Write a workload as a trace, atomically. Raises OutputFailed naming `field`."""
    from modelpool.scheduler.simulator.workloads.trace_lines import to_lines

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
