"""Finds out why a worker that is a Ray actor was lost: Ray's error, its record of the actor, and the worker's traces.

Ray's error names the end of a process, rarely its cause. So a process of the same node reads the traces that the
worker left (`actors.worker.crash_trace`): this one, or another worker of the node, since they answer at once, else a
task without resources. Ray's records take at most `EXAMINE_SECONDS`, the traces at most `NODE_ANSWER_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError

from modelpool.actors.control.losses import EXPLAINED, Death, Loss, MachineReport, loss_of, loss_of_silent
from modelpool.actors.ray.node_affinity import on_node
from modelpool.actors.ray.ray_nodes import ActorReport, RayNodes, death_of_node, raylet_answers
from modelpool.actors.ray.state_folder import trace_folder
from modelpool.actors.worker.crash_trace import CrashEvidence, CrashTrace, read_evidence, remove_trace
from modelpool.actors.worker.worker_process import ProcessState, WorkerProcess, kill_process, process_state
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import NO_NODE, NodeId

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

#: calls a function of this module with its argument on the node of another worker; None without such a worker
NeighbourCall: TypeAlias = Callable[[Callable[[Any], Any], Any], Awaitable[Any]]

#: Ray's errors for a worker that is gone; the last two (its memory monitor, a lost node) are not RayActorErrors
WORKER_GONE = (RayActorError, OutOfMemoryError, NodeDiedError)
#: limit for Ray's records of a loss
EXAMINE_SECONDS = 2.0
#: limit for a node to read the traces or the state of a process; a node that does not do it for a silent process counts
#: as lost. A new process for the question takes seconds on a busy machine, and a task is not tried again before the
#: answer, which decides whether it is suspected of the loss
NODE_ANSWER_SECONDS = 10.0
#: of that, for an answer from another worker of the node, which can be slow only if the machine is
_NEIGHBOUR_SECONDS = 0.5
_REASON_CHARACTERS = 600
#: escape sequences in Ray's messages
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_THREADS = 4
#: nodes that are known to be prepared
_NODES_REMEMBERED = 4096


def open_trace(name: str) -> CrashTrace | None:
    """Start leaving traces of this process; None if this machine has no folder for them. A worker works without."""
    try:
        return CrashTrace(trace_folder(), name)
    except (OSError, UserError) as failed:
        logger.warning("the cause of a crash of this worker could not be found later: %s", failed)
        return None


def take_evidence(name: str) -> CrashEvidence:
    """Read and remove the traces of a worker of this machine."""
    folder = trace_folder()
    evidence = read_evidence(folder, name)
    remove_trace(folder, name)
    return evidence


def death_by_error(error: RayError) -> ActorReport:
    """Return what Ray's error says by itself."""
    message = short_reason(error)
    if isinstance(error, OutOfMemoryError):
        return ActorReport(NO_NODE, Death.MEMORY_MONITOR, message)
    if isinstance(error, NodeDiedError):
        return ActorReport(NO_NODE, Death.NODE_DIED, message)
    if isinstance(error, RayActorError) and error.preempted:
        return ActorReport(NO_NODE, Death.NODE_DRAINED, message)
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return ActorReport(NO_NODE, Death.START_FAILED, message)
    return ActorReport(NO_NODE, Death.PROCESS_ENDED, message)


