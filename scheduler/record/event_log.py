"""All that a scheduler was told and what it said to it, as lines of text: enough to make the same decisions again.

The first line says how the core was set up (`Header`), each further one is an event with the commands that answered it
(`Entry`). Lines to values and back, exactly; knows no files and no time but the events' own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from modelpool.pool.core.errors import unusable_field
from modelpool.scheduler.record.plain_values import in_full, named, one_line, read, read_named
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.messages import Command, Event

#: of the lines below; grows when older readers would misunderstand them
FORMAT = 1
_WHAT = "event log"
_EVENTS = {kind.__name__: kind for kind in get_args(Event)}
_COMMANDS = {kind.__name__: kind for kind in get_args(Command)}


@dataclass(frozen=True, slots=True)
class Header:
    """How the core was set up, and by which version of modelpool."""

    config: SchedulerConfig
    version: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event and what was done about it. `line` is its place in the file, from 1."""

    line: int
    event: Event
    commands: tuple[Command, ...]


def header_line(header: Header) -> str:
    """The first line."""
    return one_line({"modelpool": _WHAT, "format": FORMAT, "version": header.version, "config": in_full(header.config)})


def entry_line(event: Event, commands: Sequence[Command]) -> str:
    """A further line."""
    return one_line({"event": named(event), "commands": [named(command) for command in commands]})


def read_header(line: str) -> Header:
    """What the first line says. Raises UserError when it is not one."""
    found = _object(line, "line 1")
    if found.get("modelpool") != _WHAT:
        raise unusable_field("line 1: modelpool", found.get("modelpool"), f"{_WHAT!r}, as in what a pool recorded")
    if found.get("format") != FORMAT:
        raise unusable_field("line 1: format", found.get("format"), f"{FORMAT}, which this version of modelpool reads")
    version = read(str, found.get("version", ""), "line 1: version")
    return Header(read(SchedulerConfig, found.get("config"), "line 1: config"), version)


class Entries:
    """The entries of a log, one by one; once. A last line that was cut off while it was written is left out."""

    def __init__(self, lines: Iterable[str]) -> None:
        """`lines` are those after the first, with their ends."""
        self._lines = lines
        #: the number of a last line that was left out; None while there is none, or it was not reached
        self.cut_off: int | None = None

    def __iter__(self) -> Iterator[Entry]:
        """Raises UserError, with the number of the line and the field, for what no recorder wrote."""
        for number, line in enumerate(self._lines, start=2):
            if not line.endswith("\n"):  # only the last one can be without: its writer was stopped in the middle
                self.cut_off = number
                return
            yield _entry(number, line)


def read_entries(lines: Iterable[str]) -> Entries:
    """The entries of the lines after the first."""
    return Entries(lines)


def _entry(number: int, line: str) -> Entry:
    place = f"line {number}"
    found = _object(line, place)
    commands = found.get("commands")
    if not isinstance(commands, list):
        raise unusable_field(f"{place}: commands", commands, "a list")
    event: Event = read_named(_EVENTS, found.get("event"), f"{place}: event")
    made = [read_named(_COMMANDS, c, f"{place}: commands[{index}]") for index, c in enumerate(commands)]
    return Entry(number, event, tuple(made))


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise unusable_field(place, line[:40], f"a JSON object ({error})") from None
    if not isinstance(found, dict):
        raise unusable_field(place, found, "a JSON object")
    return found
