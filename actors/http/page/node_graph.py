"""The graph of the nodes of a job as the web page draws it: columns by depth, and the state of each node. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelpool.actors.http.service.node_outlines import GIVEN, NodeOutline
from modelpool.actors.http.service.node_states import BEGUN, DONE, FAILED, FOUND, NodeState
from modelpool.actors.http.service.shown_messages import shown_message
from modelpool.actors.http.service.submissions import RunningTask

#: nodes that are drawn: those nearest to the output
MOST_DRAWN = 400
#: characters of a title, of the words below it, and of a message
_MOST_TITLE, _MOST_WHAT, _MOST_MESSAGE = 80, 120, 1000
#: states besides the ones of `NodeState`: it waits, it runs, an image of the user, the job ended without it
WAITING, RUNNING, IS_GIVEN, NOT_RUN = "waiting", "running", "given", "not run"


def graph_json(
    outlines: Sequence[NodeOutline],
    states: Mapping[str, NodeState],
    running: Sequence[RunningTask],
    end: str,
    titles: Mapping[str, str],
) -> dict[str, Any]:
    """Return the nodes of a job with their places and states. `end` is how the job has ended, "" before; `running` are
    its tasks. What nodes that run or have ended read has ended, too."""
    drawn = outlines[-MOST_DRAWN:]
    places = places_of(drawn)
    steps = {node: task for task in running for node in task.nodes}
    ended = _ended(drawn, states, steps)
    nodes = []
    for node in drawn:
        state = states.get(node.node_id)
        word = _word(node, state, node.node_id in steps, node.node_id in ended, end)
        task = steps.get(node.node_id)
        nodes.append(
            {
                "id": node.node_id,
                "title": _title(node.node_id, titles)[:_MOST_TITLE],
                "kind": node.kind,
                "what": node.what[:_MOST_WHAT],
                "column": places[node.node_id][0],
                "row": places[node.node_id][1],
                "reads": [[name, source] for name, source in node.inputs.items() if source in places],
                "state": word,
                "stage": "" if task is None else task.stage,
                "step": 0 if task is None else task.step,
                "steps": 0 if task is None else task.steps,
                "worker": task.worker if task is not None else "" if state is None else state.worker,
                "seconds": None if state is None or not state.seconds else round(state.seconds, 3),
                "message": "" if word != FAILED or state is None else shown_message(state.message)[:_MOST_MESSAGE],
            }
        )
    return {"nodes": nodes, "left_out": len(outlines) - len(drawn)}


def _title(node_id: str, titles: Mapping[str, str]) -> str:
    """Return the title of a node: of one that was made of another, the title of that with the word behind the slash."""
    known = node_id.rstrip("'")
    if known in titles:
        return titles[known]
    source, _, word = known.rpartition("/")
    return f"{titles[source]}, {word}" if source in titles else node_id


def places_of(outlines: Sequence[NodeOutline]) -> dict[str, tuple[int, int]]:
    """Return the column and the row of each node: it is one column behind the last one that it reads, and in the order
    of the rows of these."""
    depths: dict[str, int] = {}
    for node in outlines:
        depths[node.node_id] = 1 + max((depths[each] for each in node.inputs.values() if each in depths), default=-1)
    # a node that reads nothing is next to the first node that reads it, so that lines are short
    first_reader: dict[str, int] = {}
    for node in outlines:
        for source in node.inputs.values():
            first_reader[source] = min(first_reader.get(source, len(outlines)), depths[node.node_id])
    columns: dict[int, list[NodeOutline]] = {}
    for node in outlines:
        is_source = not any(source in depths for source in node.inputs.values())
        depth = max(0, first_reader.get(node.node_id, 1) - 1) if is_source else depths[node.node_id]
        columns.setdefault(depth, []).append(node)
    places: dict[str, tuple[int, int]] = {}
    for depth in sorted(columns):
        found = columns[depth]

        def middle(node: NodeOutline) -> float:
            rows = [places[source][1] for source in node.inputs.values() if source in places]
            return sum(rows) / len(rows) if rows else len(outlines)

        for row, node in enumerate(sorted(found, key=middle)):
            places[node.node_id] = depth, row
    return places


def _ended(
    outlines: Sequence[NodeOutline], states: Mapping[str, NodeState], running: Mapping[str, RunningTask]
) -> set[str]:
    """Return the nodes that others have read, which run or have ended."""
    known: set[str] = set()
    for node in reversed(outlines):
        state = states.get(node.node_id)
        has_begun = node.node_id in running or (state is not None and state.state in (DONE, BEGUN))
        if has_begun or node.node_id in known:
            known.update(node.inputs.values())
    return known


def _word(node: NodeOutline, state: NodeState | None, runs: bool, was_read: bool, end: str) -> str:
    if node.kind in GIVEN:
        return IS_GIVEN
    if state is not None and state.state in (DONE, FOUND):
        return state.state
    if end == "succeeded" or was_read:
        return DONE
    if end:
        return FAILED if state is not None and state.state == FAILED else NOT_RUN
    return RUNNING if runs else WAITING
