"""Lines of the story as text: the values that are sent to clients. `scheduler.model.story` creates them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class StoryLine:
    """One transition, as text.

    cause    the event behind it, in a few words
    subject  id of the job, task or worker
    before, after  status names; before is "" if the subject is new
    note     details: worker, attempt, error
    """

    at: float
    cause: str
    subject: str
    before: str
    after: str
    note: str = ""


def dump(lines: Iterable[StoryLine]) -> str:
    """Return one JSON object per line."""
    return "".join(json.dumps(asdict(line)) + "\n" for line in lines)


def load(text: str) -> tuple[StoryLine, ...]:
    """The inverse of `dump`."""
    return tuple(StoryLine(**json.loads(line)) for line in text.splitlines())
