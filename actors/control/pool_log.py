"""`PoolLog`: entries about a pool: its start, its workers, jobs and failures, each with ids. Made of the core's events
and commands; knows no file (`actors.control.log_file`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from modelpool.actors.control.log_file import FIELDS
from modelpool.pool.values.specs.spec import NO_NODE, FileVerdict, JobId, NodeId, RunErrorKind, WorkerId
from modelpool.scheduler.model.messages import (
    Command,
    Cordoned,
    EndWorker,
    Event,
    FilesJudged,
    NodeDraining,
    Outcome,
    PoolEnding,
    ResolveJob,
    RestartRequested,
    RunEnded,
    StartFailed,
    StartWorker,
    Submitted,
    Uncordoned,
    WorkerDown,
    WorkerUp,
)

#: ends of runs that are no failures: the pool or a user wanted them
_WANTED_ENDS = frozenset({RunErrorKind.CANCELLED})
#: longest text of an error in an entry
_MOST_CHARACTERS = 500
#: files with a warning that are remembered, so that each node has one
MOST_TOLD_FILES = 1024


class PoolLog:
    """Writes entries to a logger. `note` is called for every event, and mostly does two dictionary look-ups."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(__name__)
        self._of_event: dict[type, Callable[[Any], None]] = {
            Submitted: self._submitted,
            WorkerUp: self._worker_up,
            WorkerDown: self._worker_down,
            StartFailed: self._start_failed,
            NodeDraining: self._node_draining,
            Cordoned: self._cordoned,
            Uncordoned: self._uncordoned,
            RestartRequested: self._restart_requested,
            RunEnded: self._run_ended,
            FilesJudged: self._files_judged,
            PoolEnding: self._pool_ending,
        }
        self._of_command: dict[type, Callable[[Any, float], None]] = {
            ResolveJob: self._job_ended,
            StartWorker: self._worker_requested,
            EndWorker: self._worker_ended,
        }
        #: submission of the live jobs, on the core's clock
        self._submitted_at: dict[JobId, float] = {}
        #: the nodes of live workers
        self._nodes: dict[WorkerId, NodeId] = {}
        #: the latest files that were found to differ: node, path and hash
        self._told_files: deque[tuple[str, str, str]] = deque(maxlen=MOST_TOLD_FILES)

    def started(self, name: str, epoch: int) -> None:
        """Note that the controller has started. `epoch` counts the controllers of one pool."""
        self._write(logging.INFO, "pool_started", f"pool {name} started, controller {epoch}", pool=name, epoch=epoch)

    def jobs_troubled(self, before: Sequence[str], now: Sequence[str]) -> None:
        """Note why detached jobs wait now: each new reason once, and once that there is none any more."""
        for trouble in now:
            if trouble not in before:
                self._write(logging.WARNING, "jobs_wait", f"detached jobs wait: {_shortened(trouble)}", reason=trouble)
        if before and not now:
            self._write(logging.INFO, "jobs_go_on", "detached jobs continue")

    def note(self, event: Event, commands: Sequence[Command]) -> None:
        """Note an event of the core, and the commands that answered it."""
        handle = self._of_event.get(type(event))
        if handle is not None:
            handle(event)
        for command in commands:
            handle_command = self._of_command.get(type(command))
            if handle_command is not None:
                handle_command(command, event.at)

    def _write(self, level: int, event: str, text: str, **fields: object) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", text, extra={FIELDS: {"event": event, **fields}})

    def _submitted(self, event: Submitted) -> None:
        job = event.job
        at = event.at if event.submitted_at is None else event.submitted_at
        self._submitted_at.setdefault(job.job_id, at)
        about = {"job": job.job_id, "user": job.user, "priority": job.priority, "tasks": len(job.tasks)}
        self._write(logging.INFO, "job_submitted", f"job {job.job_id} of {job.user or 'no user'} submitted", **about)

    def _job_ended(self, command: ResolveJob, at: float) -> None:
        seconds = round(at - self._submitted_at.pop(command.job_id, at), 3)
        about: dict[str, object] = {"job": command.job_id, "outcome": command.outcome.value, "seconds": seconds}
        text, level = f"job {command.job_id} {command.outcome.value} after {seconds:.1f} s", logging.INFO
        if command.error is not None and command.outcome is Outcome.FAILED:
            about |= {"error": command.error.kind.value, "reason": command.error.message}
            text += f": {command.error.kind.value}: {_shortened(command.error.message)}"
            level = logging.ERROR
        self._write(level, "job_ended", text, **about)

    def _worker_requested(self, command: StartWorker, at: float) -> None:
        about = {"worker": command.worker_id, "incarnation": command.incarnation, "group": command.group}
        self._write(logging.INFO, "worker_requested", f"worker {command.worker_id} is starting", **about)

    def _worker_up(self, event: WorkerUp) -> None:
        worker = event.worker
        self._nodes[worker.worker_id] = worker.node
        taken_over = event.residency is not None
        text = f"worker {worker.worker_id} {'was taken over' if taken_over else 'is up'}"
        self._write(
            logging.INFO,
            "worker_up",
            text,
            worker=worker.worker_id,
            incarnation=worker.incarnation,
            node=worker.node,
            taken_over=taken_over,
        )

    def _worker_down(self, event: WorkerDown) -> None:
        self._lost("worker_lost", f"worker {event.worker_id} was lost", event)

    def _start_failed(self, event: StartFailed) -> None:
        self._lost("worker_start_failed", f"worker {event.worker_id} did not start", event)

    def _lost(self, name: str, text: str, event: WorkerDown | StartFailed) -> None:
        self._nodes.pop(event.worker_id, None)
        self._write(
            logging.WARNING,
            name,
            f"{text}: {_shortened(event.reason)}",
            worker=event.worker_id,
            incarnation=event.incarnation,
            cause=event.cause.value,
            reason=event.reason,
        )

    def _worker_ended(self, command: EndWorker, at: float) -> None:
        self._nodes.pop(command.worker_id, None)
        about = {"worker": command.worker_id, "incarnation": command.incarnation}
        self._write(logging.INFO, "worker_ended", f"worker {command.worker_id} is ended", **about)

    def _node_draining(self, event: NodeDraining) -> None:
        text = f"node {event.node} is being drained: {event.reason}"
        self._write(logging.WARNING, "node_draining", text, node=event.node, reason=event.reason)

    def _cordoned(self, event: Cordoned) -> None:
        place = f"worker {event.worker_id}" if event.worker_id else f"node {event.node}"
        about = {"node": event.node, "worker": event.worker_id}
        if event.deadline is None:
            text = f"{place} is cordoned by the operator: nothing new is placed there"
            self._write(logging.INFO, "cordoned", text, **about)
        else:
            seconds = event.deadline - event.at
            text = f"{place} is drained by the operator: its workers end within {seconds:.0f} s"
            self._write(logging.INFO, "drained", text, **about)

    def _uncordoned(self, event: Uncordoned) -> None:
        place = f"worker {event.worker_id}" if event.worker_id else f"node {event.node}"
        about = {"node": event.node, "worker": event.worker_id}
        self._write(logging.INFO, "uncordoned", f"{place} is uncordoned", **about)

    def _restart_requested(self, event: RestartRequested) -> None:
        text = f"worker {event.worker_id} is restarted by the operator, within {event.deadline - event.at:.0f} s"
        self._write(logging.INFO, "restart_requested", text, worker=event.worker_id)

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        if report.error is None or report.error.kind in _WANTED_ENDS:
            return
        self._write(
            logging.WARNING,
            "run_failed",
            f"run of task {report.task_id} on {report.worker_id} failed: {report.error.kind.value}: "
            f"{_shortened(report.error.message)}",
            task=report.task_id,
            attempt=report.attempt,
            worker=report.worker_id,
            incarnation=report.incarnation,
            error=report.error.kind.value,
            reason=report.error.message,
        )

    def _files_judged(self, event: FilesJudged) -> None:
        node = self._nodes.get(event.worker_id, NO_NODE)
        for file in event.files:
            told = (node or event.worker_id, file.path, file.found)
            if file.verdict is FileVerdict.RIGHT or told in self._told_files:
                continue  # each worker of the node finds it out
            self._told_files.append(told)
            self._write(
                logging.WARNING,
                "file_differs",
                f"node {node or 'of ' + event.worker_id}: {file.reason}",
                worker=event.worker_id,
                incarnation=event.incarnation,
                node=node,
                path=file.path,
                expected=file.expected,
                found=file.found,
                components=list(file.components),
            )

    def _pool_ending(self, event: PoolEnding) -> None:
        self._write(logging.INFO, "pool_ending", "the pool is ending; nothing starts any more")


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."
