"""Predictions are the plan's; estimates move towards what is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.residency import Residency, Resident, plan
from pool.spec import ComponentSpec, RunCost, TaskId, TaskReport, WorkerId, WorkerSpec
from scheduler.costs import Costs
from scheduler.workers import Worker
from tests.scheduler.world import COMPONENTS, SPECS, encode, sample

MIB = 1 << 20


def worker_with(residency: Residency, link: float = 4.0) -> Worker:
    worker = Worker(WorkerId("a"), 1, spec=WorkerSpec(WorkerId("a"), 1, residency.capacity_bytes, link))
    worker.link_bytes_per_second = link
    worker.believe(residency)
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
    signature = costs.acquire(sample(patch=patch, activation_bytes=activation_bytes))
    for _ in range(3):
        moves = plan(now, signature.uses, SPECS, activation_bytes)
        seconds = costs.extra_seconds(signature.pattern, signature, worker)
        link_bytes = moves.upload_bytes + moves.streamed_bytes
        assert seconds == link_bytes / 4.0 + 0.5 * len(moves.switched)
        setup = costs.setup(signature, worker)
        assert setup is not None
        assert setup.evicted_bytes(worker) == moves.evicted_bytes
        assert costs.residency_after(signature, worker) == moves.after
        other = data.draw(st.sampled_from([sample(patch="z"), encode("cat"), sample(patch=patch)]))
        now = data.draw(st.sampled_from([moves.after, plan(now, other.uses, SPECS, 1).after]))
        worker.believe(now)


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
    signature = costs.acquire(small)
    assert costs.resident_seconds(small, signature, worker) == 10.0
    costs.learn(small, signature, worker, report_of(RunCost(run_seconds=20.0)))
    assert costs.resident_seconds(small, signature, worker) == 20.0
    assert costs.resident_seconds(patched, costs.acquire(patched), worker) == 10.0
    costs.learn(small, signature, worker, report_of(RunCost(run_seconds=10.0)))
    assert 10.0 < costs.resident_seconds(small, signature, worker) < 20.0
    assert costs.resident_seconds(encode("cat"), costs.acquire(encode("cat")), worker) == 1.0


def test_time_spent_streaming_is_not_taken_for_time_spent_computing() -> None:
    costs = costs_with()
    spec = sample(run_seconds=10.0)
    signature = costs.acquire(spec)
    worker = worker_with(Residency(64), link=4.0)
    costs.learn(spec, signature, worker, report_of(RunCost(run_seconds=15.0, streamed_bytes=20)))
    assert costs.resident_seconds(spec, signature, worker) == pytest.approx(10.0)


def test_the_link_is_learnt_from_loads_that_are_large_enough() -> None:
    costs = costs_with(patch_switch_seconds=0.5)
    spec = sample()
    signature = costs.acquire(spec)
    worker = worker_with(Residency(64), link=100.0 * MIB)
    costs.learn(spec, signature, worker, report_of(RunCost(load_seconds=1.0, uploaded_bytes=1000)))
    assert worker.link_bytes_per_second == 100.0 * MIB
    for _ in range(50):
        costs.learn(spec, signature, worker, report_of(RunCost(1.5, 1.0, 10 * MIB, patch_switches=1)))
    assert worker.link_bytes_per_second == pytest.approx(10.0 * MIB, rel=0.1)


def test_a_learnt_link_changes_what_is_remembered() -> None:
    costs = costs_with()
    signature = costs.acquire(sample())
    worker = worker_with(Residency(64), link=4.0)
    before = costs.extra_seconds(signature.pattern, signature, worker)
    worker.learn_link(1.0, 8.0)
    after = costs.extra_seconds(signature.pattern, signature, worker)
    assert before is not None
    assert after == before / 2


def test_new_sizes_of_a_component_change_what_is_remembered() -> None:
    costs = costs_with()
    signature = costs.acquire(encode("cat"))
    worker = worker_with(Residency(64))
    assert costs.extra_seconds(signature.pattern, signature, worker) == 1.0
    costs.know((replace(COMPONENTS[0], upload_bytes=8),))
    assert costs.extra_seconds(signature.pattern, signature, worker) == 2.0


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


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="weight_bytes"):
        ComponentSpec(COMPONENTS[0].key, COMPONENTS[0].role, 0, 1)
