"""The order in which tasks wait, and on whose account they run: priorities, shares, deadlines and limits put together.

A task stands where the best of the jobs that want it stands. It is on the account of the user whose job asked for it
first, of those that still do: others that want it too get it for nothing. Knows jobs, tasks and queues; chooses none.

    shares      tags, which order the tasks of one priority (`scheduler.queue.shares`)
    deadlines   which jobs go before all others now (`scheduler.queue.deadlines`)
    limits      how many tasks of a user are in the backlog (`scheduler.queue.limits`)
    ageing      a waiting job's priority grows with time, up to the highest that any live job was submitted with
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush

from modelpool.pool.specs.spec import JobId, RunCost, TaskId, UserId
from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.queue.backlog import Backlog, Pinned
from modelpool.scheduler.queue.deadlines import Deadlines
from modelpool.scheduler.queue.limits import RunningLimits
from modelpool.scheduler.queue.shares import Shares
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.jobs import Job, Task, TaskStatus
from modelpool.scheduler.tables.messages import Outcome
from modelpool.scheduler.tables.story import Story
from modelpool.scheduler.tables.user_account import Flow

#: tags are given for so many times the window of shares: what is tagged must not run out within it
AHEAD_WINDOWS = 2.0


class Turns:
    """Files ready tasks and keeps the books. `jobs` and `tasks` are the live ones, kept by `scheduler.queue.demand`."""

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
        #: live jobs by the priority that they were submitted with
        self._priorities: dict[int, int] = {}
        #: when each live job has waited for the next raise of its priority; jobs that are over are among them
        self._raises: list[tuple[float, int, Job]] = []

    @property
    def next_look(self) -> float:
        """When time alone will change something; never, as it stands, is infinity."""
        if self._raises and len(self._priorities) > 1:
            return min(self.deadlines.next_look, self._raises[0][0])
        return self.deadlines.next_look

    def pool_changed(self, workers: int, link_bytes_per_second: float, at: float) -> None:
        """So many workers are up, the slowest of which loads so fast."""
        if workers < self._workers and len(self.deadlines):
            self.deadlines.next_look = at
        self._workers, self._link_bytes_per_second = workers, link_bytes_per_second
        self.shares.ahead_seconds = AHEAD_WINDOWS * self._config.share_window_seconds * max(1, workers)

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def join(self, job: Job, at: float) -> None:
        """A new job, whose tasks are there."""
        job.joined = True
        priority = job.spec.priority
        self._priorities[priority] = self._priorities.get(priority, 0) + 1
        if self._config.ageing_seconds is not None:
            heappush(self._raises, (at + self._config.ageing_seconds, job.number, job))
        if job.spec.deadline is not None:
            self._add_deadline(job, job.spec.deadline, at)
        self._stand_anew(self.shares.join(job))

    def leave(self, job: Job, outcome: Outcome, at: float) -> None:
        """A job is over."""
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
        self._stand_anew(self.shares.leave(job))

    def settle(self, at: float) -> None:
        """Take in what time has changed, and have in the backlog what may start. Before each placement."""
        if at >= self.deadlines.next_look:
            for job in self.deadlines.look(at, self._workers):
                job.urgent = True
                for task_id in job.demands:
                    self._hurry(self._tasks[task_id], job)
        if self._raises and len(self._priorities) > 1:
            self._raise(at)
        if self._are_limited:
            self.limits.settle()

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def wanted_by(self, task: Task, job: Job) -> None:
        """One more job demands the task, and is noted there; the first one too."""
        is_first = len(task.demand) == 1
        if is_first:
            self._put_on_account(task, job.spec.user)
            if task.hurried_by < math.inf:
                self._hurry_by(task, math.inf)  # for one that nobody wanted any more, and that had not stopped yet
        if is_first or (-job.priority, job.tag) < (-task.priority, task.tag):
            self._stand(task, job.priority, job.tag)
        if job.urgent:
            self._hurry(task, job)

    def unwanted_by(self, task: Task, job: Job) -> None:
        """A job that demanded the task does no longer, and others do."""
        first = self._jobs[next(iter(task.demand))]
        if first.spec.user != task.payer:
            self._unfile_for(task, lambda: self._put_on_account(task, first.spec.user))
        stands = (-task.priority, task.tag)
        if (-job.priority, job.tag) == stands:
            best = first
            for job_id in task.demand:
                best = min(best, self._jobs[job_id], key=_standing)
                if _standing(best) == stands:
                    break
            self._stand(task, best.priority, best.tag)
        if job.urgent:
            others = (self._jobs[job_id] for job_id in task.demand)
            due = (other.spec.deadline for other in others if other.urgent and other.spec.deadline is not None)
            hurried_by = min(due, default=math.inf)
            if hurried_by != task.hurried_by:
                self._hurry_by(task, hurried_by)

    def file(self, task: Task) -> None:
        """A ready task waits: in the backlog, for the worker that it is pinned to, or for its payer's limit."""
        limit = self._limit(task) if self._are_limited else None
        if task.pinned_to is not None:
            self._pinned.add(task)
        elif limit is not None:
            self.limits.add(task, limit)
        else:
            self._backlog.add(task)

    def unfile(self, task: Task) -> None:
        """A ready task waits no longer."""
        if task.pinned_to is not None:
            self._pinned.remove(task)
        elif self._are_limited and self._limit(task) is not None:
            self.limits.remove(task)
        else:
            self._backlog.remove(task)

    def may_start(self, task: Task) -> bool:
        """Whether the limit of its payer lets a pinned task start."""
        return not self._are_limited or self.limits.may_start(task, self._limit(task))

    def start(self, task: Task) -> None:
        """A worker has the task now, which waits nowhere any more."""
        assert task.worker_id is not None, f"{task.name} runs nowhere"
        limit = self._limit(task) if self._are_limited else None
        if limit is not None:
            self.limits.start(task, limit)
            self.limits.settle()
        job = self._jobs[next(iter(task.demand))]
        if tagged := self.shares.begin(job):
            self._stand_anew(tagged)

    def end(self, task: Task) -> None:
        """The worker that has the task lets it go."""
        if self._are_limited and task.worker_id is not None:
            self.limits.end(task)

    def pay(self, task: Task, cost: RunCost) -> None:
        """A run of the task ended with a report, well or badly."""
        if task.reserved_in is not None:
            self._release(task)
        self.shares.pay(task.payer, cost.load_seconds + cost.run_seconds, cost.load_seconds)

    def made(self, task: Task, needing: Iterable[Job]) -> None:
        """The result of the task is there, for these jobs."""
        for job in needing:
            if job.spec.deadline is not None and job.joined:
                self.deadlines.done(job, task.spec.task_id)

    def forget(self, task: Task) -> None:
        """The task is gone, whether it ran or not."""
        if task.reserved_in is not None:
            self._release(task)

    # ---- from here on: what follows ----------------------------------------------------------------------------------

    def _limit(self, task: Task) -> int | None:
        return self.shares.share_of(task.payer).running_limit

    def _unfile_for(self, task: Task, change: Callable[[], None]) -> None:
        """Change what a task is filed by."""
        if task.status is not TaskStatus.READY:
            change()
            return
        self.unfile(task)
        change()
        self.file(task)

    def _stand(self, task: Task, priority: int, tag: float) -> None:
        if priority != task.priority or tag != task.tag:
            self._unfile_for(task, lambda: task.set_priority(priority, tag))

    def _stand_anew(self, jobs: Iterable[Job]) -> None:
        """These jobs have come forward: so do their tasks."""
        for job in jobs:
            for task_id in job.demands:
                task = self._tasks[task_id]
                if _standing(job) < (-task.priority, task.tag):
                    self._stand(task, job.priority, job.tag)

    def _put_on_account(self, task: Task, user: UserId) -> None:
        self._release(task)
        task.payer = user

    def _reserve(self, job: Job, flow: Flow) -> None:
        """Set aside what the tasks of the job should take that are on its account."""
        for task_id in job.demands:
            task = self._tasks[task_id]
            if task.payer == job.spec.user and task.reserved_in is None:
                seconds = _usual_seconds(task) + flow.account.load_seconds
                task.reserved_in, task.reserved_seconds = flow, seconds / flow.account.share.weight
                flow.reserved += task.reserved_seconds

    def _release(self, task: Task) -> None:
        if task.reserved_in is not None:
            task.reserved_in.reserved -= task.reserved_seconds
            task.reserved_in, task.reserved_seconds = None, 0.0

    def _add_deadline(self, job: Job, deadline: float, at: float) -> None:
        tasks = [self._tasks[task_id] for task_id in job.demands]
        seconds = {task.name: _usual_seconds(task) for task in tasks}
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

    def _hurry(self, task: Task, job: Job) -> None:
        """Let the task go before all others, for a job whose deadline comes near."""
        deadline = job.spec.deadline
        assert deadline is not None, f"{job.name} has no deadline"
        if deadline < task.hurried_by:
            self._hurry_by(task, deadline)

    def _hurry_by(self, task: Task, deadline: float) -> None:
        def change() -> None:
            task.hurried_by = deadline

        self._unfile_for(task, change)

    def _raise(self, at: float) -> None:
        """Raise the priority of jobs that have waited for it."""
        ageing_seconds = self._config.ageing_seconds
        assert ageing_seconds is not None, "nothing ages"
        highest = max(self._priorities)
        while self._raises and self._raises[0][0] <= at:
            due, number, job = heappop(self._raises)
            if self._jobs.get(job.spec.job_id) is not job:
                continue
            heappush(self._raises, (max(due, at) + ageing_seconds, number, job))
            if job.priority < highest:
                self._stand_anew([job, *self.shares.move(job, job.priority + 1)])


def _usual_seconds(task: Task) -> float:
    """Of a run with all weights there, on the usual one of the GPUs that it was measured on."""
    ratio = task.signature.kind.ratio
    return task.spec.run_seconds if ratio is None else task.spec.run_seconds * ratio


def _standing(job: Job) -> tuple[int, float]:
    return -job.priority, job.tag
