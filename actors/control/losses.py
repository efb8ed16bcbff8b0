"""Decides why a worker was lost, from the reports of Ray and of its machine. Pure.

Ray reports every process that ended without its consent in the same way, whether it crashed or was killed. The worker
leaves traces for that (`actors.worker.crash_trace`), which another process of the machine reads after a loss.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from modelpool.actors.worker.crash_trace import CrashEvidence
from modelpool.actors.worker.worker_process import ProcessState
from modelpool.scheduler.model.messages import LossCause


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a worker is gone: a sentence for users, and its cause."""

    reason: str
    cause: LossCause = LossCause.CRASH


class Death(Enum):
    """The end of a worker's process, as Ray reports it."""

    PROCESS_ENDED = "process ended"  #: without Ray's consent; also if Ray reports nothing else
    EXITED = "exited"  #: its Python code ended it (sys.exit)
    START_FAILED = "start failed"  #: its constructor or its environment raised an error
    ENDED_BY_RAY = "ended by Ray"  #: ray.kill, or its owner is gone
    MEMORY_MONITOR = "memory monitor"  #: Ray ended it because its node was short of memory
    NODE_DIED = "node died"  #: the node no longer answers
    NODE_SHUT_DOWN = "node shut down"  #: the node's raylet ended in order
    NODE_DRAINED = "node drained"  #: the node was drained: preempted, or idle


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The worker's machine after the loss.

    answers   whether the node's raylet accepts connections; None: unknown
    draining  whether a drain or preemption notice was known
    evidence  the traces that the worker left; None if nothing could read them
    """

    answers: bool | None = None
    draining: bool = False
    evidence: CrashEvidence | None = None


#: the memory of a node in messages of Ray's memory monitor
_USED_MEMORY = re.compile(r"[\d.]+GB used / [\d.]+GB limit")

#: the deaths that Ray's report explains; the machine need not be examined
EXPLAINED = frozenset(Death) - {Death.PROCESS_ENDED, Death.NODE_DIED, Death.NODE_SHUT_DOWN}


def loss_of(death: Death, message: str, machine: MachineReport = MachineReport()) -> Loss:
    """Return the cause of a death and a sentence for users. `message` is Ray's, in one line."""
    lost_node = Loss("its node was taken back", LossCause.PREEMPTED) if machine.draining else None
    match death:
        case Death.MEMORY_MONITOR:
            used = _USED_MEMORY.search(message)
            detail = f" ({used[0]})" if used else ""
            return Loss(f"its node ran out of host memory{detail}, and Ray ended it", LossCause.OUT_OF_MEMORY)
        case Death.NODE_DRAINED:
            return Loss(f"its node was drained: {message}", LossCause.PREEMPTED)
        case Death.NODE_SHUT_DOWN:
            return lost_node or Loss(f"its node was shut down: {message}", LossCause.NODE_LOST)
        case Death.NODE_DIED:
            return lost_node or Loss("its node is gone without notice", LossCause.NODE_LOST)
        case Death.ENDED_BY_RAY:
            return Loss(f"it was ended through Ray: {message}", LossCause.KILLED)
        case Death.EXITED:
            return Loss(f"its process ended itself: {message}")
        case Death.START_FAILED:
            return Loss(message)
        case Death.PROCESS_ENDED:
            if machine.answers is False:
                return lost_node or Loss("its node does not answer", LossCause.NODE_LOST)
            return _ended_process(message, machine)


def loss_of_silent(state: ProcessState | None, silent_seconds: float) -> Loss:
    """Return why a worker that does not answer is given up; `state` of its process, None if its machine does not tell
    either. Only a process that runs, or waits for a device, can hang because of its task."""
    silence = f"it did not answer for {silent_seconds:.0f} s"
    match state:
        case None:
            return Loss(f"{silence}, and neither did its node", LossCause.NODE_LOST)
        case ProcessState.STOPPED:
            return Loss(f"{silence}: another process stopped it (SIGSTOP, or a debugger)", LossCause.KILLED)
        case ProcessState.BLOCKED:
            return Loss(f"{silence}: its process waits for a device or a file system")
        case ProcessState.GONE:
            return Loss(f"{silence}: its process is gone")
        case ProcessState.RUNS:
            return Loss(f"{silence}, though its process runs")


def _ended_process(message: str, machine: MachineReport) -> Loss:
    """Return why a process ended on a machine that is still up."""
    evidence = machine.evidence
    if evidence is None or not evidence.found:
        return Loss(f"its process ended, and its machine does not tell why: {message}")
    if evidence.fatal_error:
        place = f" in {evidence.place}" if evidence.place else ""
        return Loss(f"its process crashed: {evidence.fatal_error}{place}")
    if evidence.exited:
        return Loss("its process ended itself: a library called exit")
    if evidence.oom_kills:
        return Loss("its machine ran out of host memory, and the kernel killed it", LossCause.OUT_OF_MEMORY)
    if machine.draining:
        return Loss("it was killed while its node was taken back", LossCause.PREEMPTED)
    return Loss("another process killed it (SIGKILL; it left no trace of a crash)", LossCause.KILLED)
