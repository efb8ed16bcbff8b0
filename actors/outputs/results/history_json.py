"""The history of a job as JSON values, for `modelpool why --json` and the HTTP interface."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelpool.pool.values.specs.spec import TaskId
    from modelpool.scheduler.core.history import Attempt, JobHistory


def history_json(history: JobHistory) -> dict[str, Any]:
    """Return everything but the lines of the story as JSON values; each `why` also as a sentence, `words`."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(history), default=_value))
    del found["lines"]
    for (_, attempt), written in zip(_attempts(history), _written_attempts(found), strict=True):
        written["why"]["words"] = attempt.why.words
    return found


def _attempts(history: JobHistory) -> Iterator[tuple[TaskId, Attempt]]:
    return ((task.task_id, attempt) for task in history.tasks for attempt in task.attempts)


def _written_attempts(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (attempt for task in found["tasks"] for attempt in task["attempts"])


def _value(item: object) -> object:
    assert isinstance(item, Enum), f"{item!r} is not a plain value"
    return item.value
