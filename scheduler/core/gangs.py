"""Runs that several workers share (gangs): starts, ends and losses of their members.

Every member gets the same task with its own rank, and ends by itself. Rules
1. The result of the first member ends the task's run; every other member is free when it has ended.
2. If a member ends without success, is lost, or does not start, the others are asked to stop with their states. The
   task is decided about when the last of them has ended: it resumes from the state with the most steps, whichever
   member had it.
3. The cause of a broken run is the first error of a member's own; else a loss; else what members say of each other.
4. After a loss, the task resumes on as many of the workers that are left as it may; after running out of memory, on
   one worker, with the measures of `scheduler.core.recovery`, or on more than before if it never runs on one. A run
   that broke twice without a cause runs on one worker. A break is no failure of the task if the run had done a step:
   each costs at most a step, and their number is limited by the steps.
5. A request to stop a run goes to all of its members. A member that does not end within `stop_grace_seconds` after
   another one has ended without success, or the first one with it, hangs: its worker is ended.
6. Every member's GPU-seconds are charged to the user of the task.

Another member stands for the run in the tables once the first has ended without a result: the task is on that worker.
Pure state; no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.spec import NO_NODE, ComponentKey, RunError, RunErrorKind, TaskReport
from modelpool.scheduler.core.membership import Membership
from modelpool.scheduler.core.node_limits import NodeLimits
from modelpool.scheduler.core.recovery import Recovery
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.costs.gang_costs import residency_in_gang
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.file_verdicts import FileVerdicts
from modelpool.scheduler.model.gang_runs import GangFailure, GangRun
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.kept_states import kept_state, state_id
from modelpool.scheduler.model.messages import (
    Command,
    GangMember,
    LossCause,
    ReleaseResult,
    RunInGang,
    RunTask,
    StopTask,
)
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import Worker, WorkerTable

#: ends that say nothing about the member itself
_OF_OTHERS = frozenset({RunErrorKind.CANCELLED, RunErrorKind.GANG_BROKEN, RunErrorKind.WORKER_LOST})
_OUT_OF_MEMORY = frozenset({RunErrorKind.OUT_OF_VRAM, RunErrorKind.OUT_OF_HOST_MEMORY})
#: breaks without a cause after which a task runs on one worker
MOST_BREAKS = 2


class Gangs:
    """The gangs that run. Methods append the commands that they cause to `out`."""

    def __init__(
        self,
        costs: Costs,
        story: Story,
        worker_table: WorkerTable,
        demand: Demand,
        recovery: Recovery,
        membership: Membership,
        node_limits: NodeLimits,
        verdicts: FileVerdicts,
        out: list[Command],
    ) -> None:
        self._costs = costs
        self._story = story
        self._worker_table = worker_table
        self._demand = demand
        self._recovery = recovery
        self._membership = membership
        self._node_limits = node_limits
        self._verdicts = verdicts
        self._out = out
        #: those with members that have not ended, by id
        self.runs: dict[str, GangRun] = {}
        self._last_number = 0

    def start(self, decision: PlacementDecision, needed: Sequence[tuple[ComponentKey, ...]]) -> None:
        """Send a task, which is assigned to the first worker already, to all members of its gang; `needed` are the
        components that each of them needs afterwards."""
        task, workers = decision.task, (decision.worker, *decision.others)
        self._last_number += 1
        members = tuple([GangMember(worker.worker_id, worker.incarnation) for worker in workers])
        gang = GangRun(
            gang_id=f"{decision.worker.worker_id}#{decision.worker.incarnation}-{self._last_number}",
            task_id=task.name,
            attempt=task.attempt,
            members=members,
            payer=task.payer,
            lead=decision.worker.worker_id,
            left={member.worker_id: None for member in members},
            first_step=0 if task.kept is None else task.kept.step,
        )
        self.runs[gang.gang_id] = gang
        task.degree, task.resume_degree = len(members), 0
        is_known = self._costs.knows_length(task.cost_class, decision.worker, len(members))
        expected_end = self._demand.at + decision.seconds if is_known else None
        for rank, worker in enumerate(workers):
            self._costs.run_started(task.cost_class, worker)
            hints = EvictionHints(needed[rank]) if needed[rank] else NO_HINTS
            assumed = residency_in_gang(self._costs, task.spec, task.cost_class, worker, len(members), hints)
            self._worker_table.gang_started(worker, gang, assumed, expected_end, rank == 0)
            run = RunTask(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                task_id=task.name,
                attempt=task.attempt,
                why=decision.why,
                needed_next=needed[rank],
                oom_steps=task.oom_steps,
                resume=task.kept is not None,
                provisional=bool(task.origins),
            )
            self._out.append(RunInGang(run, gang.gang_id, members, rank))

    def of_report(self, worker: Worker | None, report: TaskReport) -> GangRun | None:
        """Return the gang of which a report tells that this member of it has ended; None if it is not one of a gang."""
        gang = None if worker is None else worker.gang
        is_of_it = gang is not None and (gang.task_id, gang.attempt) == (report.task_id, report.attempt)
        return gang if is_of_it else None

    def member_ended(self, worker: Worker, gang: GangRun, report: TaskReport) -> None:
        """A member has reported its end."""
        if report.error is not None and report.error.kind is RunErrorKind.WORKER_LOST:
            self._membership.end_lost(worker, report.error)
            return
        task = None if gang.has_ended else self._demand.tasks[gang.task_id]
        is_first = worker.worker_id == gang.members[0].worker_id
        origins = None
        if task is not None:
            inputs = (task.origins, self._demand.results.origins_of(task.spec.needs))
            origins = self._verdicts.origins_of(report, inputs)
        counts = origins is not None and task is not None and not task.is_refuted
        self._learn(worker, gang, task if counts else None, report)
        self._demand.fair_queue.pay_share(gang.task_id, gang.attempt, gang.payer, report.cost)
        capacity_bytes, node = worker.capacity_bytes, NO_NODE if worker.spec is None else worker.spec.node
        self._worker_table.gang_ended(worker, report, self._demand.at)
        pool_changed = worker.capacity_bytes != capacity_bytes or not worker.wanted
        if pool_changed:
            self._membership.update_capacities()
        del gang.left[worker.worker_id]
        if task is not None and is_first and report.error is None:
            self._close(gang)
            if origins is None or not counts:
                self._demand.results.stray(task.name)
                self._recovery.does_not_count(task, f"what {worker.worker_id} made does not count")
            else:
                self._demand.task_succeeded(task, report.result_bytes, node, origins)
        else:
            if report.has_state:
                self._take_state(gang, task if counts and not origins else None, report)
            if report.error is not None:
                gang.failures.append(GangFailure(worker.worker_id, report.error))
            self._go_on(gang)
        if pool_changed or (report.error is not None and report.error.components):
            self._membership.recheck_waiting()

    def take_losses(self) -> None:
        """Workers were lost that took part in gangs."""
        losses, self._worker_table.gang_losses = self._worker_table.gang_losses, []
        for loss in losses:
            gang = loss.gang
            del gang.left[loss.worker_id]
            message = f"worker {loss.worker_id} was lost ({loss.cause.value}): {loss.reason}"
            gang.failures.append(GangFailure(loss.worker_id, RunError(RunErrorKind.WORKER_LOST, message), loss.cause))
            self._go_on(gang)

    def spread_stops(self) -> None:
        """Send the requests of this event to stop a run to all members of its gang."""
        asked = [command for command in self._out if isinstance(command, StopTask)]
        if not asked:
            return
        known = {(command.worker_id, command.task_id, command.keep_state) for command in asked}
        for gang in self.runs.values():
            for command in () if gang.has_ended else asked:
                if (command.task_id, command.attempt) != (gang.task_id, gang.attempt):
                    continue
                for member in self._left(gang):
                    if (member.worker_id, command.task_id, command.keep_state) not in known:
                        known.add((member.worker_id, command.task_id, command.keep_state))
                        self._out.append(
                            StopTask(
                                member.worker_id,
                                member.incarnation,
                                command.task_id,
                                command.attempt,
                                command.keep_state,
                            )
                        )

    def hanging(self, at: float, grace_seconds: float) -> list[tuple[Worker, str]]:
        """Return the members that have not ended in time after their run broke or ended, with a message."""
        found: list[tuple[Worker, str]] = []
        for gang in self.runs.values():
            if gang.asked_at is not None and at >= gang.asked_at + grace_seconds:
                message = f"its part of {gang.task_id} has not ended {at - gang.asked_at:.0f} s after the others"
                found += [(self._worker_table.workers[worker_id], message) for worker_id in gang.left]
        return found

    def next_check(self, grace_seconds: float) -> float:
        """Return when a member must have ended; infinity if none must."""
        return min(
            (gang.asked_at + grace_seconds for gang in self.runs.values() if gang.asked_at is not None), default=inf
        )

    # ---- internal steps ---------------------------------------------------------------------------------------------

    def _left(self, gang: GangRun) -> list[GangMember]:
        return [member for member in gang.members if member.worker_id in gang.left]

    def _learn(self, worker: Worker, gang: GangRun, task: Task | None, report: TaskReport) -> None:
        """Learn what a member moved; from the first one also how long the run took on so many GPUs. `task` is None if
        nothing of it counts, or it is over."""
        if report.error is not None:
            self._costs.run_failed(worker)
            spec = None if task is None else task.spec
            self._node_limits.note_missing(worker, report.error, self._demand.at, spec, report.residency)
            return
        is_first = worker.worker_id == gang.members[0].worker_id
        spec = task.spec if task is not None and is_first else None
        if task is not None and spec is not None and report.cost.steps_before:  # the steps of its cost count
            spec = replace(spec, run_seconds=task.full_run_seconds)
        self._costs.learn_share(spec, worker, report, gang.degree)
        if task is not None and is_first:
            self._recovery.ended_well(task)
            self._node_limits.note_found(worker, task.cost_class)

    def _take_state(self, gang: GangRun, task: Task | None, report: TaskReport) -> None:
        """A member ended with its state: the task keeps the one with the most steps. `task` is None if the state does
        not count."""
        worker = self._worker_table.workers.get(report.worker_id)
        node = NO_NODE if worker is None or worker.spec is None else worker.spec.node
        kept = kept_state(report, node)
        known = None if task is None else task.kept
        if task is None or kept is None:
            live = self._demand.tasks.get(gang.task_id)
            if live is None or live.kept is None:
                self._out.append(ReleaseResult(state_id(gang.task_id)))
        elif known is None or kept.step >= known.step:
            self._demand.set_state(task, kept)
            gang.kept = kept

    def _go_on(self, gang: GangRun) -> None:
        """A member has ended, and the run has no result by that: have the others end, or decide about the task."""
        if gang.has_ended:
            if not gang.left:
                self.runs.pop(gang.gang_id, None)
            return
        if not gang.failures:
            return  # the result comes with the first member
        task = self._demand.tasks[gang.task_id]
        if gang.asked_at is None:
            gang.asked_at = self._demand.at
            gang.is_broken = not task.is_stopping
        if not gang.left:
            self._decide(gang, task)
            return
        if gang.lead not in gang.left:
            lead = self._worker_table.workers[next(iter(gang.left))]
            gang.lead, lead.task_id = lead.worker_id, gang.task_id
            task.worker_id, task.incarnation = lead.worker_id, lead.incarnation
        if not task.is_stopping:
            failed = gang.failures[-1]
            self._story.note(task, f"asked to stop with its state: {failed.error.kind.value} on {failed.worker_id}")
            task.pause_requested_at = self._demand.at
            self._out += [
                StopTask(member.worker_id, member.incarnation, task.name, task.attempt, keep_state=True)
                for member in self._left(gang)
            ]

    def _close(self, gang: GangRun) -> None:
        """The run has its result, or its task is decided about; members that are left are awaited."""
        gang.has_ended = True
        gang.asked_at = self._demand.at if gang.asked_at is None else gang.asked_at
        if not gang.left:
            self.runs.pop(gang.gang_id, None)

    def _decide(self, gang: GangRun, task: Task) -> None:
        """All members have ended without a result."""
        self._close(gang)
        if task.is_refuted:
            self._recovery.does_not_count(task, "a file or a result that its run read is not the expected one")
            return
        failure = _cause_of(gang)
        kind = failure.error.kind
        if kind in (RunErrorKind.CANCELLED, RunErrorKind.GANG_BROKEN) and not gang.is_broken and task.kept is not None:
            self._recovery.stopped(task, task.kept)
            return
        if not gang.is_broken and kind is RunErrorKind.GANG_BROKEN:  # the others had stopped, as they were asked to
            failure = GangFailure(failure.worker_id, RunError(RunErrorKind.CANCELLED, failure.error.message))
            kind = RunErrorKind.CANCELLED
        self._change_degrees(gang, task, kind)
        if kind is RunErrorKind.GANG_BROKEN and task.kept is not None and task.kept.step > gang.first_step:
            self._story.note(task, f"{failure.error.kind.value} on {failure.worker_id}: {failure.error.message}")
            self._recovery.stopped(task, task.kept)
            return
        task.worker_id = failure.worker_id
        cause = failure.cause or LossCause.CRASH
        self._recovery.ended_badly(task, failure.error, self._demand.at, cause=cause, may_pin=False)

    def _change_degrees(self, gang: GangRun, task: Task, kind: RunErrorKind) -> None:
        """Choose the numbers of GPUs for the next run of a task after its gang broke: rule 4."""
        if kind in _OUT_OF_MEMORY:
            more = tuple([degree for degree in task.degrees if degree > gang.degree])
            task.degrees = (1,) if 1 in task.degrees else more or task.degrees
        elif kind is RunErrorKind.WORKER_LOST:
            lost = sum([failure.cause is not None for failure in gang.failures])
            fitting = [degree for degree in task.degrees if degree <= gang.degree - lost]
            task.resume_degree = fitting[-1] if fitting else task.degrees[0]
        elif kind is RunErrorKind.GANG_BROKEN:
            task.gang_breaks += 1
            if task.gang_breaks >= MOST_BREAKS and 1 in task.degrees:
                task.degrees = (1,)


def _cause_of(gang: GangRun) -> GangFailure:
    """Return the end of a member that explains best why the run has no result."""
    for failure in gang.failures:
        if failure.error.kind not in _OF_OTHERS:
            return failure
    for failure in gang.failures:
        if failure.error.kind is RunErrorKind.WORKER_LOST:
            return failure
    return gang.failures[0]
