"""Measures the time of one core for recorded events. As a script, it measures the core that can be imported:

    python -P benchmarks/core_replay.py EVENTS

EVENTS is a file with a pickled list of events. Prints the figures of `Seconds` as JSON.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from modelpool.scheduler.core import state as core_module
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import CORE_GC_OBJECTS, SchedulerConfig
from modelpool.scheduler.model.messages import Event, Submitted


@dataclass(frozen=True)
class Seconds:
    """CPU seconds of the events up to the last submission and of those after it, and the number of the latter."""

    before: float
    after: float
    events_after: int
    is_compiled: bool

    @property
    def both(self) -> float:
        """CPU seconds of all events."""
        return self.before + self.after


def replay(events: Sequence[Event]) -> Seconds:
    """Pass the events to a new core, with garbage collected as rarely as in the controller."""
    last = max(i for i, event in enumerate(events) if isinstance(event, Submitted))
    state = SchedulerState(SchedulerConfig())
    gc.collect()
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:
        gc.freeze()
    usual = gc.get_threshold()
    gc.set_threshold(CORE_GC_OBJECTS)
    begun = time.process_time()
    for event in islice(events, last + 1):
        state.handle(event)
    between = time.process_time()
    for event in islice(events, last + 1, None):
        state.handle(event)
    ended = time.process_time()
    if not is_frozen:  # what the caller has frozen stays frozen
        gc.unfreeze()
    gc.set_threshold(*usual)
    is_compiled = not str(core_module.__file__).endswith(".py")
    return Seconds(between - begun, ended - between, len(events) - last - 1, is_compiled)


if __name__ == "__main__":
    print(json.dumps(asdict(replay(pickle.loads(Path(sys.argv[1]).read_bytes())))))
