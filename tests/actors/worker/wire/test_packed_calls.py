"""What a driver and the controller send each other packed arrives as it was sent."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from modelpool.actors.control.graph_shapes import BuiltRequest, GraphShapes
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import (
    ClientId,
    DriverEvents,
    JobEnded,
    NodesEnded,
    Submission,
    SubmissionId,
    TaskProgress,
)
from modelpool.actors.worker.wire.packed_calls import PACKED_CALLS, packed_events, travelling, unpacked_events
from modelpool.actors.worker.wire.packing import SMALL_BYTES
from modelpool.pool.values.specs.spec import JobId, Stage, TaskId, WorkerId
from modelpool.pool.values.specs.wire_value import WireValue, evolve
from modelpool.scheduler.model.messages import Outcome
from tests.actors.fakes import MODELS, FakeCatalog

REQUEST = GenerateRequest(model=MODELS[0], prompt="a text", seed=5, steps=2, cfg=2.0)


class Reference:
    """Stands for a reference of Ray, which plain pickle cannot write."""

    def __reduce__(self) -> Any:
        raise AssertionError("references are left to Ray")


def built() -> BuiltRequest:
    return BuiltRequest(*build_graph(REQUEST, JobId("j"), FakeCatalog()))


def test_events_arrive_as_they_were_with_the_references_beside_them() -> None:
    about = SubmissionId("s"), 1, JobId("s-1")
    reference = Reference()
    ends = [
        JobEnded(*about, TaskId("t"), Outcome.SUCCEEDED, built().recipe, reference, None, ()),
        JobEnded(*about, TaskId("t"), Outcome.CANCELLED, None, None, None, ()),
    ]
    running = (TaskProgress(*about, Stage.SAMPLE, WorkerId("w"), 1, 2),)
    nodes = (NodesEnded(*about, ("3",), Stage.DECODE, "w", 1.5),)
    events = DriverEvents(7, tuple(ends), running, (), nodes)
    packed = packed_events(events, [job.result for job in events.ended])
    assert packed[1] == (reference, None)
    assert unpacked_events(packed) == events


@pytest.mark.parametrize(
    ("bytes_of_result", "is_request", "expected"),
    [(1, True, True), (SMALL_BYTES, True, True), (SMALL_BYTES + 1, True, False), (0, True, False), (1, False, False)],
)
def test_small_results_of_requests_travel_with_their_ends(
    bytes_of_result: int, is_request: bool, expected: bool
) -> None:
    """References of small ones took half of the CPU time that an end takes."""
    about, recipe = (SubmissionId("s"), 1, JobId("s-1"), TaskId("t")), built().recipe if is_request else None
    end = JobEnded(*about, Outcome.SUCCEEDED, recipe, Reference(), None, (), result_bytes=bytes_of_result)
    assert bool(travelling([end])) == expected
    assert not travelling([replace(end, result=None)])


def test_small_results_travel_as_far_as_a_message_has_room() -> None:
    """Before, all of an answer did, so that an answer with two of 50 KiB went through the object store."""
    about = SubmissionId("s"), 1, JobId("s-1"), TaskId("t")
    sizes = [SMALL_BYTES // 2, SMALL_BYTES // 2 + 1, SMALL_BYTES // 4, SMALL_BYTES // 4, 1]
    ends = [
        JobEnded(*about, Outcome.SUCCEEDED, built().recipe, Reference(), None, (), result_bytes=size) for size in sizes
    ]
    assert travelling(ends) == (0, 2, 3)


def test_the_arguments_of_a_call_for_events_are_one_value() -> None:
    """Ray packs each argument of a call by itself, with a second value for its name."""
    (sent,) = PACKED_CALLS["events"].pack(ClientId("c"), 3, 1.5) or ()
    assert pickle.loads(sent) == (ClientId("c"), 3, 1.5)


def test_requests_are_packed_unless_ray_must_see_what_they_have() -> None:
    class Own(GenerateRequest):
        """A class of a program, which the controller cannot import."""

    submission = Submission(ClientId("c"), SubmissionId("s"), 0, (REQUEST,), False)
    for name in ("submit", "check_each"):
        pack = PACKED_CALLS[name].pack
        sent = pack(submission)
        assert sent is not None
        assert pickle.loads(sent[0]) == submission
        assert pack(replace(submission, given={TaskId("t"): Reference()})) is None
        assert pack(replace(submission, requests=(Own(model=MODELS[0], prompt="a text"),))) is None


@pytest.mark.parametrize("place", range(6))
def test_a_value_evolves_as_dataclasses_replace_it(place: int) -> None:
    graph = built().graph
    task = graph.job.tasks[-1]
    value: Any = [built(), built().recipe, graph, graph.job, task, graph.works[task.task_id]][place]
    assert isinstance(value, WireValue)
    for field in fields(value):
        assert evolve(value, **{field.name: getattr(value, field.name)}) == value
        assert evolve(value, **{field.name: None}) == replace(value, **{field.name: None}), field.name
    with pytest.raises(KeyError, match="nothing"):
        evolve(value, nothing=1)


def test_graphs_of_other_seeds_know_the_last_tasks_of_their_own_nodes() -> None:
    """They shared what a graph remembers of them: nodes of all but the first of these jobs never ended."""
    first = built()
    tasks = {task.task_id: ("node",) for task in first.graph.job.tasks}
    first = evolve(first, graph=evolve(first.graph, nodes=tasks))
    shapes = GraphShapes()
    shape = shapes.number(REQUEST)
    shapes.note(shape, first)
    wanted = first.graph.job.wanted
    assert first.graph.nodes_ended_by(wanted) == ("node",)
    other = shapes.derived(shape, REQUEST.model_copy(update={"seed": 6}), JobId("k"))
    assert other is not None
    assert other.graph.job.wanted != wanted
    assert other.graph.nodes_ended_by(other.graph.job.wanted) == ("node",)
