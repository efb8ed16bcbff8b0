"""Which start is chosen: tables of workers, weights and tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.scheduler.decisions.placement.registry import PLACEMENTS
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.placement_record import PlacementRule
from tests.scheduler.scene import AT, Scene, whole
from tests.scheduler.world import DRAW, PAINT, TEXT, VAE, decode, encode, sample


def test_a_task_goes_where_its_weights_are() -> None:
    scene = Scene()
    scene.worker("a", whole(DRAW))
    scene.worker("b", whole(PAINT))
    task = scene.task(sample(model=PAINT))
    assert scene.decision() == (task, "b")


def test_a_worker_takes_what_suits_its_weights() -> None:
    scene = Scene()
    scene.worker("a", whole(DRAW))
    scene.task(sample(model=PAINT))
    suiting = scene.task(sample(model=DRAW))
    assert scene.decision() == (suiting, "a")


def test_equal_patches_are_preferred_to_a_switch() -> None:
    scene = Scene()
    scene.worker("a", whole(PAINT, "x"))
    scene.task(sample(patch="y"))
    suiting = scene.task(sample(patch="x"))
    assert scene.decision() == (suiting, "a")


def test_a_higher_priority_comes_first_whatever_it_costs() -> None:
    scene = Scene()
    scene.worker("a", whole(DRAW))
    scene.task(sample(model=DRAW))
    urgent = scene.task(sample(model=PAINT), priority=1)
    assert scene.decision() == (urgent, "a")


def test_of_equal_costs_what_finishes_a_job_comes_first_then_the_order() -> None:
    scene = Scene()
    scene.worker("a", whole(TEXT), whole(PAINT), whole(VAE))
    first = scene.task(encode("cat"))
    second = scene.task(sample())
    third = scene.task(decode(second.name))
    fourth = scene.task(decode(first.name))
    order = []
    while len(scene.backlog):
        task, _ = scene.decision()
        order.append(task)
        scene.backlog.remove(task)
    assert order == [third, fourth, first, second]


@pytest.mark.parametrize(("free_in", "expected"), [(5.0, None), (7.0, "cold")])
def test_a_task_waits_for_a_warm_busy_worker_when_that_is_sooner(free_in, expected) -> None:
    """The upload takes 6 seconds."""
    scene = Scene()
    scene.worker("cold")
    scene.worker("warm", whole(PAINT), free_in=free_in)
    scene.task(sample())
    choice = scene.ask()
    assert (None if choice is None else choice.worker.worker_id) == expected


def test_a_long_queue_does_not_wait_for_one_worker() -> None:
    """The warm worker is free in 1 s and a run takes 10: the first task waits, the second does not."""
    scene = Scene()
    scene.worker("cold")
    scene.worker("warm", whole(PAINT), free_in=1.0)
    scene.task(sample(seed=1))
    assert scene.ask() is None
    second = scene.task(sample(seed=2))
    assert scene.decision() == (second, "cold")


def test_nobody_waits_for_a_run_of_unknown_length() -> None:
    scene = Scene()
    scene.worker("cold")
    scene.worker("warm", whole(PAINT), free_in=1.0).expected_end = None
    task = scene.task(sample())
    assert scene.decision() == (task, "cold")


def test_a_run_that_is_late_is_not_expected_to_end_at_once() -> None:
    """It should have ended 7 s ago, so it may take 7 s more; the upload takes 6."""
    scene = Scene()
    scene.worker("cold")
    scene.worker("warm", whole(PAINT), free_in=1.0).expected_end = AT - 7.0
    task = scene.task(sample())
    assert scene.decision() == (task, "cold")


def test_a_task_that_was_passed_over_too_often_goes_first_and_does_not_wait() -> None:
    scene = Scene(overtaking_limit=3)
    scene.worker("idle", whole(DRAW))
    scene.worker("warm", whole(PAINT), free_in=1.0)
    overdue = scene.task(sample(model=PAINT), passed=3)
    scene.task(sample(model=DRAW))
    task, worker = scene.decision()
    assert (task, worker) == (overdue, "idle")
    choice = scene.ask()
    assert choice is not None
    assert "passed over 3 times" in choice.why.words
    assert choice.why.rule is PlacementRule.WAITED


def test_when_all_are_idle_something_starts_however_dear() -> None:
    scene = Scene()
    scene.worker("a", link=1e-6)
    task = scene.task(sample())
    assert scene.decision() == (task, "a")


def test_of_equally_soon_workers_the_one_that_evicts_least_is_taken_then_the_first_by_name() -> None:
    scene = Scene()
    scene.worker("c", capacity=24)
    scene.worker("b", capacity=24)
    scene.worker("a", whole(DRAW), capacity=24)
    task = scene.task(sample(model=PAINT))
    assert scene.decision() == (task, "b")


def test_streaming_is_dear() -> None:
    """On the small worker a part of the weights crosses the bus in every one of 4 passes."""
    scene = Scene()
    scene.worker("a", whole(PAINT), capacity=18)
    small = scene.worker("b", capacity=17)
    task = scene.task(sample())
    assert scene.decision() == (task, "a")
    assert (scene.costs.extra_seconds(task.spec, task.cost_class, small) or 0) > 6.0


def test_a_task_that_only_a_busy_worker_can_take_does_not_start_on_a_small_one() -> None:
    scene = Scene()
    scene.worker("small", capacity=10)
    scene.worker("large", capacity=64, free_in=1.0)
    scene.task(sample(activation_bytes=20))
    assert scene.ask() is None


def test_the_reason_names_what_it_was_made_of() -> None:
    scene = Scene()
    scene.worker("a")
    scene.task(sample())
    choice = scene.ask()
    assert choice is not None
    assert choice.why.words == "a, of 1 idle and 0 busy: upload 6 B in 6.00 s, run 10.00 s"


def test_arrival_order_is_blind_to_weights() -> None:
    """The first task, on the worker that is idle longest."""
    scene = Scene(placement="arrival_order")
    scene.worker("warm", whole(PAINT)).idle_since = 2.0
    scene.worker("cold").idle_since = 1.0
    first = scene.task(sample())
    scene.task(encode("cat"))
    assert scene.decision() == (first, "cold")


def test_least_loaded_counts_runs() -> None:
    scene = Scene(placement="least_loaded")
    scene.worker("a").totals.runs = 3
    scene.worker("b").totals.runs = 2
    first = scene.task(sample())
    assert scene.decision() == (first, "b")


CAT, FINAL = encode("cat"), decode(encode("cat").task_id)
SPECS = [
    *(CAT, encode("cat", patch="x"), replace(CAT, uses=()), replace(CAT, uses=(*CAT.uses, *FINAL.uses)), FINAL),
    *(sample(), sample(patch="x"), sample(model=DRAW), sample(activation_bytes=30)),
]
ENTRIES = st.lists(
    st.sampled_from([whole(TEXT), whole(TEXT, "x"), whole(PAINT), whole(PAINT, "x"), whole(DRAW), whole(VAE)]),
    max_size=3, unique_by=lambda e: e.component,
)  # fmt: skip
WORKERS = st.lists(
    st.tuples(ENTRIES, st.sampled_from([30, 30, 40]), st.sampled_from([0.0, 0.0, 1.0, 9.0])), min_size=1, max_size=4
)
TASKS = st.lists(
    st.tuples(st.sampled_from(SPECS), st.sampled_from([0, 0, 1]), st.integers(0, 3)), min_size=1, max_size=12
)


@given(WORKERS, TASKS, st.sampled_from(sorted(PLACEMENTS)))
def test_a_placement_changes_nothing_and_starts_what_can_be_started(workers, tasks, name) -> None:
    scene = Scene(overtaking_limit=3, placement=name)
    for number, (entries, capacity, free_in) in enumerate(workers):
        scene.worker(f"w{number}", *entries, capacity=capacity, free_in=0.0 if number == 0 else free_in)
    for spec, priority, passed in tasks:
        scene.task(spec, priority, passed)
    before = (list(scene.backlog), [(w.residency, w.status, w.task_id) for w in scene.workers])
    choice = scene.ask()
    assert (list(scene.backlog), [(w.residency, w.status, w.task_id) for w in scene.workers]) == before
    query = scene.query()
    if choice is None:
        fitting = query.backlog.oldest(query.workers.largest_idle_bytes)
        assert query.workers.busy_count or fitting is None, "all are idle and nothing starts"
    else:
        assert choice.worker.is_idle
        assert choice.task.cost_class.needed_bytes <= (choice.worker.capacity_bytes or 0)
        assert choice.why


def test_who_waited_long_for_what_its_load_costs_goes_before_what_is_there() -> None:
    """The load takes 6 s; at a share of a twentieth it is worth that after 120 s."""
    scene = Scene()
    scene.worker("a", whole(DRAW), capacity=20)  # no room for both
    waiting = scene.task(sample(model=PAINT), waited=119.0)
    suiting = scene.task(sample(model=DRAW), waited=1.0)
    assert scene.decision() == (suiting, "a")
    waiting.ready_at = AT - 121.0
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.why.rule, choice.spent_seconds) == (waiting, PlacementRule.WAITED, 6.0)


@pytest.mark.parametrize("account", [0.0, -1.0])
def test_such_loads_end_with_the_account(account: float) -> None:
    scene = Scene()
    scene.switch_seconds = account
    scene.worker("a", whole(DRAW))
    scene.task(sample(model=PAINT), waited=500.0)
    suiting = scene.task(sample(model=DRAW), waited=1.0)
    assert scene.decision() == (suiting, "a")


def test_jobs_that_were_asked_for_together_do_not_hurry_each_other() -> None:
    scene = Scene()
    scene.worker("a", whole(DRAW))
    scene.task(sample(model=PAINT), waited=500.0, batch="b")
    suiting = scene.task(sample(model=DRAW), waited=1.0, batch="b")
    assert scene.decision() == (suiting, "a")
    other = scene.task(sample(model=PAINT, patch="x"), waited=500.0)
    assert scene.decision() == (suiting, "a"), "the oldest comes first, and it does not hurry"
    scene.backlog.remove(suiting)
    scene.task(sample(model=DRAW, seed=2), waited=1.0)
    assert scene.decision()[0] is not other


def test_a_model_that_is_nowhere_comes_before_a_second_copy() -> None:
    """Both take 10 s here; one of the models is on a busy worker already, and the other has to come one day."""
    scene = Scene()
    scene.worker("idle")
    scene.worker("warm", whole(DRAW), free_in=100.0)
    scene.task(sample(model=DRAW))
    nowhere = scene.task(sample(model=PAINT))
    assert scene.decision() == (nowhere, "idle")


@pytest.mark.parametrize(("waiting", "expected"), [(2, None), (3, "idle")])
def test_a_copy_has_to_be_worth_what_is_left_of_the_line(waiting: int, expected: str | None) -> None:
    """A copy takes 30 s at this link, a run 10, and the warm worker is free in 1 s: three tasks would end there before
    one could end on the idle one. Two more do not pay for a copy, three do."""
    scene = Scene()
    scene.worker("idle", link=0.2)
    scene.worker("warm", whole(PAINT), free_in=1.0)
    for seed in range(3 + waiting):
        scene.task(sample(seed=seed))
    choice = scene.ask()
    assert (None if choice is None else choice.worker.worker_id) == expected


@pytest.mark.parametrize(("gap_seconds", "expected"), [(1.0, None), (1e6, "idle")])
def test_a_copy_that_evicts_what_is_in_demand_waits_longer_for_its_holder(
    gap_seconds: float, expected: str | None
) -> None:
    """A copy of PAINT takes 6 s, and the warm worker is free in 7 s. The idle one has no room for it next to DRAW,
    which loads in 10 s: if it is needed again soon, the task waits."""
    scene = Scene()
    scene.worker("idle", whole(DRAW), capacity=20)
    scene.worker("warm", whole(PAINT), free_in=7.0)
    for number in range(5, 0, -1):
        scene.costs.rates.arrived((DRAW,), AT - number * gap_seconds)
        scene.costs.rates.ended((DRAW,), AT - number * gap_seconds)
    scene.task(sample(model=PAINT))
    choice = scene.ask()
    assert (None if choice is None else choice.worker.worker_id) == expected


def test_hurried_tasks_go_first_within_their_priority_by_deadline() -> None:
    scene = Scene()
    scene.worker("a", whole(DRAW))
    scene.task(sample(model=DRAW))
    late, soon = scene.task(sample(seed=1)), scene.task(sample(seed=2))
    scene.backlog.urgent.add(late, AT + 50.0)
    scene.backlog.urgent.add(soon, AT + 9.0)
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.why.rule) == (soon, PlacementRule.DEADLINE)
    assert "9 s before its deadline" in choice.why.words
    above = scene.task(sample(model=DRAW, seed=3), priority=1)
    assert scene.decision()[0] is above


def test_a_task_whose_worker_was_lost_goes_first() -> None:
    scene = Scene()
    scene.worker("a", whole(DRAW))
    scene.task(sample(model=DRAW))
    lost = Task(sample(seed=9), scene.costs.acquire(sample(seed=9)), (99, 0))
    lost.goes_first, lost.attempt = True, 1
    scene.backlog.add(lost)
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.why.rule) == (lost, PlacementRule.LOST)


def test_among_many_idle_workers_the_one_that_holds_it_is_found() -> None:
    scene = Scene()
    for number in range(40):
        scene.worker(f"w{number:02}")
    scene.worker("x", whole(PAINT))
    task = scene.task(sample())
    assert scene.decision() == (task, "x")


def test_the_other_candidates_are_kept_soonest_first() -> None:
    scene = Scene()
    scene.worker("cold")
    scene.worker("warm", whole(PAINT), free_in=7.0)
    scene.worker("later", whole(PAINT), free_in=8.0)
    scene.task(sample())
    choice = scene.ask()
    assert choice is not None
    assert [(c.worker_id, c.wait_seconds, c.extra_seconds) for c in choice.why.others] == [
        ("warm", 7.0, 0.0),
        ("later", 8.0, 0.0),
    ]
