"""The benchmark of the core measures all events, and names the core that it measured."""

from __future__ import annotations

from benchmarks.core_replay import replay
from modelpool.scheduler.core import state
from modelpool.scheduler.tables.messages import ComponentsKnown, Submitted, Tick
from tests.scheduler.world import COMPONENTS, image


def test_a_replay_counts_the_events_after_the_last_submission() -> None:
    """Found when it did not run at all: nothing called it in the tests."""
    events = [ComponentsKnown(0.0, COMPONENTS), Submitted(1.0, image("a")), Submitted(2.0, image("b")), Tick(3.0)]
    seconds = replay(events)
    assert seconds.events_after == 1
    assert seconds.is_compiled == (not str(state.__file__).endswith(".py"))
    assert seconds.both >= 0.0
