"""`NodeStates`: what became of the nodes of workflows, for all submissions of a server. Belongs to one event loop.

Nodes that are not here wait, run, or are part of a job that has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from modelpool.actors.worker.wire.messages import NodesEnded

#: nodes that are remembered, some hundred bytes each; jobs that changed least recently are forgotten first
MOST_NODES = 50_000
DONE, FOUND, FAILED, BEGUN = "done", "found", "failed", "begun"


@dataclass(frozen=True, slots=True)
class NodeState:
    """What became of a node.

    state    "done"; "found": it had been computed before; "failed", with a message; "begun": a task of it has ended
    worker   that ran its latest task; "" for none
    seconds  of all its tasks
    stage    of its latest task
    """

    state: str
    stage: str
    worker: str = ""
    seconds: float = 0.0
    message: str = ""


class NodeStates:
    """The states of nodes by submission, place of the request, and node, in the order in which they came."""

    def __init__(self, most: int = MOST_NODES) -> None:
        self._most = most
        self._jobs: OrderedDict[tuple[str, int], dict[str, NodeState]] = OrderedDict()
        self._count = 0
        self._titles: OrderedDict[str, Mapping[str, str]] = OrderedDict()
        self._title_count = 0

    def note(self, submission_id: str, ended: Iterable[NodesEnded]) -> None:
        """Take ends of tasks."""
        for task in ended:
            job = self._jobs.setdefault((submission_id, task.index), {})
            self._jobs.move_to_end((submission_id, task.index))
            before = len(job)
            for name in task.nodes:
                job[name] = _state(task, name, job.get(name))
            self._count += len(job) - before
        while self._count > self._most and len(self._jobs) > 1:
            _, forgotten = self._jobs.popitem(last=False)
            self._count -= len(forgotten)

    def name(self, submission_id: str, titles: Mapping[str, str]) -> None:
        """Remember titles of the nodes of a submission."""
        if titles and submission_id not in self._titles:
            self._titles[submission_id] = titles
            self._title_count += len(titles)
        while self._title_count > self._most and len(self._titles) > 1:
            self._title_count -= len(self._titles.popitem(last=False)[1])

    def titles(self, submission_id: str) -> Mapping[str, str]:
        """Return the titles of the nodes of a submission that have one."""
        return MappingProxyType(self._titles.get(submission_id, {}))

    def of(self, submission_id: str, index: int) -> Mapping[str, NodeState]:
        """Return the states of the nodes of a job."""
        return MappingProxyType(self._jobs.get((submission_id, index), {}))


def _state(task: NodesEnded, name: str, before: NodeState | None) -> NodeState:
    """Return the state of a node after the end of a task of it."""
    stage, seconds = task.stage.value, task.seconds + (before.seconds if before is not None else 0.0)
    if task.message:
        return NodeState(FAILED, stage, task.worker, seconds, task.message)
    if name not in task.ended:
        return NodeState(BEGUN, stage, task.worker, seconds)
    return NodeState(FOUND if task.is_found else DONE, stage, task.worker, seconds)
