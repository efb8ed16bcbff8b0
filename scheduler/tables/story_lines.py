"""A line of the story, in words, and lines as text. Values that are sent to who asks; `scheduler.tables.story` makes
them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class StoryLine:
    """One move, in words.

    cause    the event behind it, in a few words
    subject  id of the job, task or worker that moved
    before, after   status names; before is "" when the subject is new
    note     what else is worth knowing: worker, attempt, error
    """

    at: float
    cause: str
    subject: str
    before: str
    after: str
    note: str = ""


def dump(lines: Iterable[StoryLine]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(asdict(line)) + "\n" for line in lines)


def load(text: str) -> tuple[StoryLine, ...]:
    """The inverse of `dump`."""
    return tuple(StoryLine(**json.loads(line)) for line in text.splitlines())
