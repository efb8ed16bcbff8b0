"""Streams of events, decided by whichever core can be imported here: a program that a test runs with the compiled one.

    python -P decided.py STREAMS ANSWERS

Both are files of pickles: a list of `Stream`, as tuples, and `Answer`s.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, TypeAlias

from modelpool.scheduler.core import state
from modelpool.scheduler.core.history import find_job, history_of
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Event, Submitted
from modelpool.scheduler.simulator.record.event_log import entry_line, read_entries

#: how a core was set up, and what it was told
Stream: TypeAlias = tuple[SchedulerConfig, list[Event]]


def answer(stream: Stream) -> dict[str, Any]:
    """All that the core says to the stream, and what it knows in the end. The written text is read back."""
    config, events = stream
    state = SchedulerState(config)
    commands = [state.handle(event) for event in events]
    validate(state)
    log = [entry_line(event, said) for event, said in zip(events, commands, strict=True)]
    read = [(entry.event, list(entry.commands)) for entry in read_entries(log)]
    assert read == list(zip(events, commands, strict=True)), "what was written reads otherwise"
    jobs = [event.job.job_id for event in events if isinstance(event, Submitted)]
    return {
        "commands": commands,
        "log": log,
        "snapshot": state.snapshot(),
        "story": state.log.lines(),
        "histories": [history_of(state, find_job(state, job)) for job in jobs[-3:]],
    }


def main() -> None:
    """Decide the streams of the first file; write the answers, and which core gave them, to the second."""
    streams, answers = map(Path, sys.argv[1:])
    found = [answer(stream) for stream in pickle.loads(streams.read_bytes())]
    answers.write_bytes(pickle.dumps((str(state.__file__), found)))


if __name__ == "__main__":
    main()
