"""`PACKED_CALLS`: the calls of a driver that are made for each image, or have something for each, as bytes.

Ray looks up the class of every value in a message again, in Python; see `actors.worker.wire.packing`. References of
results are not packed: Ray must see them, so that the results stay. Small results of requests travel themselves, as
bytes: a reference costs the driver and the controller half of the CPU time of all else about an end, since Ray notes
who holds it, and sends such a result along anyway. Knows no Ray and no controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import DriverEvents, JobEnded, ResultRef, Submission
from modelpool.actors.worker.wire.packing import SMALL_BYTES, packed, unpacked

#: packed events, and the results of the jobs that have ended, in order: packed ones, and references
PackedEvents: TypeAlias = tuple[bytes, tuple[ResultRef | None, ...]]

#: the place of the reference in the end of a job
_RESULT = JobEnded.__match_args__.index("result")
_before_result = attrgetter(*JobEnded.__match_args__[:_RESULT])
_after_result = attrgetter(*JobEnded.__match_args__[_RESULT + 1 :])


class PackedCall(NamedTuple):
    """How a call is made in packed form.

    method   of the controller's actor
    pack     returns its arguments; None if these arguments travel as they are
    unpack   returns the answer
    """

    method: str
    pack: Callable[..., tuple[Any, ...] | None]
    unpack: Callable[[Any], Any]


def travelling(ended: Sequence[JobEnded]) -> tuple[int, ...]:
    """Return the places of the jobs with results that travel with their ends: the first small ones, up to `SMALL_BYTES`
    together, so that Ray carries the answer in a message. Results of single stages stay references, which a driver
    gives to later stages."""
    found, left_bytes = [], SMALL_BYTES
    for place, job in enumerate(ended):
        if job.recipe is not None and job.result is not None and 0 < job.result_bytes <= left_bytes:
            found.append(place)
            left_bytes -= job.result_bytes
    return tuple(found)


def packed_events(events: DriverEvents, results: Sequence[ResultRef | None]) -> PackedEvents:
    """Pack the events of a driver, with these results of the jobs that have ended."""
    ends = [(_before_result(job), _after_result(job)) for job in events.ended]
    rest = events.cursor, events.running, events.previews, events.nodes
    return packed((ends, rest)), tuple(results)


def unpacked_events(answer: PackedEvents) -> DriverEvents:
    """Invert `packed_events`."""
    content, results = answer
    ends, (cursor, *rest) = unpacked(content)
    kind: Any = JobEnded
    ended = [kind(*before, result, *after) for (before, after), result in zip(ends, results, strict=True)]
    return DriverEvents(cursor, tuple(ended), *rest)


def _submission(submission: Submission) -> tuple[bytes] | None:
    """Pack requests, unless there are references of results among their inputs, or classes of the user's program, which
    the controller cannot import: Ray sends such a class along."""
    if submission.given or any(type(request) is not GenerateRequest for request in submission.requests):
        return None
    return (packed(submission),)


PACKED_CALLS: Mapping[str, PackedCall] = MappingProxyType(
    {
        "events": PackedCall("events_packed", lambda *arguments: (packed(arguments),), unpacked_events),
        "submit": PackedCall("submit_packed", _submission, unpacked),
        "check_each": PackedCall("check_each_packed", _submission, unpacked),
    }
)
