"""Telling a driver which nodes of its workflow need not be computed takes a number of operations that is linear in the
nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from modelpool.actors.control.job_queue import JobQueue
from modelpool.actors.control.parked_jobs import QueuedJob
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.worker.wire.messages import ClientId, NodesEnded, SubmissionId
from modelpool.pool.values.specs.spec import JobId, JobSpec, Stage, TaskId, TaskSpec


class Counted(dict[TaskId, tuple[str, ...]]):
    """Nodes of tasks; counts how often they are looked up."""

    looked_up = 0

    def get(self, *wanted: Any) -> Any:
        self.looked_up += 1
        return super().get(*wanted)


def told(tasks: int) -> tuple[list[NodesEnded], int]:
    """What the driver of a chain of tasks hears, all of which have results; and the look-ups that this takes. Two tasks
    serve each node, as samplers that share a text do."""
    ids = [TaskId(f"t{place}") for place in range(tasks)]
    specs = tuple(
        TaskSpec(name, Stage.OPERATE, (), 1, 0.1, needs=(ids[place - 1],) if place else ())
        for place, name in enumerate(ids)
    )
    nodes = Counted((name, (f"n{place // 2}",)) for place, name in enumerate(ids))
    graph = JobGraph(JobSpec(JobId("j"), specs, ids[-1]), {}, (), nodes=nodes)
    heard: list[NodesEnded] = []
    drivers: Any = SimpleNamespace(
        known={ClientId("c"): SimpleNamespace(events=SimpleNamespace(nodes_ended=heard.append))}
    )
    state: Any = SimpleNamespace(config=SimpleNamespace(groups=()))
    results: Any = SimpleNamespace(has_result=lambda task_id: True)
    nothing: Any = None
    queue = JobQueue(state, nothing, results, drivers)
    queue._tell_found(QueuedJob(ClientId("c"), SubmissionId("s"), 0, graph, None, {}))
    return heard, nodes.looked_up


def test_found_nodes_are_told_in_linear_time() -> None:
    """It was quadratic: 400 found tasks took 160,000 look-ups."""
    heard, looked_up = told(400)
    assert [each.ended for each in heard] == [(f"n{place // 2}",) if place % 2 else () for place in range(400)]
    assert all(each.is_found for each in heard)
    assert looked_up <= 2 * told(200)[1]
    assert looked_up <= 4 * 400
