"""The process of a worker as other processes of its machine see it: whether it runs, and its end by force.

A process id alone may have been reused; with its start it names one process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

import psutil

from modelpool.pool.values.core.process_identity import found_process, process_start
from modelpool.pool.values.specs.spec import NO_NODE, NodeId


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A process on a node.

    started_at  in Unix seconds
    start       see `process_start`; "" if unknown
    """

    pid: int
    started_at: float
    node: NodeId = NO_NODE
    start: str = ""


class ProcessState(Enum):
    """The state of a process that does not answer."""

    RUNS = "runs"  #: it computes, or waits for something that signals can interrupt
    STOPPED = "stopped"  #: by a signal, or by a debugger
    BLOCKED = "blocked"  #: in a call of the kernel that signals cannot interrupt: a disk, a network share, a driver
    GONE = "gone"


_STATES = {
    psutil.STATUS_STOPPED: ProcessState.STOPPED,
    psutil.STATUS_TRACING_STOP: ProcessState.STOPPED,
    psutil.STATUS_DISK_SLEEP: ProcessState.BLOCKED,
    psutil.STATUS_ZOMBIE: ProcessState.GONE,
    psutil.STATUS_DEAD: ProcessState.GONE,
}


def this_process(node: NodeId = NO_NODE) -> WorkerProcess:
    """Return this process, which is on `node`."""
    return WorkerProcess(os.getpid(), psutil.Process().create_time(), node, process_start(os.getpid()))


def process_state(process: WorkerProcess) -> ProcessState:
    """Return the state of a process of this machine."""
    try:
        found = found_process(process.pid, process.start, process.started_at)
        return ProcessState.GONE if found is None else _STATES.get(found.status(), ProcessState.RUNS)
    except psutil.NoSuchProcess:
        return ProcessState.GONE


def kill_process(process: WorkerProcess) -> bool:
    """Kill a process of this machine, stopped or not. False if it is gone, or belongs to another user."""
    try:
        found = found_process(process.pid, process.start, process.started_at)
        if found is None or found.uids().real != os.getuid():
            return False
        found.kill()
    except psutil.Error:
        return False
    return True
