"""The event log: all events and commands of a scheduler as lines of text, enough to replay its decisions.

The first line holds the configuration of the core (`LogHeader`), each further line one event with the commands that
answered it (`LogEntry`), or counts events that the log lacks, because the disk was full (`LogGap`). Converts lines to
values and back without loss; reads no files, and no clock but the times of the events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from modelpool.pool.values.core.errors import unusable_field
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Command, Event
from modelpool.scheduler.simulator.record.plain_values import in_full, named, one_line, read, read_named

#: format of the lines below; grows when class or field names of messages change, so that other logs are refused
FORMAT = 2
_WHAT = "event log"
_EVENTS = {kind.__name__: kind for kind in get_args(Event)}
_COMMANDS = {kind.__name__: kind for kind in get_args(Command)}


@dataclass(frozen=True, slots=True)
class LogHeader:
    """The configuration of the core, and the version of modelpool."""

    config: SchedulerConfig
    version: str = ""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event and the commands that answered it. `line` is its place in the file, from 1."""

    line: int
    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class LogGap:
    """The place of events that the log lacks: the line from 1, how many they are, and why."""

    line: int
    lost: int
    reason: str


def header_line(header: LogHeader) -> str:
    """Return the first line."""
    return one_line({"modelpool": _WHAT, "format": FORMAT, "version": header.version, "config": in_full(header.config)})


def entry_line(event: Event, commands: Sequence[Command]) -> str:
    """Return a further line."""
    return one_line({"event": named(event), "commands": [named(command) for command in commands]})


def gap_line(lost: int, reason: str) -> str:
    """Return a further line in the place of `lost` events, which are not in the log."""
    return one_line({"lost": lost, "reason": reason})


def read_header(line: str) -> LogHeader:
    """Parse the first line. Raises UserError if it is not a header of this format."""
    found = _object(line, "line 1")
    if found.get("modelpool") != _WHAT:
        raise unusable_field(
            "line 1: modelpool", found.get("modelpool"), f"{_WHAT!r}, the first line of a recorded event log"
        )
    if found.get("format") != FORMAT:
        raise unusable_field(
            "line 1: format",
            found.get("format"),
            f"{FORMAT}: this version of modelpool cannot replay logs of other formats",
        )
    version = read(str, found.get("version", ""), "line 1: version")
    return LogHeader(read(SchedulerConfig, found.get("config"), "line 1: config"), version)


class LogEntries:
    """The entries of a log; iterable once. A last line that was cut off during writing is left out."""

    def __init__(self, lines: Iterable[str]) -> None:
        """`lines` are those after the first, with their line ends."""
        self._lines = lines
        #: the number of a last line that was left out; None if there is none, or before it is reached
        self.cut_off: int | None = None
        #: the first gap that was reached
        self.gap: LogGap | None = None
        #: events in all gaps that were reached
        self.lost = 0

    def __iter__(self) -> Iterator[LogEntry]:
        """Raises UserError, with the number of the line and the field, for lines that no recorder wrote."""
        return self._read(ends_at_gap=False)

    def up_to_gap(self) -> Iterator[LogEntry]:
        """The entries before the first gap: what can be replayed. Raises as iteration does."""
        return self._read(ends_at_gap=True)

    def _read(self, ends_at_gap: bool) -> Iterator[LogEntry]:
        for number, line in enumerate(self._lines, start=2):
            if not line.endswith("\n"):  # only the last one can lack it: its writer was stopped in the middle
                self.cut_off = number
                return
            read_line = _entry_or_gap(number, line)
            if isinstance(read_line, LogEntry):
                yield read_line
                continue
            self.gap = self.gap or read_line
            self.lost += read_line.lost
            if ends_at_gap:
                return


def read_entries(lines: Iterable[str]) -> LogEntries:
    """The entries of the lines after the first."""
    return LogEntries(lines)


def _entry_or_gap(number: int, line: str) -> LogEntry | LogGap:
    place = f"line {number}"
    found = _object(line, place)
    if "lost" in found:
        lost = read(int, found["lost"], f"{place}: lost")
        return LogGap(number, lost, read(str, found.get("reason", ""), f"{place}: reason"))
    commands = found.get("commands")
    if not isinstance(commands, list):
        raise unusable_field(f"{place}: commands", commands, "a list")
    event: Event = read_named(_EVENTS, found.get("event"), f"{place}: event")
    parsed = [read_named(_COMMANDS, c, f"{place}: commands[{index}]") for index, c in enumerate(commands)]
    return LogEntry(number, event, tuple(parsed))


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise unusable_field(place, line[:40], f"a JSON object ({error})") from None
    if not isinstance(found, dict):
        raise unusable_field(place, found, "a JSON object")
    return found
