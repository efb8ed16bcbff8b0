"""Replays an event log: a new core handles the same events, and must answer with the same commands.

The core has no clock and no randomness, so equal events give equal commands. Otherwise the first difference is
reported, field by field, with the story before it. Reads no files.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.messages import Command
from modelpool.scheduler.model.story import describe
from modelpool.scheduler.model.story_lines import StoryLine
from modelpool.scheduler.simulator.record.event_log import LogEntry, LogHeader

#: story lines before the difference
STORY_LINES = 12


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """The first command that differs from the recorded one.

    line      of the log
    cause     the event, in a few words
    recorded, made  the commands; None if there are no more
    fields    differing fields, one per line: name, recorded value, replayed value
    story     the last story lines of the subjects of the commands, up to this event
    """

    line: int
    cause: str
    recorded: Command | None
    made: Command | None
    fields: tuple[str, ...]
    story: tuple[StoryLine, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """An event that raised in the core."""

    line: int
    cause: str
    traceback_text: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay. `seconds` is the time from the first to the last replayed event.

    failure  set if the core, or with `check` an invariant, failed: a bug
    """

    events: int
    commands: int
    seconds: float
    difference: ReplayDifference | None = None
    failure: Failure | None = None

    @property
    def same(self) -> bool:
        """Whether every command equals the recorded one."""
        return self.difference is None and self.failure is None


def replay(header: LogHeader, entries: Iterable[LogEntry], check: bool = False) -> Replayed:
    """Replay up to the first difference. `check` validates every invariant after each event.

    Raises UserError for lines that `entries` cannot read.
    """
    state = SchedulerState(header.config)
    events = commands = 0
    first_at: float | None = None
    for entry in entries:
        first_at = entry.event.at if first_at is None else first_at
        events += 1
        try:
            made = state.handle(entry.event)
            if check:
                validate(state)
        except Exception:  # any failure of the core is a bug that a replay should find
            failure = Failure(entry.line, describe(entry.event), traceback.format_exc())
            return Replayed(events, commands, entry.event.at - first_at, failure=failure)
        commands += len(made)
        for recorded, now in zip_longest(entry.commands, made):
            if recorded != now:
                difference = _difference(state, entry, recorded, now)
                return Replayed(events, commands, entry.event.at - first_at, difference)
    return Replayed(events, commands, 0.0 if first_at is None else state.at - first_at)


def _difference(
    state: SchedulerState, entry: LogEntry, recorded: Command | None, made: Command | None
) -> ReplayDifference:
    about = {name for command in (recorded, made) for name in _subjects(command)}
    return ReplayDifference(
        line=entry.line,
        cause=describe(entry.event),
        recorded=recorded,
        made=made,
        fields=tuple(_differing("", recorded, made)),
        story=state.log.lines(about)[-STORY_LINES:],
    )


def _subjects(command: Command | None) -> Iterator[str]:
    """The ids in a command that the story knows."""
    for field in ("task_id", "job_id", "worker_id"):
        name = getattr(command, field, None)
        if isinstance(name, str):
            yield name


def _differing(name: str, recorded: object, made: object) -> Iterator[str]:
    if type(recorded) is type(made) and dataclasses.is_dataclass(recorded):
        for field in dataclasses.fields(recorded):
            inner = f"{name}.{field.name}" if name else field.name
            yield from _differing(inner, getattr(recorded, field.name), getattr(made, field.name))
    elif recorded != made:
        yield f"{name or 'command'}: {_words(recorded)} recorded, {_words(made)} replayed"


def _words(value: object) -> str:
    if value is None:
        return "nothing"
    return type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)
