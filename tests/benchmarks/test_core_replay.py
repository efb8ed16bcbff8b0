"""The benchmark of the core measures all events, and names the core that it measured."""

from __future__ import annotations

import gc

from benchmarks.core_replay import replay
from modelpool.scheduler.core import state
from modelpool.scheduler.model.messages import ComponentsKnown, Submitted, Tick
from tests.scheduler.world import COMPONENTS, image


def test_a_replay_counts_the_events_after_the_last_submission() -> None:
    """Found when it did not run at all: nothing called it in the tests."""
    events = [ComponentsKnown(0.0, COMPONENTS), Submitted(1.0, image("a")), Submitted(2.0, image("b")), Tick(3.0)]
    seconds = replay(events)
    assert seconds.events_after == 1
    assert seconds.is_compiled == (not str(state.__file__).endswith(".py"))
    assert seconds.both >= 0.0


def test_what_the_caller_has_frozen_stays_frozen() -> None:
    """Found: a replay ended the freeze of the test run, and each later collection scanned all test modules and
    libraries, 2 s each: half of the time of tests that collect garbage."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    replay([Submitted(1.0, image("a")), Tick(2.0)])
    assert gc.get_freeze_count() > frozen // 2
