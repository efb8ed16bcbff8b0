"""Sends a busy worker its next tasks shortly before the end of its run, so that it need not wait for a message.

The core plans the run of a worker and a queue of tasks after it. Rules
1. A worker is sent a queued task if its run and those queued before should end within `send_ahead_seconds`, and if
   placement would start that task there now if the worker was idle. Long runs are thus followed by one queued task,
   and short ones by several.
2. Only tasks with all weights resident then and that evict no others, and of the highest priority that waits: a
   load may be worth less after the run than it seems now, and what to keep, as pinned weights, is known then. No urgent
   task waits, and none that one worker is reserved for. With batches, only tasks that would run alone there
   (`Batching.runs_alone`): the mates of others gather as late as possible.
3. A queue is filled again when half of it is left, and the worker with the least work goes first. Short tasks that are
   queued by one event are sent in one call (`Calls`): a call costs more CPU time than all else about a task.
4. A queued task is asked back if no job needs it, a task of higher priority or an urgent one waits that fits there, its
   worker will end, or another worker is idle while the run before it takes longer than expected. After that the worker
   is sent no other before the end of its run.
5. Until the answer, it counts as queued. One that is not revoked in time runs: it cannot be told from one that was not
   asked back.
6. If no task waits, a task may be queued if tasks in front of it on its worker compute its missing inputs, it alone
   reads them, and the last of them is in front of it. Such a follower runs without a message between the two. It passes
   no other task: readers of what tasks in front of it compute are on workers already, and none waits for the end
   of one of these as its user is at the limit. Its weights are resident and it evicts none; no other GPU is faster, and
   no idle one has its weights next to other ones. If one of the tasks in front does not succeed, the worker reports the
   follower as revoked: it counts as started until then.
7. A worker that may begin a task while it still decodes for the one before reports both ends when the decode is over:
   the tasks behind a decode may have started (`Worker.begun`), as in one call. There, a task that has to run
   alone is not queued, and none is queued behind it.

Pure state; no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from modelpool.pool.values.specs.spec import TaskId, WorkerId
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.batching import Batching, may_share
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import ALONE, Task, TaskStatus
from modelpool.scheduler.model.messages import Command, RevokeTask
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import QueuedTask, Worker, WorkerTable

#: busy workers, earliest end first, that are considered after each event, and those that placement is asked for
MOST_CONSIDERED = 64
MOST_ASKED = 4
#: idle workers that are compared with one that has a task with a follower
MOST_IDLE = 8
#: busy workers, earliest end first, of which one may have a follower soon: all of them would cost more than the event
MOST_COMPARED = 8
#: queued tasks of a worker, and of one call: half of them, so that the worker has others while the next are sent
MOST_QUEUED = 16
MOST_IN_CALL = MOST_QUEUED // 2
#: expected seconds of a queue with which it is filled again, and of a call, as shares of `send_ahead_seconds`. The ends
#: of a call are reported together; then others are left, and the first report is late by at most that time. A call is
#: the smaller one, so that the queue is low when only the last call of it is left
REFILL_SHARE = 0.5
CALL_SHARE = 0.4
#: a tick for a worker comes so much too soon at most, as times are rounded
ROUNDING_SECONDS = 1e-6


class Calls:
    """The calls with which one event sends queued tasks: short ones for the same worker are sent together. Tasks that
    failed before are sent alone, so that they affect no others and a crash shows its cause."""

    def __init__(self, send_ahead_seconds: float) -> None:
        self._most_seconds = CALL_SHARE * send_ahead_seconds
        #: tasks and expected seconds of the latest call of each worker that others may join
        self._open: dict[WorkerId, tuple[int, float]] = {}

    def join(self, worker: Worker, task: Task, seconds: float) -> bool:
        """Add a task of this expected length to the latest call for `worker`; return whether it joins others."""
        if task.alone or task.failures or task.memory_failures or task.crashed or task.oom_steps or task.kept:
            self._open.pop(worker.worker_id, None)
            return False
        count, before_seconds = self._open.get(worker.worker_id, (0, 0.0))
        joins = 0 < count < MOST_IN_CALL and before_seconds + seconds <= self._most_seconds
        self._open[worker.worker_id] = (count + 1, before_seconds + seconds) if joins else (1, seconds)
        return joins


class SendAhead:
    """Chooses the workers that are sent queued tasks, and asks tasks back. Appends its commands to `out`."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        batching: Batching,
        story: Story,
        worker_table: WorkerTable,
        demand: Demand,
        out: list[Command],
    ) -> None:
        self._costs = costs
        self._batching = batching
        self._story = story
        self._worker_table = worker_table
        self._demand = demand
        self._out = out
        self._joins = config.joins
        #: 0: nothing is sent ahead
        self.seconds = config.send_ahead_seconds

    def candidates(self, at: float) -> list[Worker]:
        """Return workers that may be sent a queued task now."""
        found: list[Worker] = []
        if not self.seconds or not self._demand.backlog.count or self._demand.pinned.count:
            return found
        for end, _, worker in self._worker_table.worker_index.busy[:MOST_CONSIDERED]:
            if end - at > self.seconds + ROUNDING_SECONDS:
                break
            if self._takes_none(worker, at - end):
                continue
            if not worker.queue or self._is_low(worker, at):
                found.append(worker)
                if len(found) == MOST_ASKED:
                    break
        return found

    def _takes_none(self, worker: Worker, late_seconds: float) -> bool:
        """Return whether no task may be queued on a busy worker that should have ended its run `late_seconds` ago."""
        if worker.is_barred or worker.drain_deadline is not None or late_seconds > self.seconds:
            return True
        task_id = worker.task_id
        return worker.overlaps_decode and task_id is not None and self._demand.tasks[task_id].alone  # rule 7

    def _is_low(self, worker: Worker, at: float) -> bool:
        """Return whether the queue of a worker is filled again."""
        return (
            len(worker.queue) <= MOST_QUEUED - MOST_IN_CALL
            and _left_seconds(worker, at) + worker.queued_seconds <= REFILL_SHARE * self.seconds
        )

    def follower(self, at: float) -> tuple[Task, Worker] | None:
        """Return a task that reads what the last task of a worker computes, and may be queued behind it now."""
        if not self._is_nothing_passed():
            return None
        for end, _, worker in self._worker_table.worker_index.busy[:MOST_CONSIDERED]:
            if end - at > self.seconds + ROUNDING_SECONDS:
                break
            if self._takes_none(worker, at - end):
                continue
            task = self._follower(worker) if not worker.queue or self.has_room(worker, at) else None
            if task is not None:
                return task, worker
        return None

    def _is_nothing_passed(self) -> bool:
        """Return whether no task waits that one with missing inputs would pass."""
        return not self._demand.backlog.count and not self._demand.pinned.count

    def _follower(self, worker: Worker) -> Task | None:
        """Return the only reader of the last task of `worker`, if the tasks of `worker` compute all its missing inputs
        and it would start there: it finds its weights and evicts none, no other GPU is faster, it has not failed
        before, passes no other reader of these tasks, and is within the limit of its user."""
        demand, last = self._demand, worker.queue[-1].task_id if worker.queue else worker.task_id
        if last is None or worker.members > 1:
            return None
        task = demand.only_reader(last)
        if task is None or task.status is not TaskStatus.BLOCKED:
            return None
        if task.degrees != ALONE:  # several workers may share its run
            return None
        has_failed = task.failures or task.memory_failures or task.crashed or task.unavailable or task.goes_first
        if has_failed or task.alone or task.kept:
            return None
        if task.cost_class.kind.ratio is None or (self._batching.limit_of(task.spec) > 1 and may_share(task)):
            return None
        if demand.fair_queue.is_limited(task):
            return None
        line = {worker.task_id, *[queued.task_id for queued in worker.queue]}
        held = demand.results.held
        for need in task.spec.needs:
            if need not in held and (
                need not in line or demand.tasks[need].is_stopping or demand.only_reader(need) is not task
            ):
                return None
        for task_id in line:
            if task_id is not None and (
                demand.leads_to_others(task_id, task) or demand.fair_queue.is_awaited(demand.tasks[task_id])
            ):
                return None
        costs, cost_class = self._costs, task.cost_class
        if costs.extra_seconds(task.spec, cost_class, worker) != 0.0:
            return None
        if costs.makes_room(cost_class, worker):  # what it evicts is decided with the start
            return None
        workers = self._worker_table.worker_index
        if len(workers.devices) > 1 and not costs.is_fastest(cost_class, worker, workers.devices):
            return None
        if workers.idle_count and self._is_wanted_elsewhere(task, worker):
            return None
        return task

    def _is_wanted_elsewhere(self, task: Task, worker: Worker) -> bool:
        """Return whether an idle worker has all that the task needs, and otherwise not the same weights as `worker`:
        placement would choose it, so that both are free for what they have weights for."""
        for use in task.cost_class.uses[:1]:
            for other in self._worker_table.worker_index.idle_holders(use.component, MOST_IDLE):
                if (
                    other.entries != worker.entries
                    and self._costs.extra_seconds(task.spec, task.cost_class, other) == 0
                ):
                    return True
        return False

    def has_room(self, worker: Worker, at: float) -> bool:
        """Return whether a queue that is being filled takes one more task."""
        is_soon = _left_seconds(worker, at) + worker.queued_seconds <= self.seconds
        return is_soon and len(worker.queue) < MOST_QUEUED

    def next_at(self, at: float) -> float:
        """Return when the next run is so near its end that its worker may be sent a task; infinity if none is."""
        is_waited = self._demand.backlog.count > 0
        if not self.seconds or not (is_waited or self._is_nothing_passed()):
            return inf
        left = MOST_COMPARED  # the end of any of these runs is an event: then it is the turn of others
        for end, _, worker in self._worker_table.worker_index.busy[:MOST_CONSIDERED]:
            if end - at <= self.seconds + ROUNDING_SECONDS or worker.queue or worker.task_id is None:
                continue
            if is_waited or self._follower(worker) is not None:
                return end - self.seconds
            left -= 1
            if not left:
                break
        return inf

    def accepts(self, decision: PlacementDecision, worker: Worker) -> bool:
        """Return whether this decision, which placement makes if the run of `worker` has ended, may be sent ahead."""
        task, backlog = decision.task, self._demand.backlog
        if decision.worker is not worker or decision.why.chosen.extra_seconds or decision.spent_seconds:
            return False
        if task.degrees != ALONE:  # several workers may share its run
            return False
        if worker.overlaps_decode and task.alone:
            return False
        if task.spec.pass_key and self._joins and may_share(task):  # nothing could join it
            return False
        if decision.preload_first is not None or task.memory_failures or task.cost_class.kind.ratio is None:
            return False
        if self._costs.makes_room(task.cost_class, worker):
            return False
        if backlog.urgent and task not in backlog.urgent:
            return False
        oldest = backlog.oldest(worker.capacity_bytes or 0)
        if oldest is not None and oldest.priority > task.priority:
            return False
        return self._batching.runs_alone(self._costs, task, worker)

    def revoke_outdated(self, at: float, is_ending: bool) -> float:
        """Ask queued tasks back that should not start there any more. Returns when to check again."""
        unneeded, self._demand.unneeded = self._demand.unneeded, []
        for task_id in unneeded:
            self._revoke_unneeded(task_id)
        next_check = inf
        backlog, is_any_idle = self._demand.backlog, self._worker_table.worker_index.idle_count > 0
        must_compare = bool(backlog.urgent) or (backlog.count > 0 and self._demand.fair_queue.has_priorities)
        for worker in self._worker_table.with_queued.values():
            reason = late = ""
            if is_ending:
                reason = "the pool ends"
            elif not worker.wanted or worker.drain_deadline is not None:
                reason = f"{worker.worker_id} will end"
            elif not worker.takes_tasks:
                reason = f"the operator wants nothing new on {worker.worker_id}"
            elif is_any_idle:
                late_at = self._late_at(worker)
                if at >= late_at:
                    late = f"{worker.worker_id} is busy for longer than expected, and another worker is idle"
                elif any(not (queued.is_revoked or self._demand.follows(queued.task_id)) for queued in worker.queue):
                    next_check = min(next_check, late_at)
            if not reason and not late and not must_compare:
                continue
            for queued in worker.queue:
                if not queued.is_revoked:
                    task = self._demand.tasks[queued.task_id]
                    first = reason or ("" if task.follows else late) or self._what_goes_first(worker, task, at)
                    if first:
                        self._revoke(worker, queued, first)
        return next_check

    def _late_at(self, worker: Worker) -> float:
        """Return when the run of a worker takes longer than expected, also if it is reported with others."""
        if worker.expected_end is None:
            return -inf
        return worker.expected_end + self.seconds + sum([queued.seconds for queued in worker.joined])

    def _what_goes_first(self, worker: Worker, task: Task, at: float) -> str:
        """Return why another task should start there before a queued one; "" if none should."""
        backlog = self._demand.backlog
        if backlog.count and self._demand.fair_queue.has_priorities:
            oldest = backlog.oldest(worker.capacity_bytes or 0)
            if oldest is not None and oldest.priority > task.priority:
                return f"{oldest.name} waits, of priority {oldest.priority}"
        if backlog.urgent and task.urgent_by == inf and not (task.goes_first or task.overdue):
            for _, _, urgent in backlog.urgent.now(at):
                if urgent.is_for_pass:
                    continue
                if urgent.priority >= task.priority and urgent.cost_class.needed_bytes <= (worker.capacity_bytes or 0):
                    return f"{urgent.name} is urgent"
        return ""

    def ask_back(self, worker: Worker, queued: QueuedTask, reason: str) -> None:
        """Ask a queued task back that must not start there, and those that follow it, unless that was done before."""
        if not queued.is_revoked:
            self._revoke(worker, queued, reason)

    def _revoke_unneeded(self, task_id: TaskId) -> None:
        task = self._demand.tasks.get(task_id)
        worker = None if task is None or task.worker_id is None else self._worker_table.workers.get(task.worker_id)
        for queued in () if worker is None else worker.queue:
            if worker is not None and queued.task_id == task_id and not queued.is_revoked:
                self._revoke(worker, queued, "no job needs it")

    def _revoke(self, worker: Worker, queued: QueuedTask, reason: str) -> None:
        task = self._demand.tasks[queued.task_id]
        queued.is_revoked = worker.is_barred = True
        self._story.note(task, f"asked back from {worker.worker_id}: {reason}")
        self._out.append(RevokeTask(worker.worker_id, worker.incarnation, queued.task_id, task.attempt))
        for other in worker.queue:
            if not other.is_revoked and queued.task_id in self._demand.follows(other.task_id):
                self._revoke(worker, other, f"it would wait for {queued.task_id}")


def soonest_free(workers: Sequence[Worker]) -> Worker:
    """Return the worker with the least work in front of another queued task; of equal ones the first."""
    return min(workers, key=lambda worker: (worker.expected_end or 0.0) + worker.queued_seconds)


def _left_seconds(worker: Worker, at: float) -> float:
    """Return the seconds until the run of a worker should have ended; 0 if it takes longer than expected."""
    return max(0.0, (worker.expected_end or 0.0) - at)
