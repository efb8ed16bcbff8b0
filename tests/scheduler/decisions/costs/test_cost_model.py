"""Predictions are the plan's; estimates move towards measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import (
    ComponentSpec,
    ExecutionMode,
    NodeId,
    RunCost,
    TaskId,
    TaskReport,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident, plan
from modelpool.scheduler.decisions.costs.cost_model import (
    LEAST_SWITCHES,
    MOST_SPARE_ESTIMATES,
    Costs,
    least_extra_seconds,
)
from modelpool.scheduler.model.workers import Worker
from tests.scheduler.world import COMPONENTS, DRAW, PAINT, SPECS, encode, sample

MIB = 1 << 20


def worker_with(residency: Residency, link: float = 4.0) -> Worker:
    worker = Worker(WorkerId("a"), 1, spec=WorkerSpec(WorkerId("a"), 1, residency.capacity_bytes, link))
    worker.link_bytes_per_second = link
    worker.update_residency(residency)
    return worker


def costs_with(patch_switch_seconds: float = 0.5) -> Costs:
    costs = Costs(patch_switch_seconds)
    costs.know(COMPONENTS)
    return costs


def report_of(cost: RunCost) -> TaskReport:
    return TaskReport(TaskId("t"), 1, WorkerId("a"), 1, Residency(64), cost)


@st.composite
def residencies(draw: st.DrawFn) -> Residency:
    capacity_bytes = draw(st.integers(12, 40))
    left, entries = capacity_bytes, []
    for key in draw(st.permutations(sorted(SPECS))):
        part = draw(st.integers(0, min(left, SPECS[key].weight_bytes)))
        if part:
            entries.append(Resident(key, part, draw(st.sampled_from(["", "x"])), draw(st.integers(0, 5))))
            left -= part
    return Residency(capacity_bytes, tuple(entries))


@given(residencies(), st.sampled_from(["", "x", "y"]), st.integers(0, 10), st.data())
def test_predictions_are_what_the_plan_says(now, patch, activation_bytes, data) -> None:
    """Also when they are remembered while the residency changes under them."""
    costs = costs_with()
    worker = worker_with(now)
    cost_class = costs.acquire(sample(patch=patch, activation_bytes=activation_bytes))
    for _ in range(3):
        moves = plan(now, cost_class.uses, SPECS, activation_bytes)
        seconds = costs.extra_seconds(cost_class.pattern, cost_class, worker)
        link_bytes = moves.upload_bytes + moves.streamed_bytes
        assert seconds == link_bytes / 4.0 + 0.5 * len(moves.switched)
        load = costs.load_estimate(cost_class, worker)
        assert load is not None
        assert load.evicted_bytes(worker) == moves.evicted_bytes
        assert costs.residency_after(cost_class, worker) == moves.after
        other = data.draw(st.sampled_from([sample(patch="z"), encode("cat"), sample(patch=patch)]))
        now = data.draw(st.sampled_from([moves.after, plan(now, other.uses, SPECS, 1).after]))
        worker.update_residency(now)


def test_what_does_not_fit_has_no_cost() -> None:
    costs = costs_with()
    large = sample(activation_bytes=99)
    assert costs.extra_seconds(large, costs.acquire(large), worker_with(Residency(40))) is None


def test_run_seconds_are_learnt_for_all_sizes_and_patches_of_a_kind() -> None:
    """The first measurement counts whole; later ones by exponential average; another kind is not touched."""
    costs = costs_with()
    small, patched = (
        sample(activation_bytes=1, run_seconds=10.0),
        sample(activation_bytes=9, patch="x", run_seconds=5.0),
    )
    worker = worker_with(Residency(64))
    cost_class = costs.acquire(small)
    assert costs.resident_seconds(small, cost_class, worker) == 10.0
    costs.learn(small, cost_class, worker, report_of(RunCost(run_seconds=20.0)))
    assert costs.resident_seconds(small, cost_class, worker) == 20.0
    assert costs.resident_seconds(patched, costs.acquire(patched), worker) == 10.0
    costs.learn(small, cost_class, worker, report_of(RunCost(run_seconds=10.0)))
    assert 10.0 < costs.resident_seconds(small, cost_class, worker) < 20.0
    assert costs.resident_seconds(encode("cat"), costs.acquire(encode("cat")), worker) == 1.0


def test_time_spent_streaming_is_not_taken_for_time_spent_computing() -> None:
    costs = costs_with()
    spec = sample(run_seconds=10.0)
    cost_class = costs.acquire(spec)
    worker = worker_with(Residency(64), link=4.0)
    costs.learn(spec, cost_class, worker, report_of(RunCost(run_seconds=15.0, streamed_bytes=20)))
    assert costs.resident_seconds(spec, cost_class, worker) == pytest.approx(10.0)


def test_the_link_is_learnt_from_loads_that_are_large_enough() -> None:
    costs = costs_with(patch_switch_seconds=0.5)
    spec = sample()
    cost_class = costs.acquire(spec)
    worker = worker_with(Residency(64), link=100.0 * MIB)
    costs.learn(spec, cost_class, worker, report_of(RunCost(load_seconds=1.0, uploaded_bytes=1000)))
    assert worker.link_bytes_per_second == 100.0 * MIB
    for _ in range(50):
        costs.learn(spec, cost_class, worker, report_of(RunCost(1.5, 1.0, 10 * MIB, patch_switches=1)))
    assert worker.link_bytes_per_second == pytest.approx(10.0 * MIB, rel=0.1)


def test_a_learnt_link_changes_what_is_remembered() -> None:
    costs = costs_with()
    cost_class = costs.acquire(sample())
    worker = worker_with(Residency(64), link=4.0)
    before = costs.extra_seconds(cost_class.pattern, cost_class, worker)
    worker.learn_link(1.0, 8.0)
    after = costs.extra_seconds(cost_class.pattern, cost_class, worker)
    assert before is not None
    assert after == before / 2


def test_new_sizes_of_a_component_change_what_is_remembered() -> None:
    costs = costs_with()
    cost_class = costs.acquire(encode("cat"))
    worker = worker_with(Residency(64))
    assert costs.extra_seconds(cost_class.pattern, cost_class, worker) == 1.0
    costs.know((replace(COMPONENTS[0], upload_bytes=8),))
    assert costs.extra_seconds(cost_class.pattern, cost_class, worker) == 2.0


def test_tasks_that_cost_the_same_have_one_signature_as_long_as_one_exists() -> None:
    costs = costs_with()
    first = costs.acquire(encode("cat"))
    assert costs.acquire(encode("dog")) is first
    assert costs.acquire(encode("dog", patch="x")) is not first
    costs.release(first)
    costs.release(first)
    assert first.tasks == 0
    assert costs.acquire(encode("owl")) is first, "it is remembered for a while"


def test_remembered_signatures_are_bounded() -> None:
    costs = costs_with()
    first = costs.acquire(encode("cat"))
    costs.release(first)
    for number in range(1000):
        costs.release(costs.acquire(encode("cat", activation_bytes=number + 2)))
    assert costs.acquire(encode("cat")) is not first


def learn_patch_seconds(costs: Costs, seconds: float) -> None:
    """From runs on another worker with a GPU of the same kind, with a link as fast as it was thought to be."""
    teacher, spec = worker_with(Residency(64), link=float(MIB)), encode("taught")
    cost_class = costs.acquire(spec)
    costs.learn(spec, cost_class, teacher, report_of(RunCost(10.0, 1.0, 10 * MIB)))
    for _ in range(LEAST_SWITCHES):
        costs.learn(spec, cost_class, teacher, report_of(RunCost(10.0 + seconds, 1.0, 10 * MIB, patch_switches=1)))
    costs.release(cost_class)
    assert costs.patch_seconds(teacher) == pytest.approx(seconds)


@given(
    residencies(),
    st.sampled_from(["", "x", "y"]),
    st.lists(st.sampled_from(["sizes", "patches", "neither"]), min_size=1, max_size=3),
    st.booleans(),
)
def test_what_is_remembered_without_a_task_is_reckoned_as_if_anew(now, patch, changes, is_spare) -> None:
    """Sizes and the seconds of patches change while no task has the signature, or while one has."""
    kept, fresh = costs_with(), costs_with()
    spec, worker = sample(patch=patch, activation_bytes=0), worker_with(now)
    cost_class = kept.acquire(spec)
    kept.extra_seconds(spec, cost_class, worker)
    if is_spare:
        kept.release(cost_class)
    for number, change in enumerate(changes):
        for costs in (kept, fresh):
            if change == "sizes":
                costs.know(tuple(replace(one, upload_bytes=one.upload_bytes + number + 1) for one in COMPONENTS))
            elif change == "patches":
                learn_patch_seconds(costs, 3.0)
    again = kept.acquire(spec)
    assert again is cost_class
    assert kept.extra_seconds(spec, again, worker) == fresh.extra_seconds(spec, fresh.acquire(spec), worker)


def test_a_task_that_comes_again_sees_new_sizes_and_new_patch_seconds() -> None:
    """6 B cross at 4 B/s, or 12 B; other patches on resident weights take half a second, or three."""
    costs = costs_with()
    spec = sample(patch="x")
    cold, patched = worker_with(Residency(64)), worker_with(Residency(64, (Resident(PAINT, 12, "y", 5),)))

    def extra_seconds() -> tuple[float | None, float | None]:
        cost_class = costs.acquire(spec)
        found = costs.extra_seconds(spec, cost_class, cold), costs.extra_seconds(spec, cost_class, patched)
        costs.release(cost_class)
        return found

    before = extra_seconds()
    assert before[0] == 1.5
    costs.know((replace(SPECS[PAINT], upload_bytes=12),))
    assert extra_seconds()[0] == 3.0
    known = extra_seconds()[1]
    learn_patch_seconds(costs, 3.0)
    after = extra_seconds()[1]
    assert known is not None
    assert after == pytest.approx(known + 2.5)


@pytest.mark.parametrize(
    ("workers", "kept"), [(MOST_SPARE_ESTIMATES, MOST_SPARE_ESTIMATES), (MOST_SPARE_ESTIMATES + 1, 0)]
)
def test_a_signature_without_a_task_keeps_what_it_knows_of_so_many_workers(workers: int, kept: int) -> None:
    """While a task has it there is no bound: all of a large pool are asked then."""
    costs = costs_with()
    spec = sample()
    cost_class = costs.acquire(spec)
    pool = [worker_with(Residency(64)) for _ in range(workers)]
    found = [costs.extra_seconds(spec, cost_class, worker) for worker in pool]
    other = costs.acquire(spec)
    costs.release(other)
    assert len(cost_class.cached) == workers
    costs.release(cost_class)
    assert len(cost_class.cached) == kept
    assert costs.acquire(spec) is cost_class
    assert [costs.extra_seconds(spec, cost_class, worker) for worker in pool] == found


@given(
    st.lists(st.tuples(residencies(), st.sampled_from([1.0, 4.0]), st.sampled_from(["", "m", "n"])), max_size=5),
    st.sampled_from([(), (ExecutionMode(4, batch=2, slowdown=1.5), ExecutionMode(2, batch=1, slowdown=2.0))]),
    st.sampled_from([0.0, 1.0, 2.5, 100.0]),
    st.data(),
)
def test_the_least_of_some_workers_is_the_least_of_what_each_of_them_takes(there, divisions, most, data) -> None:
    """Also when it is remembered while files come to and leave their machines, weights change, and links are learnt."""
    asked, plain = costs_with(), costs_with()
    spec = sample(activation_bytes=9, divisions=divisions)
    workers = [worker_with(now, link) for now, link, _ in there]
    for worker, (_, _, node) in zip(workers, there, strict=True):
        assert worker.spec is not None
        worker.spec = replace(worker.spec, node=NodeId(node), host_bytes=12, storage_bytes_per_second=0.5)
    cost_class = asked.acquire(spec)
    for _ in range(4):
        fresh = plain.acquire(spec)
        fresh.cached.clear()
        each = [plain.extra_seconds(spec, fresh, worker) for worker in workers]
        expected = min([most, *(seconds for seconds in each if seconds is not None)])
        assert least_extra_seconds(asked, spec, cost_class, workers, most) == expected
        change = data.draw(st.sampled_from(["files", "weights", "link", "nothing"]))
        if workers and change != "nothing":
            worker = data.draw(st.sampled_from(workers))
            if change == "files":
                key = data.draw(st.sampled_from(sorted(SPECS)))
                for costs in (asked, plain):
                    if (node := costs.nodes.of(worker.spec)) is not None:
                        node.expect(((key, SPECS[key].upload_bytes),))
            elif change == "weights":
                assert worker.capacity_bytes is not None
                worker.update_residency(
                    Residency(worker.capacity_bytes, (Resident(PAINT, data.draw(st.integers(1, 12))),))
                )
            else:
                worker.learn_link(1.0, data.draw(st.sampled_from([1.0, 4.0])))


def test_the_least_counts_running_in_parts_and_files_that_have_left() -> None:
    """One worker that runs it in two parts, half as long again; and one with a machine that has to read the file
    anew."""
    costs = costs_with()
    divided = sample(activation_bytes=40, divisions=(ExecutionMode(20, batch=2, slowdown=1.5),))
    cost_class, small = costs.acquire(divided), worker_with(Residency(41))
    for _ in range(2):
        assert least_extra_seconds(costs, divided, cost_class, [small], 99.0) == 1.5 + 0.5 * divided.run_seconds
    on_node = worker_with(Residency(64))
    assert on_node.spec is not None
    on_node.spec = replace(on_node.spec, node=NodeId("n"), host_bytes=6, storage_bytes_per_second=0.5)
    whole = costs.acquire(sample())
    node = costs.nodes.of(on_node.spec)
    assert node is not None
    node.expect(((PAINT, 6),))
    assert least_extra_seconds(costs, sample(), whole, [on_node], 99.0) == 1.5
    node.expect(((DRAW, 6),))
    assert least_extra_seconds(costs, sample(), whole, [on_node], 99.0) == 12.0


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="weight_bytes"):
        ComponentSpec(COMPONENTS[0].key, COMPONENTS[0].role, 0, 1)
