"""How long one core takes over recorded events. Run by itself it measures whichever core can be imported:

    python -P benchmarks/core_replay.py EVENTS

EVENTS is a pickled list of them; what is printed is JSON: the figures of `Seconds`.
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

from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.tables.config import CORE_GC_OBJECTS, SchedulerConfig
from modelpool.scheduler.tables.messages import Event, Submitted


@dataclass(frozen=True)
class Seconds:
    """CPU seconds of the events up to the last submission, of those after it, and how many these are."""

    before: float
    after: float
    events_after: int
    is_compiled: bool

    @property
    def both(self) -> float:
        """Of all events."""
        return self.before + self.after


def replay(events: Sequence[Event]) -> Seconds:
    """Feed the events to a fresh core, with garbage looked for as rarely as the controller does."""
    last = max(i for i, event in enumerate(events) if isinstance(event, Submitted))
    state = SchedulerState(SchedulerConfig())
    gc.collect()
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
    gc.unfreeze()
    gc.set_threshold(*usual)
    is_compiled = not str(state.__file__).endswith(".py")
    return Seconds(between - begun, ended - between, len(events) - last - 1, is_compiled)


if __name__ == "__main__":
    print(json.dumps(asdict(replay(pickle.loads(Path(sys.argv[1]).read_bytes())))))
