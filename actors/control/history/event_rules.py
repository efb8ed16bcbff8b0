"""Decides which events of a pool its history has, and in which words. Pure: the wall-clock time of each is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from modelpool.actors.control.history.history_values import EventKind, HistoryEvent
from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.specs.spec import NO_NODE, NodeId, RunErrorKind, Stage, WorkerId
from modelpool.scheduler.model.messages import (
    Command,
    Cordoned,
    DisruptionsAllowed,
    EndWorker,
    Event,
    NodeDraining,
    Outcome,
    ResolveJob,
    RestartRequested,
    RunEnded,
    StartFailed,
    Uncordoned,
    WorkerDown,
    WorkerUp,
)
from modelpool.scheduler.model.node_groups import NodeGroup
from modelpool.scheduler.model.scaling_record import ScalingRule, ScalingWhy

#: longest text of a reason
MOST_CHARACTERS = 300
#: nodes that one event names
MOST_NAMED = 20
#: a limit that is reached again within this time was not free: work comes and goes
FREE_SECONDS = 600.0
#: seconds without a run that begins or ends after which a submission is stuck
STUCK_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker is: its node, and its group of nodes."""

    node: NodeId = NO_NODE
    group: str = ""


@dataclass(frozen=True, slots=True)
class GroupState:
    """What a history follows of a group of nodes.

    obstacle  why no node of it may be requested now; "" if one may
    """

    name: str
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run that ended with an error: the stage and model of its task, and whether the task will run again."""

    stage: Stage
    model: str
    runs_again: bool


@dataclass(frozen=True, slots=True)
class NodeChange:
    """What a history knows of a node: its name, its group, and why it is gone (None while it is there)."""

    name: str
    group: str = ""
    end: str | None = None


def pool_event(
    event: Event, at: float, places: Mapping[WorkerId, WorkerPlace], names: Mapping[NodeId, str]
) -> HistoryEvent | None:
    """Return the event of the history for an event of the core; None if it has none. `places` are of the workers that
    were up before it, and of a worker that comes up."""
    match event:
        case WorkerUp():
            spec = event.worker
            taken_over = event.residency is not None
            kind = EventKind.WORKER_TAKEN_OVER if taken_over else EventKind.WORKER_UP
            text = f"worker {spec.worker_id} {'was taken over' if taken_over else 'is up'}"
            text += f" ({spec.device_name})" if spec.device_name else ""
            return _of_worker(at, kind, text, spec.worker_id, places, names)
        case WorkerDown():
            text = f"worker {event.worker_id} was lost ({event.cause.value}): {shortened(event.reason)}"
            return _of_worker(at, EventKind.WORKER_LOST, text, event.worker_id, places, names)
        case StartFailed():
            text = f"worker {event.worker_id} did not start ({event.cause.value}): {shortened(event.reason)}"
            same = f"{event.worker_id} {event.cause.value}"
            return _of_worker(at, EventKind.WORKER_START_FAILED, text, event.worker_id, places, names, same)
        case NodeDraining():
            node = names.get(event.node, event.node)
            if event.deadline == inf:
                return HistoryEvent(at, EventKind.NODE_DRAIN_WITHDRAWN, f"node {node} stays", node)
            seconds = max(0.0, event.deadline - event.at)
            reason = f": {shortened(event.reason)}" if event.reason else ""
            return HistoryEvent(at, EventKind.NODE_DRAINING, f"node {node} ends in {seconds:.0f} s{reason}", node)
        case Cordoned() | Uncordoned() | RestartRequested():
            return _order_event(event, at, places, names)
        case DisruptionsAllowed():
            if event.obstacle:
                text = f"nodes are not given up from now on: {shortened(event.obstacle)}"
                return HistoryEvent(at, EventKind.DISRUPTIONS_BARRED, text)
            return HistoryEvent(at, EventKind.DISRUPTIONS_ALLOWED, "nodes may be given up from now on")
        case _:
            return None


def _order_event(
    event: Cordoned | Uncordoned | RestartRequested,
    at: float,
    places: Mapping[WorkerId, WorkerPlace],
    names: Mapping[NodeId, str],
) -> HistoryEvent:
    """Return the event for an order of an operator."""
    node = NO_NODE if isinstance(event, RestartRequested) else event.node
    name = f"node {names.get(node, node)}" if node else f"worker {event.worker_id}"
    match event:
        case RestartRequested():
            seconds = max(0.0, event.deadline - event.at)
            kind, text = EventKind.RESTART_ORDERED, f"{name} is restarted by the operator, within {seconds:.0f} s"
        case Uncordoned():  # also when the node is gone
            kind, text = EventKind.UNCORDONED, f"{name} is uncordoned"
        case Cordoned() if event.deadline is None:
            kind, text = EventKind.CORDONED, f"{name} is cordoned by the operator: nothing new is placed there"
        case Cordoned():
            seconds = 0.0 if event.deadline is None else max(0.0, event.deadline - event.at)
            kind = EventKind.DRAIN_ORDERED
            text = f"{name} is drained by the operator: its workers end within {seconds:.0f} s"
    if node:
        return HistoryEvent(at, kind, text, names.get(node, node))
    return _of_worker(at, kind, text, event.worker_id, places, names)


def command_event(
    command: Command, at: float, places: Mapping[WorkerId, WorkerPlace], names: Mapping[NodeId, str]
) -> HistoryEvent | None:
    """Return the event of the history for a command of the core; None if it has none."""
    match command:
        case EndWorker() if command.worker_id in places:
            text = f"worker {command.worker_id} is ended"
            return _of_worker(at, EventKind.WORKER_ENDED, text, command.worker_id, places, names)
        case ResolveJob() if command.outcome is Outcome.FAILED and command.error is not None:
            kind = command.error.kind.value
            text = f"job {command.job_id} failed: {kind}: {shortened(command.error.message)}"
            return HistoryEvent(at, EventKind.JOB_FAILED, text, same=kind)
        case _:
            return None


def decision_events(why: ScalingWhy, at: float, names: Mapping[NodeId, str]) -> tuple[HistoryEvent, ...]:
    """Return the events for a decision of autoscaling."""
    kind = EventKind.NODES_REQUESTED if why.nodes > 0 else EventKind.NODES_GIVEN_UP
    decided = HistoryEvent(at, kind, why.words, names.get(NodeId(why.node), why.node), group=why.group)
    if why.rule is not ScalingRule.BUDGET:
        return (decided,)
    return (decided, HistoryEvent(at, EventKind.LIMIT_REACHED, ScalingRule.BUDGET.value, same=ScalingRule.BUDGET.name))


def run_event(
    event: RunEnded, run: FailedRun, at: float, places: Mapping[WorkerId, WorkerPlace], names: Mapping[NodeId, str]
) -> HistoryEvent | None:
    """Return the event for a run that ended with an error; None for one that was to stop. Equal ones of a worker are
    counted together."""
    error = event.report.error
    if error is None or error.kind is RunErrorKind.CANCELLED:
        return None
    worker_id = event.report.worker_id
    kind = EventKind.TASK_RETRIED if run.runs_again else EventKind.TASK_FAILED
    again = "; it runs again" if run.runs_again else ""
    text = f"{run.stage.value} of {run.model} on {worker_id}: {error.kind.value}: {shortened(error.message)}{again}"
    return _of_worker(at, kind, text, worker_id, places, names, f"{worker_id} {error.kind.value} {run.model}")


def node_events(
    before: Mapping[NodeId, NodeChange] | None, now: Mapping[NodeId, NodeChange], at: float
) -> tuple[HistoryEvent, ...]:
    """Return the events for nodes that have joined or left since `before`; None: nothing was known."""
    present = {node: each for node, each in now.items() if each.end is None}
    if before is None:
        names = sorted(each.name for each in present.values())
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        text = f"{counted(len(names), 'node')}: {', '.join(names[:MOST_NAMED])}{more}"
        return (HistoryEvent(at, EventKind.NODES_PRESENT, text),) if names else ()
    events = [
        HistoryEvent(at, EventKind.NODE_JOINED, f"node {each.name} has joined", each.name, group=each.group)
        for node, each in present.items()
        if node not in before or before[node].end is not None
    ]
    for node, each in before.items():
        if each.end is None and node not in present:
            end = now[node].end if node in now else "it is not in the cluster any more"
            text = f"node {each.name} has left: {shortened(end or 'unknown')}"
            events.append(HistoryEvent(at, EventKind.NODE_LEFT, text, each.name, group=each.group))
    return tuple(events)


def group_events(before: Sequence[GroupState], now: Sequence[GroupState], at: float) -> tuple[HistoryEvent, ...]:
    """Return the events for groups that begin to back off, and that may grow again."""
    obstacles = {group.name: group.obstacle for group in before}
    events = []
    for group in now:
        if group.obstacle and group.obstacle != obstacles.get(group.name, ""):
            text = f"group {group.name}: {shortened(group.obstacle)}"
            events.append(HistoryEvent(at, EventKind.GROUP_BACKS_OFF, text, group=group.name))
        elif not group.obstacle and obstacles.get(group.name):
            text = f"group {group.name} may grow again"
            events.append(HistoryEvent(at, EventKind.GROUP_USABLE, text, group=group.name))
    return tuple(events)


def full_groups(groups: Sequence[NodeGroup], counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return the groups, or sets of groups (`NodeGroup.part_of`), that have as many nodes as they may, as limits that
    are reached while tasks wait. `counts` are nodes by group."""
    nodes: dict[str, int] = {}
    most: dict[str, int] = {}
    for group in groups:
        name = group.set_name
        nodes[name] = nodes.get(name, 0) + counts.get(group.name, 0)
        most[name] = group.max_nodes
    return tuple(
        f"group {name} has max_nodes, {most[name]}, while tasks wait"
        for name, count in nodes.items()
        if most[name] and count >= most[name]
    )


