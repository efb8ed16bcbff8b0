"""The graph of a job for the page: places of the nodes, and states that follow from known facts."""

from __future__ import annotations

from modelpool.actors.http.page.node_graph import MOST_DRAWN, graph_json, places_of
from modelpool.actors.http.service.node_outlines import NodeOutline
from modelpool.actors.http.service.node_states import NodeState, NodeStates
from modelpool.actors.http.service.submissions import RunningTask
from modelpool.actors.worker.wire.messages import NodesEnded, SubmissionId
from modelpool.pool.values.specs.spec import JobId, Stage

CHAIN = tuple(
    NodeOutline(name, "sample", "m", {} if source is None else {"latent": source})
    for name, source in (("a", None), ("b", "a"), ("c", "b"), ("d", "c"))
)


def words(states: dict[str, NodeState], running: tuple[RunningTask, ...] = (), end: str = "") -> list[str]:
    return [node["state"] for node in graph_json(CHAIN, states, running, end, {})["nodes"]]


def test_states_follow_from_what_is_known() -> None:
    run = RunningTask(0, "j-0", "sample", "gpu", 3, 8, ("c",))
    failed = {"c": NodeState("failed", "sample", "gpu", 1.0, "out of paint")}
    cases = {
        "nothing yet": (words({}), ["waiting"] * 4),
        "what a running node reads has ended": (words({}, (run,)), ["done", "done", "running", "waiting"]),
        "the job succeeded": (words({}, end="succeeded"), ["done"] * 4),
        "one failed": (words(failed, end="failed"), ["not run", "not run", "failed", "not run"]),
        "a failed task is repeated": (words(failed, (run,)), ["done", "done", "running", "waiting"]),
        "cancelled": (words({"a": NodeState("found", "sample")}, end="cancelled"), ["found", *["not run"] * 3]),
    }
    assert {name: found for name, (found, expected) in cases.items() if found != expected} == {}


def test_a_node_is_behind_everything_that_it_reads() -> None:
    side = NodeOutline("mask", "mask", "", {})
    last = NodeOutline("e", "operation", "image_composite", {"image": "d", "mask": "mask"})
    places = places_of((*CHAIN, side, last))
    assert [places[name][0] for name in ("a", "b", "c", "d", "mask", "e")] == [0, 1, 2, 3, 3, 4]
    assert len({*places.values()}) == len(places), "no two nodes have one place"
    long = tuple(NodeOutline(str(n), "operation", "", {"image": str(n - 1)} if n else {}) for n in range(1000))
    drawn = graph_json(long, {}, (), "", {})
    assert (len(drawn["nodes"]), drawn["left_out"]) == (MOST_DRAWN, 1000 - MOST_DRAWN)


def test_states_of_nodes_have_a_bound_and_seconds_add_up() -> None:
    def ended(index: int, *nodes: str, done: bool = True, seconds: float = 1.0) -> NodesEnded:
        names = nodes if done else ()
        return NodesEnded(SubmissionId("s"), index, JobId("j"), nodes, Stage.SAMPLE, "gpu", seconds, names)

    book = NodeStates(most=4)
    book.note("s", [ended(0, "a", done=False, seconds=0.5), ended(0, "a"), ended(0, "b")])
    assert book.of("s", 0)["a"] == NodeState("done", "sample", "gpu", 1.5)
    book.note("s", [ended(1, "a", "b"), ended(2, "a")])
    assert [len(book.of("s", index)) for index in range(3)] == [0, 2, 1], "the oldest job is forgotten"
