"""The order of the waiting tasks, and who is charged for them: combines priorities, shares, deadlines and limits.

A task is queued at the position of the first of the jobs that want it. It is charged to the user of the job that
requested it first, of those that still do: others that want it too get it for free. Selects no task for placement.

    shares      virtual start times, which order the tasks of one priority (`scheduler.decisions.queue.shares`)
    deadlines   jobs that go before all others now (`scheduler.decisions.queue.deadlines`)
    limits      tasks of a user in the backlog (`scheduler.decisions.queue.user_limits`)
    ageing      a waiting job's priority grows with time, up to the highest at submission of any live job
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush

from modelpool.pool.values.specs.spec import JobId, RunCost, TaskId, UserId
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.backlog import Backlog, Pinned
from modelpool.scheduler.decisions.queue.deadlines import Deadlines
from modelpool.scheduler.decisions.queue.shares import Shares
from modelpool.scheduler.decisions.queue.user_limits import RunningLimits
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import Job, Task, TaskStatus
from modelpool.scheduler.model.messages import Outcome
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.user_account import UserFlow

#: virtual start times are assigned for this multiple of the share window: they must not run out within it
AHEAD_WINDOWS = 2.0


class FairQueue:
    """Queues ready tasks and keeps the accounts. `jobs` and `tasks` are the live ones, kept by
    `scheduler.decisions.queue.demand`."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        story: Story,
        backlog: Backlog,
        pinned: Pinned,
        jobs: Mapping[JobId, Job],
        tasks: Mapping[TaskId, Task],
    ) -> None:
        self._config = config
        self._costs = costs
        self._story = story
        self._backlog = backlog
        self._pinned = pinned
        self._jobs = jobs
        self._tasks = tasks
        self.shares = Shares(config.shares, self._reserve)
        self.deadlines = Deadlines(config.deadline_margin_seconds)
        self.limits = RunningLimits(backlog)
        self._are_limited = any(share.running_limit is not None for share in config.shares)
        self._workers = 0
        self._link_bytes_per_second = math.inf
        #: the run that was charged for last: task, attempt and user
        self.latest_charge: tuple[TaskId, int, UserId] | None = None
        #: number of live jobs by priority at submission
        self._priorities: dict[int, int] = {}
        #: when the priority of each live job grows next; may contain jobs that ended
        self._raises: list[tuple[float, int, Job]] = []

    @property
    def next_check(self) -> float:
        """The next time at which something changes without an event; infinity if never."""
        if self._raises and len(self._priorities) > 1:
            return min(self.deadlines.next_check, self._raises[0][0])
        return self.deadlines.next_check

    @property
    def has_priorities(self) -> bool:
        """Whether live jobs were submitted with different priorities."""
        return len(self._priorities) > 1

    def pool_changed(self, workers: int, link_bytes_per_second: float, at: float) -> None:
        """Set how many workers are up, and the bandwidth of the slowest link."""
        if workers < self._workers and len(self.deadlines):
            self.deadlines.next_check = at
        self._workers, self._link_bytes_per_second = workers, link_bytes_per_second
        self.shares.ahead_seconds = AHEAD_WINDOWS * self._config.share_window_seconds * max(1, workers)

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def join(self, job: Job, at: float, submitted_at: float) -> None:
        """Add a new job, with existing tasks, that has waited since `submitted_at`."""
        job.joined = True
        priority = job.spec.priority
        self._priorities[priority] = self._priorities.get(priority, 0) + 1
        raises, ageing_seconds = 0, self._config.ageing_seconds
        if ageing_seconds is not None:
            raises = int((at - submitted_at) / ageing_seconds)
            heappush(self._raises, (submitted_at + (raises + 1) * ageing_seconds, job.number, job))
        if job.spec.deadline is not None:
            self._add_deadline(job, job.spec.deadline, at)
        self._update_positions(self.shares.join(job))
        if raises and priority < (highest := max(self._priorities)):
            self._update_positions([job, *self.shares.move(job, min(priority + raises, highest))])

    def leave(self, job: Job, outcome: Outcome, at: float) -> None:
        """Remove a job that ended."""
        if not job.joined:
            return
        priority = job.spec.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        if job.spec.deadline is not None:
            self.deadlines.drop(job)
            if outcome is not Outcome.CANCELLED:
                is_met = self.deadlines.judge(job, outcome is Outcome.SUCCEEDED, at)
                late_seconds = at - job.spec.deadline
                early = f"deadline met, {-late_seconds:.1f} s before it"
                self._story.note(job, early if is_met else f"deadline missed, {late_seconds:+.1f} s from it")
        self._update_positions(self.shares.leave(job))

    def settle(self, at: float) -> None:
        """Apply changes due to time, and move tasks that may start to the backlog. Call before each placement."""
        if at >= self.deadlines.next_check:
            for job in self.deadlines.check(at, self._workers):
                job.urgent = True
                for task_id in job.demands:
                    self._make_urgent(self._tasks[task_id], job)
        if self._raises and len(self._priorities) > 1:
            self._apply_ageing(at)
        if self._are_limited:
            self.limits.settle()

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def add_demand(self, task: Task, job: Job) -> None:
        """Record that one more job demands the task; also for the first one."""
        is_first = len(task.demand) == 1
        if is_first:
            self._charge_to(task, job.spec.user)
            if task.urgent_by < math.inf:
                self._make_urgent_by(
                    task, math.inf
                )  # for one that no job wanted any more, and that had not stopped yet
        if is_first or (-job.priority, job.virtual_start) < (-task.priority, task.virtual_start):
            self._set_position(task, job.priority, job.virtual_start)
        if job.urgent:
            self._make_urgent(task, job)

    def drop_demand(self, task: Task, job: Job) -> None:
        """Record that a job no longer demands the task, while others do."""
        first = self._jobs[next(iter(task.demand))]
        if first.spec.user != task.payer:
            self._unfile_for(task, lambda: self._charge_to(task, first.spec.user))
        stands = (-task.priority, task.virtual_start)
        if (-job.priority, job.virtual_start) == stands:
            best = first
            for job_id in task.demand:
                best = min(best, self._jobs[job_id], key=_position_of)
                if _position_of(best) == stands:
                    break
            self._set_position(task, best.priority, best.virtual_start)
        if job.urgent:
            others = (self._jobs[job_id] for job_id in task.demand)
            due = (other.spec.deadline for other in others if other.urgent and other.spec.deadline is not None)
            urgent_by = min(due, default=math.inf)
            if urgent_by != task.urgent_by:
                self._make_urgent_by(task, urgent_by)

    def file(self, task: Task) -> None:
        """Queue a ready task: in the backlog, for the worker that it is pinned to, or for its payer's limit."""
        limit = self._limit(task) if self._are_limited else None
        if task.pinned_to is not None:
            self._pinned.add(task)
        elif limit is not None:
            self.limits.add(task, limit)
        else:
            self._backlog.add(task)

    def unfile(self, task: Task) -> None:
        """Remove a ready task from where it waits."""
        if task.pinned_to is not None:
            self._pinned.remove(task)
        elif self._are_limited and self._limit(task) is not None:
            self.limits.remove(task)
        else:
            self._backlog.remove(task)

    def may_start(self, task: Task) -> bool:
        """Whether the limit of its payer lets a pinned task start."""
        return not self._are_limited or self.limits.may_start(task, self._limit(task))

    def is_limited(self, task: Task) -> bool:
        """Whether the payer may have only so many tasks on workers."""
        return self._are_limited and self._limit(task) is not None

    def is_awaited(self, task: Task) -> bool:
        """Whether a task that is held back by the limit of a user may start when this one ends."""
        return self._are_limited and self.limits.is_awaited(task)

    def start(self, task: Task) -> None:
        """A worker has the task now; it waits nowhere any more."""
        assert task.worker_id is not None, f"{task.name} runs nowhere"
        limit = self._limit(task) if self._are_limited else None
        if limit is not None:
            self.limits.start(task, limit)
        job = self._jobs[next(iter(task.demand))]
        if scheduled := self.shares.begin(job):
            self._update_positions(scheduled)
        if self._are_limited:
            self.limits.settle()

    def end(self, task: Task) -> None:
        """The worker no longer has the task."""
        if self._are_limited and task.worker_id is not None:
            self.limits.end(task)

    def pay(self, task: Task, cost: RunCost) -> None:
        """Charge for a run of the task that ended with a report."""
        self.latest_charge = task.name, task.attempt, task.payer
        if task.reserved_in is not None:
            self._release(task)
        self.shares.pay(task.payer, cost.load_seconds + cost.run_seconds, cost.load_seconds)

    def pay_share(self, task_id: TaskId, attempt: int, payer: UserId, cost: RunCost) -> None:
        """Charge for one worker's part of a run that several workers shared."""
        self.latest_charge = task_id, attempt, payer
        task = self._tasks.get(task_id)
        if task is not None and task.reserved_in is not None:
            self._release(task)
        self.shares.pay(payer, cost.load_seconds + cost.run_seconds, cost.load_seconds)

    def task_succeeded(self, task: Task, needing: Iterable[Job]) -> None:
        """The result of the task exists, for these jobs."""
        for job in needing:
            if job.spec.deadline is not None and job.joined:
                self.deadlines.done(job, task.spec.task_id)

    def forget(self, task: Task) -> None:
        """Remove the task, whether it ran or not."""
        if task.reserved_in is not None:
            self._release(task)

    # ---- internal consequences -------------------------------------------------------------------------------------

    def _limit(self, task: Task) -> int | None:
        return self.shares.share_of(task.payer).running_limit

    def _unfile_for(self, task: Task, change: Callable[[], None]) -> None:
        """Change a sort key of a task while it is out of its queue."""
        if task.status is not TaskStatus.READY:
            change()
            return
        self.unfile(task)
        change()
        self.file(task)

    def _set_position(self, task: Task, priority: int, virtual_start: float) -> None:
        if priority != task.priority or virtual_start != task.virtual_start:
            self._unfile_for(task, lambda: task.set_priority(priority, virtual_start))

    def _update_positions(self, jobs: Iterable[Job]) -> None:
        """Move these jobs, with changed virtual starts, and their tasks forward."""
        for job in jobs:
            for task_id in job.demands:
                task = self._tasks[task_id]
                if _position_of(job) < (-task.priority, task.virtual_start):
                    self._set_position(task, job.priority, job.virtual_start)

    def _charge_to(self, task: Task, user: UserId) -> None:
        self._release(task)
        task.payer = user

    def _reserve(self, job: Job, flow: UserFlow) -> None:
        """Reserve the expected seconds of the job's tasks that are charged to its user."""
        for task_id in job.demands:
            task = self._tasks[task_id]
            if task.payer == job.spec.user and task.reserved_in is None:
                seconds = _typical_seconds(task) + flow.account.load_seconds
                task.reserved_in, task.reserved_seconds = flow, seconds / flow.account.share.weight
                flow.reserved += task.reserved_seconds

    def _release(self, task: Task) -> None:
        if task.reserved_in is not None:
            task.reserved_in.reserved -= task.reserved_seconds
            task.reserved_in, task.reserved_seconds = None, 0.0

    def _add_deadline(self, job: Job, deadline: float, at: float) -> None:
        tasks = [self._tasks[task_id] for task_id in job.demands]
        seconds = {task.name: _typical_seconds(task) for task in tasks}
        mine = {task.name: seconds[task.name] for task in tasks if next(iter(task.demand)) == job.spec.job_id}
        run_seconds = sum(seconds.values())
        used = {use.component: None for task in tasks for use in task.spec.uses}
        load_bytes = sum(self._costs.components[component].upload_bytes for component in used)
        self.deadlines.add(job, mine, run_seconds + load_bytes / self._link_bytes_per_second, at)
        if at + run_seconds > deadline:
            job.hopeless_seconds = run_seconds
            self._story.note(
                job, f"cannot be done by its deadline in {deadline - at:.1f} s: its runs alone take {run_seconds:.1f} s"
            )

    def _make_urgent(self, task: Task, job: Job) -> None:
        """Let the task go before all others, for a job with a near deadline."""
        deadline = job.spec.deadline
        assert deadline is not None, f"{job.name} has no deadline"
        if deadline < task.urgent_by:
            self._make_urgent_by(task, deadline)

    def _make_urgent_by(self, task: Task, deadline: float) -> None:
        def change() -> None:
            task.urgent_by = deadline

        self._unfile_for(task, change)

    def _apply_ageing(self, at: float) -> None:
        """Raise the priority of jobs that have waited long enough."""
        ageing_seconds = self._config.ageing_seconds
        assert ageing_seconds is not None, "nothing ages"
        highest = max(self._priorities)
        while self._raises and self._raises[0][0] <= at:
            due, number, job = heappop(self._raises)
            if self._jobs.get(job.spec.job_id) is not job:
                continue
            heappush(self._raises, (max(due, at) + ageing_seconds, number, job))
            if job.priority < highest:
                self._update_positions([job, *self.shares.move(job, job.priority + 1)])


def _typical_seconds(task: Task) -> float:
    """Seconds of a run with all weights resident, on the first kind of GPU that it was measured on."""
    ratio = task.cost_class.kind.ratio
    return task.spec.run_seconds if ratio is None else task.spec.run_seconds * ratio


def _position_of(job: Job) -> tuple[int, float]:
    return -job.priority, job.virtual_start