def limit_events(
    reached_at: Mapping[str, float], now: float, reached: Collection[str], at: float
) -> tuple[HistoryEvent, ...]:
    """Return the events for limits that are reached now, and were not within FREE_SECONDS. `reached_at` is when each
    was reached last, and `now` the time, both on a monotonic clock."""
    new = [text for text in sorted(reached) if now - reached_at.get(text, -inf) > FREE_SECONDS]
    return tuple(HistoryEvent(at, EventKind.LIMIT_REACHED, text, same=text) for text in new)


def trouble_events(before: Sequence[str], now: Sequence[str], at: float) -> tuple[HistoryEvent, ...]:
    """Return the events for detached jobs that wait: each new reason once, and once that there is none any more."""
    new = [trouble for trouble in now if trouble not in before]
    events = [HistoryEvent(at, EventKind.JOBS_ON_HOLD, f"detached jobs wait: {shortened(each)}") for each in new]
    if before and not now:
        events.append(HistoryEvent(at, EventKind.JOBS_CONTINUE, "detached jobs continue"))
    return tuple(events)


def stuck_events(before: frozenset[str], now: Mapping[str, float], at: float) -> tuple[HistoryEvent, ...]:
    """Return the events for submissions that are stuck now, with the seconds since their last run, and for those that
    are no longer."""
    stuck = [
        HistoryEvent(
            at,
            EventKind.SUBMISSION_STUCK,
            f"submission {submission_name(name)}: no run has begun or ended for {seconds / 60:.0f} min",
        )
        for name, seconds in now.items()
        if name not in before
    ]
    continues = [
        HistoryEvent(at, EventKind.SUBMISSION_CONTINUES, f"submission {submission_name(name)} runs again, or has ended")
        for name in sorted(before - now.keys())
    ]
    return (*stuck, *continues)


def submission_name(batch: str) -> str:
    """Return the name that a user knows of a submission, from the id under which its jobs were sent."""
    parts = batch.rsplit(".", 2)
    return parts[0] if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit() else batch


def shortened(text: str) -> str:
    """Return a text in one line, not longer than MOST_CHARACTERS."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."


def _of_worker(
    at: float,
    kind: EventKind,
    text: str,
    worker_id: WorkerId,
    places: Mapping[WorkerId, WorkerPlace],
    names: Mapping[NodeId, str],
    same: str = "",
) -> HistoryEvent:
    place = places.get(worker_id, WorkerPlace())
    return HistoryEvent(at, kind, text, names.get(place.node, place.node), str(worker_id), place.group, same)
