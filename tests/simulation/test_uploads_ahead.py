"""Weights that are brought beside runs, in virtual time: what they cost, and what they are worth.

Proves: bytes cross the link when the run has loaded its own, at the link's speed and not before its end; what came is
in the report; a batch waits less for loads and is done no later; what the core expects is what comes of it; nothing
that the machine has not in memory comes; every event leaves the core consistent, and a record is decided again alike.
"""

from __future__ import annotations

from random import Random

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import NodeId, TaskId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.decisions.placement.preload import PreloadPlanner
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Event, Outcome, Prefetch, Preload, RunEnded, RunTask
from modelpool.scheduler.simulator.cluster import SimulatedGpu, SimulatedNode, VirtualCluster
from modelpool.scheduler.simulator.workloads.generators import all_at_once, poisson
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel

MIX = Mix([InventedModel(f"m{n}") for n in range(6)], ("", "l1"), steps=(20, 30))


def cluster_of(
    jobs: int, seed: int = 1, per_second: float | None = None, storage: float = 12.0 * GIB, gpus: int = 2
) -> VirtualCluster[SchedulerState]:
    """One machine with GPUs that hold some of the models."""
    rng = Random(seed)
    nodes = [SimulatedNode(NodeId("one"), 400 * GIB, storage)]
    cards = [SimulatedGpu(WorkerId(f"gpu-{n}"), 24 * GIB, 4.0 * GIB, node=NodeId("one")) for n in range(gpus)]
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(story_length=None)), cards, nodes)
    cluster.start(MIX.components)
    arrivals = all_at_once(jobs) if per_second is None else poisson(jobs, per_second, rng)
    for submission in MIX.submissions(arrivals, rng):
        cluster.post(submission)
    return cluster


def finished(cluster: VirtualCluster[SchedulerState]) -> VirtualCluster[SchedulerState]:
    cluster.run()
    assert set(cluster.outcomes.values()) == {Outcome.SUCCEEDED}
    return cluster


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told of anything, and nothing is put off for it."""
    monkeypatch.setattr(PreloadPlanner, "plan_all", lambda self, job_came: self._started.clear())
    monkeypatch.setattr(
        "modelpool.scheduler.decisions.placement.expected_completion.can_preload_all", lambda *nothing: False
    )


@pytest.mark.parametrize("per_second", [None, 0.6])
def test_loads_are_waited_for_less(monkeypatch: pytest.MonkeyPatch, per_second: float | None) -> None:
    beside = [finished(cluster_of(120, seed, per_second)) for seed in (1, 2, 3)]
    quiet(monkeypatch)
    before = [finished(cluster_of(120, seed, per_second)) for seed in (1, 2, 3)]
    assert all(one.totals.preloaded_bytes for one in beside)
    assert not any(one.totals.preloaded_bytes for one in before)
    waited = sum(one.totals.load_seconds for one in beside) / sum(one.totals.load_seconds for one in before)
    # of a batch nearly all loads come before the first run of a model, where there is nothing to hide them behind
    assert waited < (1.1 if per_second is None else 0.8)
    assert sum(one.now for one in beside) <= 1.01 * sum(one.now for one in before)


@pytest.mark.parametrize("per_second", [None, 0.6])
def test_every_event_leaves_the_core_consistent(per_second: float | None) -> None:
    cluster = cluster_of(40, per_second=per_second)
    cluster.run(validate)
    assert set(cluster.outcomes.values()) == {Outcome.SUCCEEDED}
    assert cluster.totals.preloaded_bytes


class Watched(SchedulerState):
    """Notes what it is told, and what it believed of the worker just before."""

    def __init__(self) -> None:
        super().__init__(SchedulerConfig(story_length=None))
        self.ends: list[tuple[RunEnded, Residency | None, bool]] = []
        self.events: list[Event] = []

    def handle(self, event: Event):  # type: ignore[no-untyped-def]
        self.events.append(event)
        if isinstance(event, RunEnded):
            worker = self.worker_table.workers[event.report.worker_id]
            self.ends.append((event, worker.residency, bool(worker.preloaded)))
        return super().handle(event)


def watched(seed: int = 1, storage: float = 12.0 * GIB) -> VirtualCluster[Watched]:
    plain = cluster_of(60, seed, storage=storage)
    nodes = [SimulatedNode(NodeId("one"), 400 * GIB, storage)]
    cluster = VirtualCluster(Watched(), plain.gpus, nodes)
    cluster.start(MIX.components)
    for submission in MIX.submissions(all_at_once(60), Random(seed)):
        cluster.post(submission)
    cluster.run()
    return cluster


def test_what_the_core_expects_is_what_comes() -> None:
    """Of the bytes that reports tell of, nearly all were believed in, and of those that were nearly all are told."""
    cluster = watched()
    believed = told = both = 0
    for end, residency, was_told in cluster.core.ends:
        if not was_told or residency is None:
            continue
        expected = {entry.component: entry.resident_bytes for entry in residency.entries}
        found = {entry.component: entry.resident_bytes for entry in end.report.residency.entries}
        believed += sum(expected.values())
        told += sum(found.values())
        both += sum(min(size, found.get(key, 0)) for key, size in expected.items())
    assert told > 0
    assert both > 0.97 * believed
    assert both > 0.97 * told


def test_bytes_cross_the_link_while_runs_compute_and_no_sooner() -> None:
    """Between the end of a run's own load and its end no more arrives than the link brings in that time."""
    cluster = watched()
    link, runs = cluster.gpus[0].link_bytes_per_second, {run.task_id: run for run in cluster.runs}
    before: dict[WorkerId, Residency] = {}
    arrived = 0
    for end, _, _ in cluster.core.ends:
        report = end.report
        run, last = runs[report.task_id], before.get(report.worker_id)
        before[report.worker_id] = report.residency
        if last is None:
            continue
        own = {use.component for use in cluster._tasks[TaskId(report.task_id)][0].uses}
        grown = sum(
            max(0, e.resident_bytes - (there.resident_bytes if (there := last.of(e.component)) else 0))
            for e in report.residency.entries
            if e.component not in own
        )
        arrived += grown
        # bytes on the GPU may be more than those that cross, never more than twice as many here
        assert grown <= 2 * (run.ended_at - run.loaded_at) * link + 1
    assert arrived > 0


def test_nothing_comes_that_the_machine_has_to_read_first() -> None:
    """Its disk is slow and nothing is in its memory: what comes beside a run was read before, by a run or ahead."""
    cluster = watched(storage=0.5 * GIB)
    read: set[str] = set()
    for _, command in cluster.commands:
        if isinstance(command, Preload):
            for task_id in command.task_ids:
                assert {use.component for use in cluster._tasks[task_id][0].uses} <= read
        elif isinstance(command, Prefetch):
            read |= set(command.components)
        elif isinstance(command, RunTask):
            read |= {use.component for use in cluster._tasks[command.task_id][0].uses}


def test_the_same_events_are_decided_alike() -> None:
    cluster = watched(2)
    again = SchedulerState(SchedulerConfig(story_length=None))
    commands = [command for event in cluster.core.events for command in again.handle(event)]
    assert commands == [command for _, command in cluster.commands]
    assert any(isinstance(command, Preload) for command in commands)
