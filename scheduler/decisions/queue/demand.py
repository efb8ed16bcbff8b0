"""Tracks which tasks have to run, for which jobs, and which results they read. Knows no placement, and workers only by
name.

A job demands the tasks between the results that exist and the one that it wants. A task exists while a job demands it
or a worker has it. Everything here follows from events that `scheduler.core.state` passes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

from modelpool.pool.values.specs.spec import (
    NO_NODE,
    JobId,
    JobSpec,
    NodeId,
    RunError,
    RunErrorKind,
    Stage,
    TaskId,
    TaskSpec,
)
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.backlog import Backlog, Pinned
from modelpool.scheduler.decisions.queue.fair_queue import FairQueue
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.file_verdicts import NO_ORIGINS, Origins
from modelpool.scheduler.model.jobs import (
    ALONE,
    WAITS_FOR_VERDICT,
    Job,
    JobStatus,
    Task,
    TaskStatus,
    needed_tasks,
    problem_with,
)
from modelpool.scheduler.model.kept_states import KeptState, state_id, task_of_state
from modelpool.scheduler.model.messages import Command, Outcome, ReleaseResult, ResolveJob, StopTask
from modelpool.scheduler.model.results import Result, Results
from modelpool.scheduler.model.story import Story

#: losses of one result that a job needs before the job fails. Machines are lost independently of what they hold, so
#: this many mean that results cannot be kept at all
MOST_LOSSES = 16
#: the story's note of a new task; the name of the job follows
_STAGE_FOR = {stage: f"{stage.value} for " for stage in Stage}


class Demand:
    """The live jobs, their tasks and results. Methods append the commands that they cause to `out`."""

    def __init__(
        self,
        config: SchedulerConfig,
        story: Story,
        costs: Costs,
        out: list[Command],
        unfit: Callable[[TaskSpec], RunError | None],
        refused: Callable[[TaskSpec], RunError | None],
    ) -> None:
        self._config = config
        self._story = story
        self._costs = costs
        self._out = out
        #: returns why a task can run on no worker of the pool; None if it can
        self._unfit = unfit
        #: returns why a task is refused at present though it fits; None if it is not
        self._refused = refused
        self.results = Results(config.kept_results, config.kept_result_bytes)
        self.backlog = Backlog()
        #: ready tasks that wait for one worker each
        self.pinned = Pinned()
        #: jobs that are not resolved, in order of submission
        self.jobs: dict[JobId, Job] = {}
        #: tasks that have to run or are running
        self.tasks: dict[TaskId, Task] = {}
        #: the current time
        self.at = 0.0
        #: order of the waiting tasks, and who is charged for them
        self.fair_queue = FairQueue(config, costs, story, self.backlog, self.pinned, self.jobs, self.tasks)
        #: the latest resolved jobs
        self.ended: OrderedDict[JobId, Outcome] = OrderedDict()
        #: queued tasks that no job needs any more; emptied by the core
        self.unneeded: list[TaskId] = []
        #: number of jobs resolved since the start
        self.resolved = dict.fromkeys(Outcome, 0)
        self._submissions = 0
        #: number of tasks that never run on one worker, and of those that may share a run
        self.shared_only = self.shareable = 0

    def submit(self, spec: JobSpec, hopeless: str | None, submitted_at: float) -> None:
        """Accept a job that waits since `submitted_at`; `hopeless` is the reason if none can run at present. A known id
        has no effect."""
        if spec.job_id in self.jobs or spec.job_id in self.ended:
            for task_id in spec.given:
                self.results.stray(task_id)
            return
        self._submissions += 1
        tasks = {task.task_id: task for task in spec.tasks}
        job = Job(spec, self._submissions, tasks, priority=spec.priority)
        self.jobs[spec.job_id] = job
        self._story.born(job)
        for task_id in spec.given:
            self._accept_provided(task_id, job)
        problem = problem_with(spec, self._costs.components) or self._clash(spec)
        if problem is not None:
            self.fail(job, RunError(RunErrorKind.BAD_INPUT, f"job {spec.job_id}: {problem}"))
        elif hopeless is not None:
            self.fail(job, RunError(RunErrorKind.WORKER_LOST, hopeless))
        else:
            self._demand(job)
            if spec.job_id in self.jobs:
                self.fair_queue.join(job, self.at, submitted_at)

    def cancel(self, job_id: JobId) -> None:
        """Resolve the job, at once or when the runs have ended that only it wanted."""
        job = self.jobs.get(job_id)
        if job is None or job.status is not JobStatus.ACTIVE:
            return
        for task_id in list(job.demands):
            self._drop_demand(job, task_id)
            task = self.tasks.get(task_id)
            if task is not None and not task.demand:
                task.awaited_by[job_id] = None
                job.awaits[task_id] = None
        if job.awaits:
            self._story.move(job, JobStatus.STOPPING, f"waits for {', '.join(job.awaits)}")
        else:
            self._end(job, Outcome.CANCELLED)

    def fail(self, job: Job, error: RunError) -> None:
        """Resolve an active job as failed."""
        self._end(job, Outcome.FAILED, error=error)

    def fail_all(self, error: RunError) -> None:
        """Resolve every active job as failed."""
        for job in [j for j in self.jobs.values() if j.status is JobStatus.ACTIVE]:
            self.fail(job, error)

    def fail_unfit(self) -> None:
        """Fail the jobs of every waiting task that no longer fits any worker of the pool."""
        for task in list(self.tasks.values()):
            if task.name in self.tasks and not task.on_worker and (error := self._unfit(task.spec)):
                self.fail_task(task, error)

    def task_succeeded(
        self, task: Task, result_bytes: int, node: NodeId = NO_NODE, origins: Origins = NO_ORIGINS
    ) -> None:
        """A run on `node` succeeded: tasks that read the result continue, jobs that wanted it are resolved, unless
        their result has `origins`."""
        has_passed = bool(task.follows)
        task_id = task.spec.task_id
        is_shareable = task.spec.stage is Stage.ENCODE or task.spec.is_kept
        self.results.add(task_id, result_bytes, is_shareable, node, origins)
        for reader_id in self.results.readers.get(task_id, ()):
            reader = self.tasks[reader_id]
            if reader.follows:
                reader.follows = tuple([need for need in reader.follows if need != task_id])
        self.left_worker(task)
        needing, task.demand = [self.jobs[job_id] for job_id in task.demand], {}
        for job in needing:
            del job.demands[task_id]
        self.fair_queue.task_succeeded(task, needing)
        self.forget(task, "done")
        self._result_is_there(task_id)
        for job in needing:
            if has_passed and job.spec.job_id in self.jobs:  # the ends of these inputs were not reported as successes
                self._demand(job)
            elif job.spec.wanted == task_id:
                self._succeed(job)

    def result_lost(self, task_id: TaskId) -> None:
        """The shell no longer holds a result: it is computed again for the jobs that still need it. A task with a
        lost state starts from the beginning."""
        owner = task_of_state(task_id)
        if owner is not None:
            task = self.tasks.get(owner)
            if task is not None and task.kept is not None:
                self._story.note(task, f"its state after step {task.kept.step} of {task.kept.steps} was lost")
                self.set_state(task, None)
        elif (lost := self.results.lost(task_id)) is not None:
            self._make_again(task_id, lost)

    def files_right(self, right: Origins) -> None:
        """These states of files are the expected ones: jobs with results that depend on no others are resolved."""
        for task_id in self.results.made_with(right):
            result = self.results.held[task_id]
            result.origins = result.origins - right
            for job_id in () if result.origins else list(result.awaited_by):
                self._end(self.jobs[job_id], Outcome.SUCCEEDED, result=task_id)

    def remove_results(self, task_ids: Iterable[TaskId]) -> None:
        """These results were made with files that are not the expected ones: they are computed again for the jobs that
        need them. States of waiting tasks that have read one are dropped."""
        removed = [(task_id, lost) for task_id in task_ids if (lost := self.results.lost(task_id)) is not None]
        for task_id, _ in removed:
            self._out.append(ReleaseResult(task_id))
            for reader_id in self.results.readers.get(task_id, {}):
                self.drop_state(self.tasks[reader_id])
        for task_id, lost in removed:
            self._make_again(task_id, lost, is_counted=False)

    def drop_state(self, task: Task) -> None:
        """Do not resume a task that no worker has: its state cannot be read."""
        if task.kept is not None:
            self._out.append(ReleaseResult(state_id(task.name)))
            self.set_state(task, None)

    def set_state(self, task: Task, kept: KeptState | None) -> None:
        """Set the state that the next run of the task resumes from, and the expected seconds of the steps that are
        left. The expected seconds of a run in progress stay until it ends."""
        task.kept = kept
        run_seconds = task.full_run_seconds if kept is None else task.full_run_seconds * kept.remaining
        if task.on_worker or run_seconds == task.spec.run_seconds:
            return
        is_filed = task.status is TaskStatus.READY
        if is_filed:
            self.fair_queue.unfile(task)
        task.cost_class.prior_seconds += run_seconds - task.spec.run_seconds
        task.spec = replace(task.spec, run_seconds=run_seconds)
        if is_filed:
            self.fair_queue.file(task)

    def inputs_lost(self, task: Task) -> None:
        """Inputs of a waiting task are lost, and it is unknown which: all of them are computed again."""
        for need in task.spec.needs:
            if (lost := self.results.lost(need)) is not None:
                self._out.append(ReleaseResult(need))
                self._make_again(need, lost)

    def unpin(self, task: Task) -> None:
        """A waiting task need not wait any more for the worker that it is pinned to."""
        if task.status is TaskStatus.READY:
            self.fair_queue.unfile(task)
        task.pinned_to, task.recycle_first, task.next_oom_step = None, False, None
        if task.status is TaskStatus.READY:
            self.fair_queue.file(task)

    def requeue(self, task: Task, note: str) -> None:
        """A task that no worker has any more waits again; its inputs may be lost by now."""
        if error := self._unfit(task.spec):
            return self.fail_task(task, error)
        self._story.move(task, TaskStatus.BLOCKED, note)
        self.set_state(task, task.kept)
        self._unblock(task)
        if task.status is TaskStatus.BLOCKED:
            for job_id in list(task.demand):
                if job_id in self.jobs:
                    self._demand(self.jobs[job_id])
        return None

    def fail_task(self, task: Task, error: RunError) -> None:
        """Fail every job that demands it; the task is removed with the last of them."""
        for job_id in list(task.demand):
            self.fail(self.jobs[job_id], error)

    def left_worker(self, task: Task) -> None:
        """No worker has the task any more; cancelled jobs that only waited for that are resolved."""
        self.fair_queue.end(task)
        task.worker_id = None
        task.follows = ()
        task.cost_class.on_workers -= 1
        if not task.awaited_by:
            return
        waiting, task.awaited_by = task.awaited_by, {}
        for job_id in waiting:
            job = self.jobs[job_id]
            del job.awaits[task.spec.task_id]
            if not job.awaits:
                self._end(job, Outcome.CANCELLED)

    def forget(self, task: Task, note: str) -> None:
        """No job needs the task any more, and no worker has it."""
        if task.status is TaskStatus.READY:
            self.fair_queue.unfile(task)
        self._story.move(task, TaskStatus.ENDED, note)
        if task.spec.degrees != ALONE:
            self.shareable -= 1
            self.shared_only -= task.spec.degrees[0] > 1
        self.fair_queue.forget(task)
        self.results.drop_reader(task.spec.task_id, task.spec.needs)
        task.cost_class.prior_seconds -= task.spec.run_seconds
        self._costs.release(task.cost_class)
        if task.kept is not None:
            self._out.append(ReleaseResult(state_id(task.name)))
        del self.tasks[task.spec.task_id]

    # ---- internal consequences ------------------------------------------------------------------------------------

    def _clash(self, spec: JobSpec) -> str | None:
        """Return the error in a task of `spec` that differs from a known one with the same id."""
        for task in spec.tasks:
            known = self.tasks.get(task.task_id)
            if known is not None and known.spec.needs != task.needs:
                return f"tasks: {task.task_id} needs {task.needs}, expected {known.spec.needs} as in an earlier job"
        return None

    def _accept_provided(self, task_id: TaskId, provider: Job) -> None:
        """Hold a result that a driver provided; tasks that waited for a run of it become ready."""
        is_new = task_id not in self.results.held
        self.results.add_provided(task_id, provider.spec.job_id)
        if is_new:
            self._result_is_there(task_id)
            task = self.tasks.get(task_id)
            for job_id in [] if task is None else list(task.demand):
                self._demand(self.jobs[job_id])

    def _demand(self, job: Job) -> None:
        """Update the demands of an active job to the existing results; resolve it if the wanted one exists."""
        needed, missing = needed_tasks(job, self.results.held, self._is_on_worker, self.follows)
        if missing is not None:
            message = f"the given result {missing} of job {job.spec.job_id} was lost"
            return self.fail(job, RunError(RunErrorKind.INPUT_LOST, message))
        if not needed:
            return self._succeed(job)
        for task_id in list(job.demands):
            if task_id not in needed:
                self._drop_demand(job, task_id)
        new = needed
        if job.demands:
            new = {task_id: spec for task_id, spec in needed.items() if task_id not in job.demands}
        for task_id, spec in new.items():
            known = self.tasks.get(task_id)
            if (known is None or not known.on_worker) and (error := self._unfit(spec)):
                return self.fail(job, error)
            if known is None and (error := self._refused(spec)):
                return self.fail(job, error)
        for position, task_id in enumerate(job.tasks):
            if task_id in new:
                self._add_demand(job, new[task_id], position)
        return None

    def _add_demand(self, job: Job, spec: TaskSpec, position: int) -> None:
        job.demands[spec.task_id] = None
        task = self.tasks.get(spec.task_id)
        if task is not None:
            task.demand[job.spec.job_id] = None
            self.fair_queue.add_demand(task, job)
            return
        task = Task(spec, self._costs.acquire(spec), (job.number, position), batch=job.spec.batch)
        if spec.degrees != ALONE:
            self.shareable += 1
            self.shared_only += spec.degrees[0] > 1
        task.set_priority(job.priority, job.virtual_start)
        task.demand[job.spec.job_id] = None
        self.fair_queue.add_demand(task, job)
        self.tasks[spec.task_id] = task
        self.results.add_reader(spec.task_id, spec.needs)
        self._story.born(task, _STAGE_FOR[spec.stage] + job.spec.job_id)
        self._unblock(task)

    def _drop_demand(self, job: Job, task_id: TaskId) -> None:
        """The job does not need the task any more; if no other job does, it is dropped or stopped."""
        del job.demands[task_id]
        task = self.tasks[task_id]
        del task.demand[job.spec.job_id]
        if task.demand:
            self.fair_queue.drop_demand(task, job)
        elif not task.on_worker:
            self.forget(task, "no job needs it")
        elif task.status is TaskStatus.RUNNING:
            assert task.worker_id is not None, f"{task.name} runs nowhere"
            self._story.move(task, TaskStatus.STOPPING, "no job needs it")
            if task.timed_out_at is None and not task.is_refuted:  # otherwise it was asked to stop already
                self._out.append(StopTask(task.worker_id, task.incarnation, task_id, task.attempt))
        elif task.status is TaskStatus.QUEUED:
            self._story.move(task, TaskStatus.STOPPING, "no job needs it")
            self.unneeded.append(task_id)

    def _result_is_there(self, task_id: TaskId) -> None:
        for reader_id in self.results.readers.get(task_id, {}):
            self._unblock(self.tasks[reader_id])

    def _unblock(self, task: Task) -> None:
        """Make a blocked task ready if all its inputs exist."""
        if task.status is not TaskStatus.BLOCKED:
            return
        held = self.results.held
        for need in task.spec.needs:
            if need not in held:
                return
        self._story.move(task, TaskStatus.READY)
        self.fair_queue.file(task)

    def _succeed(self, job: Job) -> None:
        """The wanted result exists: resolve the job, or let it wait until the files are known that it was made with."""
        wanted = job.spec.wanted
        if not self.results.held[wanted].origins:
            return self._end(job, Outcome.SUCCEEDED, result=wanted)
        for task_id in list(job.demands):
            self._drop_demand(job, task_id)
        if not job.waits_for_verdict:
            job.waits_for_verdict = True
            self.results.await_verdict(wanted, job.spec.job_id)
            self._story.note(job, WAITS_FOR_VERDICT)
        return None

    def _make_again(self, task_id: TaskId, lost: Result, is_counted: bool = True) -> None:
        """A result is lost: block its readers, and demand its task for the jobs that still need it. It counts against
        the limit of losses unless it is not `is_counted`."""
        affected: dict[JobId, None] = dict(lost.awaited_by)
        for job_id in affected:
            self.jobs[job_id].waits_for_verdict = False
        for reader_id in self.results.readers.get(task_id, {}):
            reader = self.tasks[reader_id]
            if reader.status is TaskStatus.READY:
                self.fair_queue.unfile(reader)
                self._story.move(reader, TaskStatus.BLOCKED, f"{task_id} was lost")
            if not reader.on_worker or task_id in reader.follows:
                affected.update(reader.demand)
        for job_id in affected:
            job = self.jobs.get(job_id)
            if job is None:
                continue
            if is_counted:
                job.losses[task_id] = job.losses.get(task_id, 0) + 1
            if job.losses.get(task_id, 0) >= MOST_LOSSES:
                message = f"the result of {task_id} was lost {job.losses[task_id]} times"
                self.fail(job, RunError(RunErrorKind.INPUT_LOST, message))
            else:
                self._demand(job)

    def _end(self, job: Job, outcome: Outcome, result: TaskId | None = None, error: RunError | None = None) -> None:
        """Resolve the job and forget it; tasks that only it needed are removed."""
        job_id = job.spec.job_id
        self._story.move(job, JobStatus.ENDED, outcome.value if error is None else f"{outcome.value}: {error.message}")
        self._out.append(ResolveJob(job_id, outcome, result, error))
        del self.jobs[job_id]
        for task_id in list(job.demands):
            self._drop_demand(job, task_id)
        for task_id in job.spec.given:
            self.results.provider_failed(task_id, job_id)
        if job.waits_for_verdict:
            self.results.waiter_ended(job.spec.wanted, job_id)
        self.fair_queue.leave(job, outcome, self.at)
        self.resolved[outcome] += 1
        self.ended[job_id] = outcome
        if len(self.ended) > self._config.ended_jobs_remembered:
            self.ended.popitem(last=False)

    def follows(self, task_id: TaskId) -> tuple[TaskId, ...]:
        """Return the inputs of a task that tasks in front of it on its worker compute."""
        task = self.tasks.get(task_id)
        return () if task is None else task.follows

    def only_reader(self, task_id: TaskId) -> Task | None:
        """Return the only task that reads this result; None if several do, or none."""
        readers = self.results.readers.get(task_id, {})
        return self.tasks[next(iter(readers))] if len(readers) == 1 else None

    def leads_to_others(self, task_id: TaskId, task: Task) -> bool:
        """Return whether other tasks than `task` read this result, and are not on workers yet."""
        for reader_id in self.results.readers.get(task_id, ()):
            reader = self.tasks[reader_id]
            if reader is not task and reader.worker_id is None:
                return True
        return False

    def _is_on_worker(self, task_id: TaskId) -> bool:
        task = self.tasks.get(task_id)
        return task is not None and task.on_worker
