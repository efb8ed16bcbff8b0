"""`Measurement`, the file that they are appended to while they are made, and the table of them.

Each measurement is on the disk as soon as it is made: a part that crashes or hangs keeps what it has measured.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

#: characters of an error in the table
ERROR_LENGTH = 300
#: begins the note of what was left out
SKIPPED = "skipped: "


class OutOfTime(Exception):
    """The time of the part is over: the rest of it is left out."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the table.

    part      the part of the run that made it
    name      what was measured
    value     the figure; None if there is none: it failed, was skipped, or is a note
    unit      its unit
    baseline  the figure that it is compared with, in the same unit
    goal      the condition that it should meet, in words
    is_met    whether it does; None if there is no condition
    note      details, the reason of a failure or of a skip
    """

    part: str
    name: str
    value: float | None = None
    unit: str = ""
    baseline: float | None = None
    goal: str = ""
    is_met: bool | None = None
    note: str = ""


class Record:
    """Measurements of one part, appended to a file, until its end."""

    def __init__(self, path: Path, part: str, ends_at: float) -> None:
        """`ends_at` is a time of the system's monotonic clock, which all processes share: what starting this one took
        is in the part's time."""
        self._path, self._part = path, part
        self._ends_at = ends_at

    @classmethod
    def of_seconds(cls, path: Path, part: str, seconds: float) -> Record:
        """Return a record that ends `seconds` from now."""
        return cls(path, part, time.monotonic() + seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds until the part is over."""
        return self._ends_at - time.monotonic()

    def add(
        self,
        name: str,
        value: float | None = None,
        unit: str = "",
        baseline: float | None = None,
        goal: str = "",
        is_met: bool | None = None,
        note: str = "",
    ) -> None:
        """Append a measurement to the file."""
        row = Measurement(self._part, name, value, unit, baseline, goal, is_met, note)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def skip(self, name: str, why: str) -> None:
        """Record that something was left out."""
        self.add(name, note=f"{SKIPPED}{why}")

    @contextmanager
    def attempting(self, name: str, least_seconds: float = 0.0) -> Iterator[None]:
        """Record an error of the block as a failed measurement `name` and continue.

        Raises OutOfTime before the block unless `least_seconds` are left, and the errors after which a CUDA context
        is of no more use.
        """
        if self.seconds_left <= least_seconds:
            self.skip(name, "out of time")
            raise OutOfTime(name)
        try:
            yield
        except OutOfTime:
            raise
        except Exception as error:
            traceback.print_exc()
            self.add(name, is_met=False, note=f"{type(error).__name__}: {error}"[:ERROR_LENGTH])
            if is_context_lost(error):
                raise


def is_context_lost(error: Exception) -> bool:
    """Whether nothing can run on the device in this process after `error`."""
    text = str(error)
    return any(sign in text for sign in ("illegal memory access", "device-side assert", "unspecified launch failure"))


def read_measurements(path: Path) -> list[Measurement]:
    """Return the measurements in a file; a last line that is cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(Measurement(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return rows


def table_of(rows: Sequence[Measurement], title: str) -> str:
    """Return a Markdown page with the rows, by part."""
    lines = [f"# {title}", ""]
    for part in dict.fromkeys(row.part for row in rows):
        lines += [f"## {part}", "", "| measurement | figure | baseline | goal | met | note |", "|--|--|--|--|--|--|"]
        lines += [_line(row) for row in rows if row.part == part]
        lines.append("")
    failed = [f"{row.part}: {row.name}" for row in rows if row.is_met is False]
    skipped = [f"{row.part}: {row.name} ({row.note})" for row in rows if row.note.startswith(SKIPPED)]
    lines += [
        f"Not met or failed: {'; '.join(failed) or 'nothing'}.",
        "",
        f"Skipped: {'; '.join(skipped) or 'nothing'}.",
    ]
    return "\n".join(lines) + "\n"


def _line(row: Measurement) -> str:
    met = {True: "yes", False: "NO", None: ""}[row.is_met]
    cells = (row.name, _figure(row.value, row.unit), _figure(row.baseline, row.unit), row.goal, met, row.note)
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.4g} {unit}".rstrip()
