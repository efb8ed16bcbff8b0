"""The backlog against a plain sorted list: order, lines, who is passed over, what suits a worker's weights."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from operator import attrgetter

from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, Role, Stage
from modelpool.pool.weights.plan.eviction_plan import Resident
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.backlog import Backlog
from modelpool.scheduler.decisions.queue.urgent import AT_ONCE
from modelpool.scheduler.model.jobs import Task
from tests.scheduler.world import COMPONENTS, PAINT, decode, encode, sample

SPECS = [
    encode("cat"),
    encode("cat", patch="x"),
    encode("cat", activation_bytes=30),
    sample(model=PAINT),
    sample(model=PAINT, patch="x", activation_bytes=20),
    decode(sample().task_id),
    decode(sample().task_id, activation_bytes=9),
]


by_order = attrgetter("order")


def tasks_of(kinds: list[tuple[int, int]]) -> list[Task]:
    """One task for each (spec, priority), in order of submission."""
    costs = Costs(0.0)
    costs.know(COMPONENTS)
    tasks = []
    for number, (kind, priority) in enumerate(kinds):
        task = Task(SPECS[kind], costs.acquire(SPECS[kind]), (number, 0))
        task.set_priority(priority)
        tasks.append(task)
    return tasks


def fits(task: Task, capacity_bytes: int) -> bool:
    return task.cost_class.needed_bytes <= capacity_bytes


KINDS = st.lists(st.tuples(st.integers(0, len(SPECS) - 1), st.integers(0, 2)), min_size=1, max_size=20)


@given(KINDS, st.sets(st.sampled_from([1, 5, 10, 24, 40])), st.data())
def test_lines_stand_in_the_order_of_their_first_tasks(kinds, capacities, data) -> None:
    """Whatever is filed, started, taken out and filed again, and whatever the capacities become meanwhile."""
    waiting = tasks_of(kinds)
    backlog = Backlog()
    plain: list[Task] = []
    passed = dict.fromkeys(waiting, 0.0)
    for _ in range(30):
        action = data.draw(st.sampled_from(["add", "add", "start", "remove", "capacities"]))
        if action == "add" and waiting:
            task = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            backlog.add(task)
            plain.append(task)
        elif action == "capacities":
            capacities = data.draw(st.sets(st.sampled_from([1, 5, 10, 24, 40])))
        elif action == "remove" and plain:
            task = plain.pop(data.draw(st.integers(0, len(plain) - 1)))
            backlog.remove(task)
            waiting.append(task)
        elif action == "start" and plain and capacities:
            capacity_bytes = data.draw(st.sampled_from(sorted(capacities)))
            backlog.set_capacities(tuple(sorted(capacities)))
            task = plain.pop(data.draw(st.integers(0, len(plain) - 1)))
            oldest = next((t for t in sorted([*plain, task], key=by_order) if fits(t, capacity_bytes)), task)
            if oldest is not task:
                passed[oldest] += 0.5
            backlog.start(task, capacity_bytes, workers=2, limit=99)
        backlog.set_capacities(tuple(sorted(capacities)))
        plain.sort(key=by_order)
        assert list(backlog) == plain
        assert len(backlog) == len(plain)
        assert {t: t.passed for t in passed} == passed
        firsts = sorted({t.cost_class: t for t in reversed(plain)}.values(), key=by_order)
        assert backlog.line_count == len(firsts)
        for capacity_bytes in capacities:
            within = [t for t in firsts if fits(t, capacity_bytes)]
            assert [line.head for line in backlog.lines(capacity_bytes)] == within
            assert backlog.oldest(capacity_bytes) is (within[0] if within else None)
            after = data.draw(st.sampled_from(plain)).order if plain else (0,)
            later = [line.head for line in backlog.lines(capacity_bytes, after)]
            assert later == [t for t in within if t.order >= after]
        finishing = [t for t in firsts if t.spec.stage is Stage.DECODE]
        assert [line.head for line in backlog.finishing(2)] == finishing
        for spec in COMPONENTS:
            using = [t for t in firsts if t.spec.uses[0].component == spec.key]
            assert [line.head for line in backlog.of_component(spec.key, 2)] == using[:2]


@given(KINDS)
def test_it_finds_the_lines_by_what_they_use(kinds) -> None:
    backlog = Backlog()
    tasks = tasks_of(kinds)
    for task in tasks:
        backlog.add(task)
    tasks.sort(key=by_order)
    for component in (COMPONENTS[0].key, PAINT, ComponentKey("nothing")):
        for digest in ("", "x"):
            suiting = [
                t for t in tasks if (t.spec.uses[0].component, t.spec.uses[0].patch_digest) == (component, digest)
            ]
            firsts = {t.cost_class: t for t in reversed(suiting)}
            found = backlog.using([Resident(component, 1, digest)])
            assert sorted(line.head.number for line in found) == sorted(t.number for t in firsts.values())


def test_jobs_that_were_asked_for_together_pass_each_other_freely() -> None:
    backlog = Backlog()
    first, second, other = tasks_of([(0, 0), (1, 0), (3, 0)])
    first.batch = second.batch = "b"
    for task in (first, second, other):
        backlog.add(task)
    backlog.set_capacities((64,))
    backlog.start(second, 64, workers=1, limit=99)
    assert first.passed == 0
    backlog.start(other, 64, workers=1, limit=99)
    assert first.passed == 1


def test_who_is_hurried_passes_nobody_over() -> None:
    """It is no sign that the oldest is left behind for the loaded one."""
    backlog = Backlog()
    first, urgent = tasks_of([(0, 0), (1, 0)])
    backlog.add(first)
    backlog.add(urgent)
    backlog.urgent.add(urgent, 5.0)
    backlog.set_capacities((64,))
    backlog.start(urgent, 64, workers=1, limit=99)
    assert first.passed == 0


def test_a_task_waits_since_it_was_filed_first() -> None:
    """Found in a review: filed anew under another tag, it began to wait anew."""
    backlog = Backlog()
    (task,) = tasks_of([(0, 0)])
    for at in (3.0, 8.0):
        backlog.at = at
        backlog.add(task)
        assert task.waited_seconds(10.0) == 7.0
        backlog.remove(task)


def test_who_is_passed_over_too_often_goes_first_also_behind_a_batch() -> None:
    """Found in a review: only the oldest of all was counted, and a batch passes its own freely."""
    backlog = Backlog()
    first, second, third, other = tasks_of([(0, 0), (1, 0), (2, 0), (4, 0)])
    late = tasks_of([(3, 0)] * 9)[8]
    for task in (first, second, third, late):
        task.batch = "b"
    for task in (first, second, other, late):
        backlog.add(task)
    backlog.set_capacities((64,))
    backlog.start(late, 64, workers=1, limit=1)
    assert [task for _, _, task in backlog.urgent.now(0.0)] == [other]
    assert first.passed == 0


def test_who_is_passed_over_too_often_goes_first_also_when_it_is_filed_anew() -> None:
    """Found in a review: a new tag, a raised priority or another deadline made it wait like all others again."""
    backlog = Backlog()
    (old, *others) = tasks_of([(n % 2, 0) for n in range(5)])
    backlog.add(old)
    backlog.set_capacities((64,))
    for number, other in enumerate(others):
        assert (old in backlog.urgent) == (number >= 3)
        backlog.add(other)
        backlog.start(other, 64, workers=1, limit=3)
    for priority, tag, deadline in ((0, 5.0, inf), (1, 5.0, inf), (1, 5.0, 9.0), (1, 5.0, inf)):
        backlog.remove(old)
        assert old not in backlog.urgent
        old.set_priority(priority, tag)
        old.urgent_by = deadline
        backlog.add(old)
        assert list(backlog.urgent) == [(AT_ONCE, old.order, old)]


def test_a_deadline_that_is_over_hurries_nobody() -> None:
    backlog = Backlog()
    first, second = tasks_of([(0, 0), (1, 0)])
    for task, deadline in ((first, 5.0), (second, 9.0)):
        backlog.add(task)
        backlog.urgent.add(task, deadline)
    assert [task for _, _, task in backlog.urgent.now(5.0)] == [first, second]
    assert [task for _, _, task in backlog.urgent.now(5.1)] == [second]


def test_of_two_deadlines_of_a_task_the_sooner_counts_whichever_came_first() -> None:
    backlog = Backlog()
    first, second = tasks_of([(0, 0), (1, 0)])
    for task, deadlines in ((first, (9.0, 12.0)), (second, (12.0, 9.0))):
        backlog.add(task)
        for deadline in deadlines:
            backlog.urgent.add(task, deadline)
    assert [(deadline, task) for deadline, _, task in backlog.urgent] == [(9.0, first), (9.0, second)]


def test_what_uses_no_component_suits_every_worker() -> None:
    spec, costs = replace(SPECS[0], uses=()), Costs(0.0)
    task = Task(spec, costs.acquire(spec), (0, 0))
    backlog = Backlog()
    backlog.add(task)
    assert [line.head for line in backlog.using([])] == [task]


def test_hurried_tasks_stand_by_deadline_until_they_are_taken_out() -> None:
    backlog = Backlog()
    first, second, third = tasks_of([(0, 0), (1, 0), (3, 0)])
    third.goes_first = True
    for task in (first, second, third):
        backlog.add(task)
    backlog.urgent.add(first, 9.0)
    backlog.urgent.add(second, 5.0)
    assert [task for _, _, task in backlog.urgent] == [third, second, first]
    backlog.remove(second)
    assert [task for _, _, task in backlog.urgent] == [third, first]


def test_lines_are_found_by_their_adapters() -> None:
    adapter = ComponentKey("lora")
    use = replace(sample().uses[0], patch_digest="x", adapters=(adapter,))
    costs = Costs(0.0)
    costs.know((*COMPONENTS, ComponentSpec(adapter, Role.LORA, 1, 1)))
    spec = replace(sample(), uses=(use,))
    task = Task(spec, costs.acquire(spec), (0, 0))
    backlog = Backlog()
    backlog.add(task)
    assert [line.head for line in backlog.of_adapter(adapter)] == [task]
    backlog.remove(task)
    assert not backlog.of_adapter(adapter)


def test_an_adapter_of_two_components_is_filed_and_taken_out_once() -> None:
    """Both text encoders of SDXL read one LoRA. Taking such a task out twice from under its adapter ended the core."""
    use = replace(encode("cat").uses[0], patch_digest="x", adapters=(ComponentKey("lora"),))
    spec = replace(encode("cat"), uses=(use, replace(use, component=PAINT)))
    costs = Costs(0.0)
    task = Task(spec, costs.acquire(spec), (0, 0))
    backlog = Backlog()
    backlog.add(task)
    assert [line.head for line in backlog.of_adapter(ComponentKey("lora"))] == [task]
    backlog.remove(task)
    assert not backlog.reads_adapters
