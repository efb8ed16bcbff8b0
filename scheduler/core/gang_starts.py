"""Starts runs on several GPUs, keeps GPUs free for those that never run on one, and changes their number of GPUs.

Rules (which workers share a run: `scheduler.decisions.placement.gang_choice`)
1. A run that placement would start on one worker is widened, if `choose_gang` finds that worth it.
2. Tasks that never run on one worker wait apart, in the order of all tasks. They start where enough workers of one
   machine are idle, if no earlier task waits for these, or nothing does.
3. For the first of them, if it comes before all other waiting tasks, the workers of the machine that are free soonest
   are held: they take nothing else, except runs that should end before the last of them is free. A hold ends after
   `MOST_HOLD_SECONDS`, and the next one may begin `REST_SECONDS` later: a run of unknown length holds up no others for
   long.
4. A run continues on more GPUs, from its state, if GPUs are idle for which nothing waits, and that saves at least
   `LEAST_SAVED` of the time that is left, and `LEAST_SAVED_SECONDS`; or if it would miss its deadline otherwise.
5. It continues on fewer GPUs if tasks wait that would start there, longer than `MOST_WAIT_SECONDS`, and these save more
   time together than the run loses; or at once, if one of them would miss its deadline otherwise; unless the run would
   then miss its own. Where no run can do with fewer, one on one GPU that has time to spare stops for a task that would
   miss its deadline otherwise.
6. The price of a change: the rest of a step, loads, and the time until the workers have found each other. One run
   changes at a time, each at most `MOST_RESIZES` times, and none in its last `LEAST_LEFT_SECONDS`.

Pure state; no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import inf

from modelpool.pool.values.specs.spec import NodeId, Stage, TaskId
from modelpool.scheduler.core.gangs import Gangs
from modelpool.scheduler.core.membership import Membership
from modelpool.scheduler.core.preemption import Preemption
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.costs.gang_costs import gang_extra_seconds, moving_seconds, streams
from modelpool.scheduler.decisions.placement.gang_choice import GangChoice, choose_gang
from modelpool.scheduler.decisions.placement.gang_load import GangLoad, reserved_gpus, reserved_until
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision, PlacementQuery, make_decision
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.gang_times import FORMING_SECONDS, prior_seconds
from modelpool.scheduler.model.jobs import ALONE, Task
from modelpool.scheduler.model.kept_states import step_seconds
from modelpool.scheduler.model.placement_record import PlacementOption, PlacementRule, Why
from modelpool.scheduler.model.workers import Worker, WorkerTable

#: tasks that never run on one worker, in order, that are considered
MOST_SHARED_ONLY = 8
#: how long workers are held for a run at most, and the time until the next hold then
MOST_HOLD_SECONDS = 120.0
REST_SECONDS = 30.0
#: lines of waiting tasks, and tasks of each, that are considered for held workers; a run may take this part of the time
#: until these are needed
MOST_FILLING = 32
MOST_OF_A_LINE = 4
GAP_SHARE = 0.9
#: see the rules
LEAST_SAVED = 0.25
LEAST_SAVED_SECONDS = 2.0
MOST_WAIT_SECONDS = 2.0
MOST_RESIZES = 4
LEAST_LEFT_SECONDS = 3.0
#: lines of waiting tasks of which a deadline may need a change
MOST_LATE = 8
#: busy workers that are considered for a change
MOST_BUSY = 64
#: a deadline is met with this much time to spare, and no more than this part of the work that is left
DEADLINE_SPARE_SECONDS = 0.5
SPARE_SHARE = 0.1


class GangStarts:
    """Chooses the runs that several workers share, and how many share one that runs."""

    def __init__(
        self,
        costs: Costs,
        worker_table: WorkerTable,
        demand: Demand,
        membership: Membership,
        preemption: Preemption,
        gangs: Gangs,
    ) -> None:
        self._costs = costs
        self._worker_table = worker_table
        self._demand = demand
        self._membership = membership
        self._preemption = preemption
        self.gangs = gangs
        self.load = GangLoad()
        #: the task that workers are held for, since when, and when they should all be free
        self.held_for: TaskId | None = None
        self._held_since = 0.0
        self._held_until = inf
        self._rests_until = 0.0

    def pass_time(self, at: float) -> None:
        """Account for the load until `at`."""
        index = self._worker_table.worker_index
        busy = float(index.busy_count)
        for gang in self.gangs.runs.values():
            task = self._demand.tasks.get(gang.task_id)
            if task is not None and not gang.has_ended:
                lead = self._worker_table.workers[gang.lead]
                needed = self._whole_seconds(task, lead, 1) / max(1e-9, self._whole_seconds(task, lead, gang.degree))
                busy -= max(0.0, gang.degree - needed)
        self.load.pass_time(at, index.count, busy)

    # ---- starts ------------------------------------------------------------------------------------------------------

    def widened(self, query: PlacementQuery, decision: PlacementDecision) -> PlacementDecision:
        """Return the decision to start its task on several workers, or `decision` itself."""
        if not self.load.is_known:
            self.pass_time(query.at)
        alone = (decision.worker, decision.why.chosen.extra_seconds)
        deadline = self._deadline(decision.task, query.at)
        reserved = self._reserved(query.at)
        choice = choose_gang(query, decision.task, alone, self.load.most_times, deadline, reserved)
        return decision if choice is None else _shared(decision.task, choice, decision.why, decision.spent_seconds)

    def shared_only(self, query: PlacementQuery) -> PlacementDecision | None:
        """Return the start of a task that never runs on one worker; None if each of them waits. Holds workers for the
        first one then."""
        tasks = self._demand.backlog.shared_only.first(MOST_SHARED_ONLY)
        if self.held_for is not None and self._is_hold_over(tasks, query.at):
            self._release(query.at)
        for task in tasks:
            is_first = self._is_first(task)
            is_held = task.name == self.held_for
            if is_held:
                self._hold([], None)  # of the held ones, those that are idle now
            choice = choose_gang(query, task, None, inf, inf)
            spare = query.workers.idle_count - query.backlog.count
            if choice is not None and (is_first or len(choice.workers) <= spare):
                self._end_hold()
                why = make_why(choice, query)
                return _shared(task, choice, why, 0.0)
            if (is_held or self.held_for is None) and is_first and query.at >= self._rests_until:
                self._hold_soonest(task, query.at)
        return None

    def in_the_gap(self, query: PlacementQuery) -> PlacementDecision | None:
        """Return the start of a waiting task on a held worker, on which it should end before that is needed."""
        gap_seconds = GAP_SHARE * (self._held_until - query.at)
        if self.held_for is None or gap_seconds <= 0.0 or gap_seconds == inf:
            return None
        for worker in self._worker_table.workers.values():
            if worker.held_for is None or not worker.is_idle or worker.loading is not None:
                continue
            for line in islice(query.backlog.lines(worker.capacity_bytes or 0), MOST_FILLING):
                extra_seconds = self._costs.extra_seconds(line.head.spec, line.cost_class, worker)
                if extra_seconds is None or line.cost_class.kind.ratio is None:
                    continue
                for task in line.tasks.first(MOST_OF_A_LINE):
                    run_seconds = self._costs.resident_seconds(task.spec, task.cost_class, worker)
                    if task.priority == line.head.priority and extra_seconds + run_seconds <= gap_seconds:
                        note = f"it ends before {self.held_for} needs its GPU"
                        return make_decision(query, task, worker, PlacementRule.IN_ORDER, note)
        return None

    # ---- holds -------------------------------------------------------------------------------------------------------

    def _is_first(self, task: Task) -> bool:
        """Whether no waiting task comes before it that runs on one worker."""
        if task.goes_first or task.urgent_by < inf:
            return True
        backlog = self._demand.backlog
        oldest = backlog.oldest(max(backlog.capacities, default=0))
        return oldest is None or task.order < oldest.order

    def _is_hold_over(self, tasks: Sequence[Task], at: float) -> bool:
        return at >= self._held_since + MOST_HOLD_SECONDS or all(task.name != self.held_for for task in tasks)

    def _release(self, at: float) -> None:
        """End a hold that has lasted too long, or that nothing needs."""
        self._rests_until = at + REST_SECONDS
        self._end_hold()

    def _end_hold(self) -> None:
        self._hold([], None)
        self.held_for = None

    def _hold(self, workers: Sequence[Worker], task_id: TaskId | None) -> None:
        """Hold exactly these workers."""
        is_changed = False
        for worker in self._worker_table.workers.values():
            wanted = task_id if worker in workers else None
            if worker.held_for != wanted:
                self._worker_table.hold(worker, wanted)
                is_changed = True
        if is_changed:
            self._membership.update_capacities()

    def _hold_soonest(self, task: Task, at: float) -> None:
        """Hold the workers of the machine on which a run of the task can begin soonest."""
        by_machine: dict[tuple[NodeId, str], list[tuple[float, Worker]]] = {}
        for worker in self._worker_table.workers.values():
            spec, seconds = worker.spec, worker.wait_seconds(at) if worker.live else None
            if spec is None or not spec.node or seconds is None or not worker.takes_tasks:
                continue
            if (
                worker.drain_deadline is None
                and self._costs.extra_seconds(task.spec, task.cost_class, worker) is not None
            ):
                by_machine.setdefault((spec.node, spec.device_name), []).append((seconds, worker))
        best: list[tuple[float, Worker]] = []
        least = task.degrees[0]
        for workers in by_machine.values():
            workers.sort(key=lambda pair: (pair[0], pair[1].worker_id))
            if len(workers) >= least and (not best or workers[least - 1][0] < best[-1][0]):
                best = workers[:least]
        if not best:
            return
        if self.held_for != task.name:
            self.held_for, self._held_since = task.name, at
        self._held_until = at + best[-1][0]
        self._hold([worker for _, worker in best], task.name)

    # ---- changes during a run ---------------------------------------------------------------------------------------

    def resize(self, at: float) -> None:
        """Stop a run that should continue on more or fewer GPUs. Call after ready tasks were started, if there are any
        tasks that may be shared."""
        index, backlog = self._worker_table.worker_index, self._demand.backlog
        waiting = backlog.count + len(backlog.shared_only)
        if not waiting and not index.idle_count:
            return
        if not waiting:
            if index.idle_count and index.busy_count:
                self._grow(at)
        elif not index.idle_count and (self.gangs.runs or self._demand.backlog.urgent):
            self._shrink(at)

    def next_at(self, at: float) -> float:
        """Return when a hold ends, the next one may begin, or a GPU is kept free for deadlines no longer; infinity if
        none of them."""
        if self.held_for is not None:
            return min(max(self._held_until, at), self._held_since + MOST_HOLD_SECONDS)
        next_at = self._rests_until if len(self._demand.backlog.shared_only) and at < self._rests_until else inf
        index = self._worker_table.worker_index
        if index.idle_count and index.busy_count and self._reserved(at):
            arrivals = self._demand.fair_queue.deadlines.arrivals
            next_at = min(next_at, reserved_until(arrivals, at))
        return next_at

    def _resizable(self, at: float) -> list[tuple[Worker, Task, float]]:
        """The runs of which the number of GPUs may change, with the seconds that are left; the longest first."""
        found: list[tuple[Worker, Task, float]] = []
        for end, _, worker in islice(reversed(self._worker_table.worker_index.busy), MOST_BUSY):
            left_seconds = end - at
            if left_seconds < LEAST_LEFT_SECONDS:
                break
            if worker.task_id is None or worker.members > 1:
                continue
            task = self._demand.tasks[worker.task_id]
            if task.degrees == ALONE or task.spec.stage is not Stage.SAMPLE:
                continue
            if task.pause_requested_at is not None:
                return []  # one change at a time
            if not task.is_stopping and task.resizes < MOST_RESIZES:
                found.append((worker, task, left_seconds))
        return found

    def _grow(self, at: float) -> None:
        index = self._worker_table.worker_index
        best: tuple[float, Worker, Task, int] | None = None
        reserved = self._reserved(at)
        for worker, task, left_seconds in self._resizable(at):
            if worker.spec is None or not worker.spec.node:
                continue
            idle = [
                (extra, other)
                for other in index.on_node.get(worker.spec.node, ())
                if other.is_idle
                and other.spec is not None
                and other.spec.device_name == worker.spec.device_name
                and (extra := self._costs.extra_seconds(task.spec, task.cost_class, other)) is not None
            ]
            idle.sort(key=lambda pair: (pair[0], pair[1].worker_id))
            deadline = self._deadline(task, at)
            for degree in task.degrees:
                more = degree - task.degree
                if not 0 < more <= len(idle):
                    continue
                whole_seconds = self._whole_seconds(task, worker, degree)
                there_seconds = self._price(task, worker, left_seconds)
                there_seconds += self._loading_seconds(task, idle[more - 1][1], degree, idle[more - 1][0])
                there_seconds += left_seconds * whole_seconds / self._whole_seconds(task, worker, task.degree)
                saved_seconds = left_seconds - there_seconds
                is_saving = saved_seconds >= max(LEAST_SAVED_SECONDS, LEAST_SAVED * left_seconds)
                alone_seconds = self._whole_seconds(task, worker, 1)
                is_cheap = degree * whole_seconds <= self.load.most_times * alone_seconds
                is_late = at + left_seconds > deadline >= at + there_seconds
                is_spare = more <= index.idle_count - reserved
                is_worth_it = (is_saving and is_cheap and is_spare) or is_late
                if is_worth_it and (best is None or saved_seconds > best[0]):
                    best = (saved_seconds, worker, task, degree)
        if best is not None:
            self._continue(best[1], best[2], best[3], "GPUs are idle", at)

    def _shrink(self, at: float) -> None:
        index = self._worker_table.worker_index
        soonest_seconds = index.busy[0][0] - at if index.busy else inf
        # a wait that no run changes for may still be too long for a deadline
        waiting = self._demand.backlog.count if soonest_seconds > MOST_WAIT_SECONDS else 0
        for worker, task, left_seconds in self._resizable(at):
            if task.degree == 1:
                continue
            stop_seconds = self._stop_seconds(task, worker, left_seconds)
            if soonest_seconds <= stop_seconds:
                continue
            price_seconds = stop_seconds + FORMING_SECONDS
            saved_seconds = soonest_seconds - stop_seconds
            fewer = [degree for degree in task.degrees if degree < task.degree]
            deadline = self._deadline(task, at)
            for degree in reversed(fewer):
                served = min(waiting, task.degree - degree)
                if served < waiting and degree != fewer[0]:
                    continue
                ratio = self._whole_seconds(task, worker, degree) / self._whole_seconds(task, worker, task.degree)
                there_seconds = left_seconds * ratio
                if at + left_seconds <= deadline < at + price_seconds + there_seconds:
                    continue
                is_worth_it = served * saved_seconds > price_seconds + there_seconds - left_seconds
                if is_worth_it or self._late(soonest_seconds, stop_seconds, task.degree - degree, at) is not None:
                    self._continue(worker, task, degree, f"{waiting} tasks wait", at)
                    return
        self._yield(soonest_seconds, at)

    def _yield(self, soonest_seconds: float, at: float) -> None:
        """Stop a run on one GPU for a task that would be late otherwise: the run with most time to spare."""
        best: tuple[float, Worker, Task, Task] | None = None
        for worker, task, left_seconds in self._resizable(at):
            if task.degree > 1:
                continue
            price_seconds = self._price(task, worker, left_seconds)
            late = self._late(soonest_seconds, self._stop_seconds(task, worker, left_seconds), 1, at)
            if late is None:
                return
            deadline = self._deadline(task, at)
            spare_seconds = deadline - at - left_seconds
            if spare_seconds < 0.0:  # it is late anyway
                spare_seconds = inf
            if spare_seconds > 2.0 * (price_seconds + _typical(late)) and (best is None or spare_seconds > best[0]):
                best = (spare_seconds, worker, task, late)
        if best is not None:
            _, worker, task, late = best
            self._preemption.pause(worker, f"for {late.name}, which would miss its deadline otherwise", at)
            task.resizes += 1

    def _late(self, wait_seconds: float, sooner_seconds: float, gpus: int, at: float) -> Task | None:
        """Return one of the first tasks that wait which misses its deadline if it waits that long, and not if it starts
        sooner on some of so many GPUs."""
        backlog = self._demand.backlog
        for line in backlog.first_lines(max(backlog.capacities, default=0), MOST_LATE):
            task = line.head
            deadline = self._deadline(task, at)
            if deadline == inf:
                continue
            seconds = self._least_seconds(task, gpus)
            if at + sooner_seconds + seconds <= deadline < at + wait_seconds + seconds:
                return task
        return None

    def _least_seconds(self, task: Task, gpus: float) -> float:
        """Seconds of the next run of a task on some of so many GPUs, and until these have found each other."""
        alone_seconds = _typical(task)
        if task.degrees == ALONE:
            return alone_seconds
        return min(
            [
                _forming_seconds(degree) + prior_seconds(task.spec, alone_seconds, degree, task.remaining)
                for degree in task.degrees
                if degree <= gpus
            ],
            default=inf,
        )

    def _continue(self, worker: Worker, task: Task, degree: int, reason: str, at: float) -> None:
        """Have a run stop, to continue on `degree` GPUs."""
        self._preemption.pause(worker, f"and to continue on {degree} GPUs instead of {task.degree}: {reason}", at)
        task.resume_degree = degree
        task.resizes += 1
        task.goes_first = True

    def _reserved(self, at: float) -> int:
        """The idle GPUs that stay free for jobs with deadlines that may come."""
        return reserved_gpus(self._worker_table.worker_index.count, self._demand.fair_queue.deadlines.arrivals, at)

    def _price(self, task: Task, worker: Worker, left_seconds: float) -> float:
        """Seconds that a change costs: the rest of a step, and until the workers have found each other."""
        return self._stop_seconds(task, worker, left_seconds) + FORMING_SECONDS

    def _stop_seconds(self, task: Task, worker: Worker, left_seconds: float) -> float:
        """Seconds until a run that is asked to stop has left its workers, at most: the rest of a step."""
        run_seconds = self._costs.gang_seconds(task.spec, task.cost_class, worker, task.degree, task.remaining)
        run_seconds += task.remaining * self._moving_seconds(task, worker, task.degree)
        return min(left_seconds, step_seconds(task.spec, run_seconds, task.remaining))

    def _whole_seconds(self, task: Task, worker: Worker, degree: int) -> float:
        """Seconds of a whole run on so many GPUs like `worker`'s, with the weights that stream, for comparisons."""
        kind = task.cost_class.kind
        alone = task.full_run_seconds * (1.0 if kind.ratio is None else kind.ratio)
        return prior_seconds(task.spec, alone, degree) + self._moving_seconds(task, worker, degree)

    def _moving_seconds(self, task: Task, worker: Worker, degree: int) -> float:
        return moving_seconds(self._costs, task.spec, task.cost_class, worker, degree) if worker.live else 0.0

    def _loading_seconds(self, task: Task, worker: Worker, degree: int, alone_seconds: float) -> float:
        """Seconds until an idle worker has its weights as one of `degree` members; alone it has `alone_seconds` more
        than the run, with the weights that stream."""
        if not streams(self._costs, task.cost_class, worker):
            return alone_seconds
        seconds = gang_extra_seconds(self._costs, task.spec, task.cost_class, worker, degree)
        seconds = alone_seconds if seconds is None else seconds
        return max(0.0, seconds - self._moving_seconds(task, worker, degree))

    def _deadline(self, task: Task, at: float) -> float:
        """When the run of the task must end for the first deadline of its jobs that can be met; infinity if there is
        none."""
        found = inf
        for job_id in task.demand:
            job = self._demand.jobs[job_id]
            if job.spec.deadline is None:
                continue
            after = [self._demand.tasks[name] for name in job.demands if name != task.name]
            # on as many GPUs as they may have, and parts at once: whether that is needed is decided when they start
            later: dict[int, float] = {}
            for other in after:
                rank = other.cost_class.rank
                if rank > task.cost_class.rank:
                    later[rank] = max(later.get(rank, 0.0), self._least_seconds(other, inf))
            later_seconds = sum(later.values())
            work_seconds = later_seconds + self._least_seconds(task, inf)
            due = job.spec.deadline - later_seconds - min(DEADLINE_SPARE_SECONDS, SPARE_SHARE * work_seconds)
            if at < due < found:
                found = due
        return found


def make_why(choice: GangChoice, query: PlacementQuery) -> Why:
    """The record of a start without an alternative."""
    chosen = PlacementOption(choice.workers[0].worker_id, 0.0, choice.extra_seconds, choice.run_seconds)
    workers = query.workers
    return Why(PlacementRule.IN_ORDER, chosen, (), workers.idle_count, workers.busy_count, note="")


def _shared(task: Task, choice: GangChoice, why: Why, spent_seconds: float) -> PlacementDecision:
    chosen = PlacementOption(choice.workers[0].worker_id, 0.0, choice.extra_seconds, choice.run_seconds)
    note = f"{choice.note}; {why.note}" if why.note else choice.note
    decision = PlacementDecision(
        task, choice.workers[0], choice.seconds, replace(why, chosen=chosen, note=note), spent_seconds
    )
    decision.others = choice.workers[1:]
    return decision


def _forming_seconds(degree: int) -> float:
    return FORMING_SECONDS if degree > 1 else 0.0


def _typical(task: Task) -> float:
    ratio = task.cost_class.kind.ratio
    return task.spec.run_seconds if ratio is None else task.spec.run_seconds * ratio
