"""The backlog against a plain sorted list: order, windows, who is passed over, what suits a worker's weights."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pool.residency import Resident
from pool.spec import ComponentKey
from scheduler.backlog import Backlog
from scheduler.costs import Costs
from scheduler.jobs import Task
from tests.scheduler.world import COMPONENTS, PAINT, encode, sample

LIMIT = 3
SPECS = [
    encode("cat"),
    encode("cat", patch="x"),
    encode("cat", activation_bytes=30),
    sample(model=PAINT),
    sample(model=PAINT, patch="x", activation_bytes=20),
]


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
    return task.signature.needed_bytes <= capacity_bytes


KINDS = st.lists(st.tuples(st.integers(0, len(SPECS) - 1), st.integers(0, 2)), min_size=1, max_size=20)


@given(KINDS, st.sets(st.sampled_from([1, 5, 10, 24, 40])), st.data())
def test_it_is_a_sorted_list_with_windows(kinds, capacities, data) -> None:
    """Whatever is filed, started, taken out and filed again, and whatever the capacities become meanwhile."""
    waiting = tasks_of(kinds)
    backlog = Backlog(lambda stage: LIMIT)
    plain: list[Task] = []
    passed = dict.fromkeys(waiting, 0)
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
            for other in plain:
                passed[other] += other.order < task.order and fits(other, capacity_bytes)
            backlog.start(task, capacity_bytes)
        backlog.set_capacities(tuple(sorted(capacities)))
        plain.sort(key=lambda t: t.order)
        assert list(backlog) == plain
        assert len(backlog) == len(plain)
        assert {t: t.passed for t in passed} == passed
        assert backlog.overdue == [t for t in plain if t.passed >= LIMIT]
        for capacity_bytes in capacities:
            within = [t for t in plain if fits(t, capacity_bytes)]
            for length in (1, 4, 100):
                assert backlog.window(length, capacity_bytes) == within[:length]
                expected = (within[0], within[:length][-1]) if within else None
                assert backlog.ends(length, capacity_bytes) == expected


@given(KINDS)
def test_it_finds_the_first_of_each_signature_by_what_that_uses(kinds) -> None:
    backlog = Backlog(lambda stage: LIMIT)
    tasks = tasks_of(kinds)
    for task in tasks:
        backlog.add(task)
    tasks.sort(key=lambda t: t.order)
    for component in (COMPONENTS[0].key, PAINT, ComponentKey("nothing")):
        for digest in ("", "x"):
            suiting = [
                t for t in tasks if (t.spec.uses[0].component, t.spec.uses[0].patch_digest) == (component, digest)
            ]
            firsts = {t.signature: t for t in reversed(suiting)}
            found = backlog.first_using([Resident(component, 1, digest)])
            assert sorted(t.number for t in found) == sorted(t.number for t in firsts.values())
