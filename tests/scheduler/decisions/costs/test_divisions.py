"""Tasks that can be run in parts: where they fit, what that costs, and who runs them whole."""

from __future__ import annotations

import pytest

from modelpool.pool.values.specs.spec import ExecutionMode, RunCost, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome
from tests.scheduler.decisions.costs.test_cost_model import report_of, worker_with
from tests.scheduler.world import COMPONENTS, Shell, alone, sample

HALF, QUARTER = ExecutionMode(20, batch=2, slowdown=1.5), ExecutionMode(10, batch=1, slowdown=2.0)
#: 40 B of activations whole; PAINT is 12 B, its scratch 2 B
LARGE = sample(activation_bytes=40, divisions=(HALF, QUARTER))


def costs_with() -> Costs:
    costs = Costs(0.0)
    costs.know(COMPONENTS)
    return costs


@pytest.mark.parametrize(("capacity", "expected"), [(64, 40), (42, 40), (41, 20), (22, 20), (21, 10), (12, 10)])
def test_a_worker_runs_it_as_whole_as_it_has_room(capacity: int, expected: int) -> None:
    cost_class = costs_with().acquire(LARGE)
    assert cost_class.mode(capacity).activation_bytes == expected
    assert cost_class.working_bytes(capacity) == expected + 2


def test_it_fits_where_its_smallest_parts_do() -> None:
    costs = costs_with()
    cost_class = costs.acquire(LARGE)
    assert cost_class.needed_bytes == 12
    assert costs.load_estimate(cost_class, worker_with(Residency(12))) is not None
    assert costs.load_estimate(cost_class, worker_with(Residency(11))) is None


def test_running_in_parts_is_charged() -> None:
    """10 s whole; on 41 B it takes half as long again, and the weights have all their room: 6 B cross at 4 B/s."""
    costs = costs_with()
    cost_class = costs.acquire(LARGE)
    assert costs.extra_seconds(LARGE, cost_class, worker_with(Residency(64), link=4.0)) == 1.5
    assert costs.extra_seconds(LARGE, cost_class, worker_with(Residency(41), link=4.0)) == 1.5 + 5.0


def test_time_spent_because_of_parts_is_not_taken_for_a_slow_model() -> None:
    costs = costs_with()
    cost_class = costs.acquire(LARGE)
    worker = worker_with(Residency(41))
    costs.learn(LARGE, cost_class, worker, report_of(RunCost(run_seconds=15.0, division=HALF)))
    assert costs.resident_seconds(LARGE, cost_class, worker) == pytest.approx(10.0)


def test_of_idle_workers_one_that_runs_it_whole_is_preferred(shell: Shell) -> None:
    shell.workers(a=41, b=64)
    shell.submit(alone("j", LARGE))
    assert shell.on("b") == LARGE.task_id


def test_of_idle_workers_that_take_as_long_one_that_runs_it_whole_is_preferred(shell: Shell) -> None:
    """Parts that cost no time are still not what was asked for."""
    free = sample(activation_bytes=40, divisions=(ExecutionMode(20, batch=2),))
    shell.workers(a=41, b=64)
    shell.submit(alone("j", free))
    assert shell.on("b") == free.task_id


def test_a_small_worker_runs_it_in_parts_when_there_is_no_other(shell: Shell) -> None:
    shell.workers(a=41)
    shell.submit(alone("j", LARGE))
    assert "divided" in shell.running[WorkerId("a")].command.why.words
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_what_fits_nowhere_even_in_parts_is_refused_with_both_numbers(shell: Shell) -> None:
    shell.workers(a=11)
    shell.submit(alone("j", LARGE))
    message = shell.error("j").message
    for part in ("12 B", "11 B", "activations 10 B", "at the finest division", "40 B undivided"):
        assert part in message


def test_a_task_that_waits_whole_beats_one_in_parts_that_takes_longer() -> None:
    """b is busy for 1 s more and runs it whole in 10 s; a is idle and would take 15 s."""
    shell = Shell(SchedulerConfig(story_length=None))
    shell.workers(b=64)
    shell.submit(alone("warm", sample(activation_bytes=40, seed=1, divisions=(HALF, QUARTER))))
    shell.finish("b", cost=RunCost(run_seconds=10.0))
    shell.submit(alone("now", sample(activation_bytes=40, seed=2, divisions=(HALF, QUARTER))))
    shell.want("a", "b")
    shell.come_up("a", 41)
    shell.tick(7.0)
    shell.submit(alone("j", LARGE))
    assert shell.on("a") is None
    shell.finish("b")
    assert shell.on("b") == LARGE.task_id