class LossExaminer:
    """Examines losses of the workers of one pool."""

    def __init__(self, nodes: RayNodes, examine_seconds: float = EXAMINE_SECONDS) -> None:
        self._nodes = nodes
        self._examine_seconds = examine_seconds
        #: nodes on which `prepare` was called, oldest first
        self._prepared: dict[NodeId, None] = {}
        #: for tasks on nodes: Ray stores their function in the control service, which may not answer
        self._threads = ThreadPoolExecutor(_THREADS, "ray probes")

    async def loss_cause(
        self, error: RayError, node_id: NodeId, trace: str, neighbour: NeighbourCall | None = None
    ) -> Loss:
        """Return why the worker with these traces, last known on this node ("": unknown), was lost.

        `neighbour` reads traces through another worker of the node. Never raises: what cannot be found out in time is
        left out.
        """
        report, machine = death_by_error(error), MachineReport()
        try:
            async with asyncio.timeout(self._examine_seconds):
                if report.death is Death.PROCESS_ENDED:
                    report = await self._recorded(error, report)
                node_id = node_id or report.node
                if report.death not in EXPLAINED:
                    report, machine = await self._machine(node_id, report)
            if report.death is Death.PROCESS_ENDED and machine.answers:
                async with asyncio.timeout(NODE_ANSWER_SECONDS):
                    evidence = await self._evidence(node_id, trace, neighbour)
                machine = replace(machine, evidence=evidence)
        except TimeoutError:
            logger.info("the loss of a worker could not be examined in time: %s", report.message)
        if report.death is Death.PROCESS_ENDED and machine.answers and machine.evidence is None:
            # a dying node ends its processes one after the other: its raylet may have been the last
            report, machine = await self._machine(node_id, report)
        return loss_of(report.death or Death.PROCESS_ENDED, report.message, machine)

    async def silence_cause(
        self, process: WorkerProcess, silent_seconds: float, neighbour: NeighbourCall | None = None
    ) -> Loss:
        """Return why a worker with this process has not answered for `silent_seconds`. Never raises."""
        state: ProcessState | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NODE_ANSWER_SECONDS):
                state = await self._on_node(process.node, process_state, process, neighbour)
        return loss_of_silent(state, silent_seconds)

    async def kill(self, process: WorkerProcess, neighbour: NeighbourCall | None = None) -> None:
        """Kill a process that takes no messages, if its node answers: Ray needs 5 s for that, and its control
        service. Never raises."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NODE_ANSWER_SECONDS):
                await self._on_node(process.node, kill_process, process, neighbour)

    def prepare(self, node_id: NodeId) -> None:
        """Let a task run on a node that has workers now. Ray keeps its process, which can read traces at once; a new
        one takes seconds on a busy machine. Does not wait for it."""
        if node_id in self._prepared or node_id == ray.get_runtime_context().get_node_id():
            return
        self._prepared[node_id] = None
        for oldest in tuple(self._prepared)[:-_NODES_REMEMBERED]:
            del self._prepared[oldest]
        self._threads.submit(lambda: _probe(node_id, take_evidence).remote(""))

    def close(self) -> None:
        """End the threads; calls that wait are abandoned."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _recorded(self, error: RayError, report: ActorReport) -> ActorReport:
        """Return the record of the control service if it has one of this end, else `report`."""
        actor_id = error.actor_id if isinstance(error, RayActorError) else None
        try:
            recorded = await self._nodes.actor(actor_id) if actor_id else None
        except Exception as failed:
            logger.info("Ray's record of a lost worker cannot be read: %s", failed)
            return report
        if recorded is None or recorded.death is None:
            return report
        return replace(recorded, message=one_line(recorded.message) or report.message)

    async def _machine(self, node_id: NodeId, report: ActorReport) -> tuple[ActorReport, MachineReport]:
        """Return the state of the node; a node that Ray counts as dead explains the loss."""
        try:
            node = (await self._nodes.poll()).node(node_id)
        except Exception as failed:
            logger.info("the nodes of the cluster cannot be read: %s", failed)
            return report, MachineReport()
        if node is None:
            return report, MachineReport()
        draining = self._nodes.was_draining(node_id)
        if node.end is not None:
            death = death_of_node(node.end)
            return ActorReport(node_id, death, node.end_reason or report.message), MachineReport(False, draining)
        return report, MachineReport(await raylet_answers(node), draining)

    async def _evidence(self, node_id: NodeId, trace: str, neighbour: NeighbourCall | None) -> CrashEvidence | None:
        """Read the worker's traces on its node, which may be this one."""
        return await self._on_node(node_id, take_evidence, trace, neighbour)

    async def _on_node(
        self, node_id: NodeId, function: Callable[[Any], _Value], argument: Any, neighbour: NeighbourCall | None
    ) -> _Value | None:
        """Call a function in this process if it is on that node, through another worker of the node, or in a task
        there. None if that fails."""
        if node_id == ray.get_runtime_context().get_node_id():
            return await asyncio.to_thread(function, argument)
        if neighbour is not None:
            with contextlib.suppress(TimeoutError, RayError):
                answer: _Value = await asyncio.wait_for(neighbour(function, argument), _NEIGHBOUR_SECONDS)
                return answer
        loop = asyncio.get_running_loop()
        call = await loop.run_in_executor(self._threads, lambda: _probe(node_id, function).remote(argument))
        try:
            answer = await call
        except RayError as failed:
            logger.info("the node of a lost worker does not answer: %s", failed)
            return None
        except asyncio.CancelledError:
            self._threads.submit(ray.cancel, call)
            raise
        return answer


def _probe(node_id: NodeId, function: Callable[[Any], Any]) -> Any:
    """Return a task without resources that calls `function` on that node, and nowhere else."""
    return ray.remote(function).options(max_retries=0, name="why a worker was lost", **on_node(node_id))


def short_reason(error: RayError) -> str:
    """Shorten Ray's many lines to one, without ids."""
    return one_line(str(error))


def one_line(text: str) -> str:
    """Shorten a message of Ray to one line, without ids and colours. The end of a long one is kept as well as its
    beginning."""
    lines = (line.strip() for line in _COLOURS.sub("", text).splitlines())
    ids = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")
    parts = " ".join(line for line in lines if line and not line.startswith(ids))
    if len(parts) <= _REASON_CHARACTERS:
        return parts
    # an error at the start of the process is the last line of its traceback
    return f"{parts[: _REASON_CHARACTERS // 3]} ... {parts[-2 * _REASON_CHARACTERS // 3 :]}"
