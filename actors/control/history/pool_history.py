"""`PoolHistory`: the history that a controller keeps: what it notes on the event loop, and the batches for the writer.

Rules
1. `note` is called for every event of the core: it does a few dictionary operations, and copies bytes to the spool.
2. Memory grows with workers, nodes, and live submissions, not with jobs; while the history cannot be written, with what
   it is counted by, up to MOST_WAITING rows of costs and events.
3. Nothing here stops a pool: `trouble` says why the history is not complete.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from modelpool.actors.control.history.event_rules import (
    STUCK_SECONDS,
    GroupState,
    NodeChange,
    WorkerPlace,
    command_event,
    decision_events,
    full_groups,
    group_events,
    limit_events,
    node_events,
    pool_event,
    run_event,
    stuck_events,
    trouble_events,
)
from modelpool.actors.control.history.history_file import USUAL_BOUNDS, HistoryBounds
from modelpool.actors.control.history.history_values import (
    HOUR_SECONDS,
    CostKey,
    EventKind,
    HistoryBatch,
    HistoryEvent,
    RunCharge,
    charge_text,
    event_text,
)
from modelpool.actors.control.history.history_writer import DiskUse, HistoryWriter, WriterStart
from modelpool.actors.control.history.money_meter import MoneyMeter
from modelpool.actors.control.history.run_ledger import RunLedger, oldest_waiting, run_end
from modelpool.actors.control.history.spool import Spool
from modelpool.pool.values.core.user_folders import machine_folder
from modelpool.pool.values.specs.spec import NodeId, RunErrorKind, TaskId, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.messages import (
    Command,
    Cordoned,
    DisruptionsAllowed,
    EndWorker,
    Event,
    NodeDraining,
    Remembered,
    ResolveJob,
    RestartRequested,
    RunEnded,
    RunInGang,
    RunTask,
    StartFailed,
    StartWorker,
    TaskRevoked,
    Uncordoned,
    WorkerDown,
    WorkerUp,
)
from modelpool.scheduler.model.scaling_record import ScalingWhy

logger = logging.getLogger(__name__)

#: interval of batches
BATCH_SECONDS = 1.0
#: interval of looking for submissions that are stuck
LOOK_SECONDS = 30.0
#: rows of costs, and events, that wait in memory for a disk that takes no writes
MOST_WAITING = 10_000
#: stands for the user and model of costs that have no row of their own then
OTHERS = "(other)"


class PoolHistory:
    """The history that one controller keeps. Without a path, nothing is stored, and only what metrics need is
    followed."""

    def __init__(
        self,
        path: Path | None = None,
        spool_folder: Path | None = None,
        bounds: HistoryBounds = USUAL_BOUNDS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`spool_folder` is in memory; its files outlive a process; by default the machine's."""
        self.path = path
        self._spool_folder = spool_folder
        self._bounds = bounds
        self._wall_clock = wall_clock
        self._state = SchedulerState()
        self._ledger = RunLedger(self._state, str)
        self._meter = MoneyMeter()
        self._batch = HistoryBatch()
        #: of the keys of this batch
        self._key_texts: dict[CostKey, str] = {}
        self._writer: HistoryWriter | None = None
        self._spool: Spool | None = None
        self._opened_at = self._look_at = 0.0
        self._places: dict[WorkerId, WorkerPlace] = {}
        self._groups_of: dict[WorkerId, str] = {}
        #: known facts of each node that was seen, by name; None before the first view
        self._names: dict[NodeId, str] = {}
        self._nodes: Mapping[NodeId, NodeChange] | None = None
        self._groups: tuple[GroupState, ...] = ()
        #: when each limit was reached last, on the controller's clock
        self._limits: dict[str, float] = {}
        self._stalled: dict[str, float] = {}
        #: the latest decisions of autoscaling, which the core keeps, and the last of them that was noted
        self._decisions: Sequence[ScalingWhy] = ()
        self._latest_decision: ScalingWhy | None = None
        #: the first bug that kept something from the history; "" without one
        self._mistake = ""
        #: nodes that have joined or left, for the metrics
        self.node_changes = {"joined": 0, "left": 0}
        self._handlers: dict[type, Callable[[Any], None]] = {
            RunEnded: self._run_ended,
            WorkerDown: self._worker_down,
            WorkerUp: self._worker_up,
            StartFailed: self._noted,
            NodeDraining: self._noted,
            Cordoned: self._noted,
            Uncordoned: self._noted,
            RestartRequested: self._noted,
            DisruptionsAllowed: self._noted,
            TaskRevoked: self._task_revoked,
            Remembered: self._remembered,
        }
        self._command_handlers: dict[type, Callable[[Any, float], None]] = {
            RunTask: self._run_sent,
            RunInGang: self._part_sent,
            EndWorker: self._worker_ended,
            StartWorker: self._worker_requested,
            ResolveJob: self._job_ended,
        }

    @property
    def trouble(self) -> str:
        """Why the history is not written, or not complete; "" while it is, or where there is none."""
        return self._mistake if self._writer is None else self._writer.trouble or self._mistake

    @property
    def disk(self) -> DiskUse | None:
        """The disk of the history and the journal; None while it is unknown."""
        return None if self._writer is None else self._writer.disk

    def open(self, state: SchedulerState, model_of: Callable[[TaskId], str], name: str, epoch: int, now: float) -> None:
        """Begin: `state` is the core, of which `note` will be given the events; `model_of` names the model of a live
        task. Opens no file: the writer's thread does."""
        self._state, self._opened_at, self._look_at = state, now, now + LOOK_SECONDS
        self._ledger = RunLedger(state, model_of)
        self._decisions = () if state.autoscaler is None else state.autoscaler.decisions
        if self.path is None:
            return
        prefix = None
        try:
            prefix = spool_prefix(self.path, self._spool_folder)
            self._spool = Spool(prefix, history=self.path.absolute())
        except OSError as failed:
            logger.warning(
                "if this controller is killed, the costs of its last %.0f s are lost: %s", BATCH_SECONDS, failed
            )
        start = WriterStart(self._wall_clock(), f"pool {name}, controller {epoch}")
        own = "" if self._spool is None else self._spool.name
        self._writer = HistoryWriter(self.path, prefix, own, start, self._bounds, self._wall_clock)

    # ---- what the controller notes ----------------------------------------------------------------------------------

    def note(self, event: Event, commands: Sequence[Command]) -> None:
        """Note an event that the core has handled, and its commands. Never raises: that would fail all jobs."""
        try:
            self._note(event, commands)
        except Exception as mistake:
            self._note_mistake(mistake)

    def _note(self, event: Event, commands: Sequence[Command]) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)
        for command in commands:
            command_handler = self._command_handlers.get(type(command))
            if command_handler is not None:
                command_handler(command, event.at)
        if self._decisions and self._decisions[-1] is not self._latest_decision:
            self._note_decisions()

    def nodes_seen(self, nodes: Mapping[NodeId, NodeChange]) -> None:
        """Note the nodes of the cluster, alive or recently dead."""
        events = node_events(self._nodes, nodes, self._wall_clock())
        self._nodes = nodes
        self._names = {node: each.name for node, each in nodes.items()}
        for event in events:
            if event.kind in (EventKind.NODE_JOINED, EventKind.NODE_LEFT):
                self.node_changes["joined" if event.kind == EventKind.NODE_JOINED else "left"] += 1
            self.add(event)

    def jobs_troubled(self, before: Sequence[str], now: Sequence[str]) -> None:
        """Note why detached jobs wait now."""
        for event in trouble_events(before, now, self._wall_clock()):
            self.add(event)

    def add(self, event: HistoryEvent) -> None:
        """Note an event that the caller has decided on."""
        if self._writer is None:
            return
        if len(self._batch.events) >= MOST_WAITING:
            self._batch.dropped += 1
            return
        self._batch.events.append(event)
        if self._spool is not None:
            self._spool.append(event_text(event))

    def _note_mistake(self, mistake: Exception) -> None:
        """A bug here must not end the pool; its status shows it. The first one is logged."""
        if not self._mistake:
            logger.error("the history of the pool is not complete", exc_info=mistake)
            self._mistake = f"the history is not complete ({type(mistake).__name__}: {mistake})"

    # ---- batches ----------------------------------------------------------------------------------------------------

    async def keep_writing(self, now: Callable[[], float], sleep: Callable[[float], Any]) -> None:
        """Hand over batches at intervals, until cancelled. `now` and `sleep` are of the controller's clock."""
        interval_seconds = LOOK_SECONDS if self._writer is None else BATCH_SECONDS
        while True:
            await sleep(interval_seconds)
            try:
                self.beat(now())
            except Exception as mistake:
                self._note_mistake(mistake)

    def beat(self, now: float) -> None:
        """Note what has changed without an event, and hand over what there is, if the writer has stored the batch
        before."""
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look(now)
        if self._writer is None:
            return
        self._follow_groups(now)
        if self._writer.left is not None:
            self._meter.opened(self._writer.left.level)
        self._bill(now)
        if self._batch and self._writer.is_idle:
            self._writer.write(self._taken())

    def close(self, now: float) -> None:
        """Store everything: the pool ends in order. Waits some seconds at most. Idempotent."""
        if self._writer is None:
            return
        self.add(HistoryEvent(self._wall_clock(), EventKind.POOL_ENDED, "the pool has ended"))
        self._bill(now)
        last = self._taken()
        last.is_last, last.level = True, 0.0  # the account of the next pool begins at 0
        writer, self._writer = self._writer, None
        if writer.close(last) and self._spool is not None:
            self._spool.close()
        self._spool = None

    def _taken(self) -> HistoryBatch:
        taken, self._batch = self._batch, HistoryBatch()
        self._key_texts.clear()
        # a worker may be up before its node is seen
        taken.events = [_with_name(event, self._names) for event in taken.events]
        taken.level = self._meter.level
        if self._spool is not None:
            taken.spool, taken.sequence = self._spool.name, self._spool.turn()
        return taken

    def _charge(self, charge: RunCharge) -> None:
        if self._writer is None:
            return
        if len(self._batch.costs) >= MOST_WAITING and charge.key not in self._batch.costs:
            key = CostKey(charge.key.hour, OTHERS, OTHERS, "", charge.key.group)
            charge = RunCharge(key, charge.end, charge.seconds, charge.load_seconds, charge.price)
        self._batch.charge(charge)
        if self._spool is not None:
            self._spool.append(charge_text(charge, self._key_texts))

    def _bill(self, now: float) -> None:
        """Count what nodes have cost since the last time, for the groups that have some now."""
        scaler = self._state.autoscaler
        if scaler is None:
            return
        money = self._meter.advance(scaler.spent_until(now), now - self._opened_at)
        if not money:
            return
        counts = scaler.node_counts()
        rates = {name: record.group.price_per_hour * counts.get(name, 0) for name, record in scaler.groups.items()}
        total, hour = sum(rates.values()), self._hour()
        shares = {name: rate / total for name, rate in rates.items() if rate} if total else {"": 1.0}
        for name, share in shares.items():
            key = (hour, name)
            self._batch.node_costs[key] = self._batch.node_costs.get(key, 0.0) + money * share

    def _follow_groups(self, now: float) -> None:
        scaler = self._state.autoscaler
        if scaler is None:
            return
        at, counts = self._wall_clock(), scaler.node_counts()
        groups = tuple(
            GroupState(name, record.reason if record.blocked_until > now else "")
            for name, record in scaler.groups.items()
        )
        for event in group_events(self._groups, groups, at):
            self.add(event)
        self._groups = groups
        reached = full_groups(self._state.config.groups, counts) if self._state.demand.backlog.count else ()
        for event in limit_events(self._limits, now, reached, at):
            self.add(event)
        self._limits |= dict.fromkeys(reached, now)

    def _look(self, now: float) -> None:
        before = frozenset(name for name, seconds in self._stalled.items() if seconds >= STUCK_SECONDS)
        self._stalled = self._ledger.stalled(now)
        stuck = {name: seconds for name, seconds in self._stalled.items() if seconds >= STUCK_SECONDS}
        for event in stuck_events(before, stuck, self._wall_clock()):
            self.add(event)

    def _hour(self) -> int:
        return int(self._wall_clock() // HOUR_SECONDS)

    # ---- for metrics ------------------------------------------------------------------------------------------------

    def stalled_seconds(self, now: float) -> float:
        """Return the longest time for which no run of a submission has begun or ended that has unfinished jobs and no
        running task; 0 without any."""
        return max(self._ledger.stalled(now).values(), default=0.0)

    def waiting_seconds(self, now: float) -> float:
        """Return for how long the oldest task that could start has waited; 0 if none waits."""
        return oldest_waiting(tuple(self._state.demand.tasks.values()), now)

    # ---- events and commands of the core ----------------------------------------------------------------------------

    def _note_decisions(self) -> None:
        """Note the decisions of autoscaling since the latest one that is known."""
        new = list(takewhile(lambda why: why is not self._latest_decision, reversed(self._decisions)))
        self._latest_decision = self._decisions[-1]
        for why in reversed(new):
            for event in decision_events(why, self._wall_clock(), self._names):
                self.add(event)

    def _noted(self, event: Event) -> None:
        found = pool_event(event, self._wall_clock(), self._places, self._names)
        if found is not None:
            self.add(found)

    def _worker_up(self, event: WorkerUp) -> None:
        spec = event.worker
        self._lose(spec.worker_id, spec.incarnation - 1, event.at)
        known = self._state.worker_table.workers.get(spec.worker_id)
        group = self._groups_of.get(spec.worker_id, "") if known is None else known.group
        self._places[spec.worker_id] = WorkerPlace(spec.node, group)
        self._noted(event)

    def _worker_down(self, event: WorkerDown) -> None:
        self._lose(event.worker_id, event.incarnation, event.at)
        self._noted(event)
        self._places.pop(event.worker_id, None)

    def _task_revoked(self, event: TaskRevoked) -> None:
        self._ledger.revoked(event.worker_id, event.task_id, event.at)

    def _remembered(self, event: Remembered) -> None:
        self._meter.remembered(event.memory.spent)

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        if report.error is not None and report.error.kind is RunErrorKind.WORKER_LOST:  # it reports its own end
            self._lose(report.worker_id, report.incarnation, event.at)
            self._noted(WorkerDown(event.at, report.worker_id, report.incarnation, report.error.message))
            return
        found = self._ledger.ended(report.worker_id, report.incarnation, report.task_id, report.attempt, event.at)
        if found is None or self._writer is None:
            return
        task, model, lora, group = found
        charged = self._state.demand.fair_queue.latest_charge
        if charged is not None and charged[:2] == (report.task_id, report.attempt):
            cost, error = report.cost, report.error
            self._charge(
                RunCharge(
                    CostKey(self._hour(), str(charged[2]), model, lora, group),
                    run_end(None if error is None else error.kind, report.has_state),
                    cost.load_seconds + cost.run_seconds,
                    cost.load_seconds,
                    self._ledger.prices.get(group, 0.0),
                )
            )
        if report.error is not None:
            said = run_event(event, self._ledger.failed(task, model), self._wall_clock(), self._places, self._names)
            if said is not None:
                self.add(said)

    def _lose(self, worker_id: WorkerId, incarnation: int, at: float) -> None:
        """The process of this incarnation is gone, and those before it."""
        for charge in self._ledger.lost(worker_id, incarnation + 1, at, self._hour()):
            self._charge(charge)

    def _run_sent(self, command: RunTask, at: float) -> None:
        self._ledger.sent(command, at, self._writer is not None)

    def _part_sent(self, command: RunInGang, at: float) -> None:
        self._ledger.sent(command.run, at)

    def _worker_requested(self, command: StartWorker, at: float) -> None:
        self._groups_of[command.worker_id] = command.group
        self._say(command)

    def _worker_ended(self, command: EndWorker, at: float) -> None:
        self._lose(command.worker_id, command.incarnation, at)
        self._say(command)
        self._places.pop(command.worker_id, None)
        self._groups_of.pop(command.worker_id, None)

    def _job_ended(self, command: ResolveJob, at: float) -> None:
        if command.error is not None:
            self._say(command)

    def _say(self, command: Command) -> None:
        event = command_event(command, self._wall_clock(), self._places, self._names)
        if event is not None:
            self.add(event)


def _with_name(event: HistoryEvent, names: Mapping[NodeId, str]) -> HistoryEvent:
    name = names.get(NodeId(event.node)) if event.node else None
    return event if name is None else replace(event, node=name)


def history_path(journal: Path) -> Path:
    """Return the file of the history beside a journal: NAME.history.sqlite for NAME.journal.sqlite and NAME.sqlite."""
    name = journal.name.removesuffix(journal.suffix).removesuffix(".journal")
    return journal.with_name(f"{name}.history.sqlite")


def spool_prefix(path: Path, folder: Path | None = None) -> Path:
    """Return the beginning of the paths of the spools of a history. Its folder is in memory where the machine has such
    a one: then records outlive the process, and wait for no disk."""
    if folder is None:
        shared = Path("/dev/shm")
        folder = shared if shared.is_dir() and os.access(shared, os.W_OK | os.X_OK) else machine_folder()
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]
    return folder / f"modelpool-{os.getuid()}-{digest}"
