"""A task that waits for a busy worker does not wait for ever when the run there takes longer than expected.

Found when a run without an end kept an image waiting beside an idle worker: nothing else happened, so nobody looked
again.
"""

from __future__ import annotations

from modelpool.pool.values.specs.spec import JobId, RunCost
from tests.scheduler.world import Shell, alone, encode


def test_a_run_that_does_not_end_lets_go_of_those_who_wait_for_its_worker() -> None:
    """1 `a` has the weights and its runs are of known length; 2 it runs `long`; 3 `patient` waits for it although `b`
    is idle; 4 `long` is overdue and nothing happens but time; 5 `patient` starts on `b`."""
    shell = Shell()
    shell.workers(a=64, b=64)
    shell.submit(alone("first", encode("first")))
    first = next(name for name in ("a", "b") if shell.on(name))
    other = "b" if first == "a" else "a"
    shell.finish(first, cost=RunCost(run_seconds=0.5))
    shell.submit(alone("long", encode("long")))
    assert shell.on(first) == encode("long").task_id
    shell.submit(alone("patient", encode("patient")))
    assert shell.on(other) is None
    ticks = 0
    while shell.on(other) is None:
        shell.tick_comes()
        ticks += 1
        assert ticks < 50, shell.state.story(JobId("patient"))
    assert shell.on(other) == encode("patient").task_id
    assert ticks > 0
