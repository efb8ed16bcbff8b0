"""A recorded log, decided again: a fresh core is told the same events, and must answer with the same commands.

The core has no clock and no chance, so equal events give equal commands. Where they do not, the first difference says
what is different, field by field, and what led there. Knows no files.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.record.event_log import Entry, Header
from modelpool.scheduler.tables.messages import Command
from modelpool.scheduler.tables.story import describe
from modelpool.scheduler.tables.story_lines import StoryLine

#: moves before the difference that are told
STORY_LINES = 12


@dataclass(frozen=True, slots=True)
class Difference:
    """The first command that is not the one that was recorded.

    line      of the log
    cause     the event, in a few words
    recorded, made   the commands; None where there is no more
    fields    what is different, one a line: name, what was recorded, what was made now
    story     the last moves of what the commands are about, up to this event
    """

    line: int
    cause: str
    recorded: Command | None
    made: Command | None
    fields: tuple[str, ...]
    story: tuple[StoryLine, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """An event that the core failed at."""

    line: int
    cause: str
    traceback_text: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a replay went. `seconds` are the events' own, from the first to the last that was told.

    failure  set when the core failed, or with `check` an invariant: a mistake of ours
    """

    events: int
    commands: int
    seconds: float
    difference: Difference | None = None
    failure: Failure | None = None

    @property
    def same(self) -> bool:
        """Every command was the one that was recorded."""
        return self.difference is None and self.failure is None


def replay(header: Header, entries: Iterable[Entry], check: bool = False) -> Replayed:
    """Decide again, up to the first difference. `check` holds every invariant against the state after each event.

    Raises UserError for what `entries` cannot read.
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
        except Exception:  # whatever the core fails at is a mistake of its own, and what a replay is to find
            failure = Failure(entry.line, describe(entry.event), traceback.format_exc())
            return Replayed(events, commands, entry.event.at - first_at, failure=failure)
        commands += len(made)
        for recorded, now in zip_longest(entry.commands, made):
            if recorded != now:
                difference = _difference(state, entry, recorded, now)
                return Replayed(events, commands, entry.event.at - first_at, difference)
    return Replayed(events, commands, 0.0 if first_at is None else state.at - first_at)


def _difference(state: SchedulerState, entry: Entry, recorded: Command | None, made: Command | None) -> Difference:
    about = {name for command in (recorded, made) for name in _subjects(command)}
    return Difference(
        line=entry.line,
        cause=describe(entry.event),
        recorded=recorded,
        made=made,
        fields=tuple(_differing("", recorded, made)),
        story=state.log.lines(about)[-STORY_LINES:],
    )


def _subjects(command: Command | None) -> Iterator[str]:
    """What a command is about: the ids that the story knows."""
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
        yield f"{name or 'command'}: {_words(recorded)} recorded, {_words(made)} made now"


def _words(value: object) -> str:
    if value is None:
        return "nothing"
    return type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)
