"""Invariants of the core after every event. `validate` changes nothing; its time is proportional to the whole state.

Called after each event in tests; a shell may call it when idle, or before it reports a hang.
"""

from __future__ import annotations

import math
from collections import Counter

from modelpool.pool.values.specs.execution_modes import choose_mode
from modelpool.pool.values.specs.spec import OomStep
from modelpool.pool.weights.plan.eviction_plan import Resident, needed_bytes, plan
from modelpool.scheduler.core.queue_invariants import validate_fair_queue
from modelpool.scheduler.core.send_ahead import MOST_QUEUED
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.core.wakeups import LEAST_TICK_SECONDS
from modelpool.scheduler.decisions.costs.predict import predict
from modelpool.scheduler.decisions.queue.demand import MOST_LOSSES
from modelpool.scheduler.decisions.queue.urgent import AT_ONCE
from modelpool.scheduler.model.gang_runs import GangRun
from modelpool.scheduler.model.jobs import Job, JobStatus, Task, TaskStatus, needed_tasks
from modelpool.scheduler.model.story_lines import dump
from modelpool.scheduler.model.worker_index import SIMILAR_MEMORY
from modelpool.scheduler.model.workers import Worker, WorkerState

_ON_WORKER = (TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.STOPPING)


def validate(state: SchedulerState) -> None:
    """Check every invariant. Raises AssertionError with the story of the subject that violates one."""
    for job in state.demand.jobs.values():
        _job(state, job)
    for task in state.demand.tasks.values():
        _task(state, task)
    for worker in state.worker_table.workers.values():
        _worker(state, worker)
    for gang in state.gangs.runs.values():
        _gang(state, gang)
    _backlog(state)
    _worker_index(state)
    _results(state)
    _pool(state)
    validate_fair_queue(state)
    _no_startable_task_waits(state)
    _predictions(state)
    _pinned_loads(state)


def _pinned_loads(state: SchedulerState) -> None:
    """Pinned sets that are on too few workers are loaded where that is possible."""
    loads = state.pinned_loads
    keys = {key for pinned in loads.sets.values() for key in pinned.components}
    needed = {key: max(p.replicas for p in loads.sets.values() if key in p.components) for key in keys}
    assert loads.replicas == needed, f"pins: {loads.replicas}, of the sets: {needed}"
    for worker in state.worker_table.workers.values():
        assert worker.loading is None or worker.live, _story(state, worker.name, "loads and is not up")
    for pinned in loads.sets.values():
        there, loading = loads.holders(pinned), loads.loading(pinned)
        if state.ends_at is None and len(there) + len(loading) < pinned.replicas:
            possible = loads.candidates(pinned, state.at)
            assert not possible, f"{pinned.components} could be loaded on {[worker.name for worker in possible]}"


def _job(state: SchedulerState, job: Job) -> None:
    """A live job demands exactly the tasks between the existing results and the one that it wants."""
    demand, name = state.demand, job.spec.job_id
    assert name not in demand.ended, _story(state, name, "is live and ended")
    assert job.status in (JobStatus.ACTIVE, JobStatus.STOPPING), _story(state, name, "ended and was not forgotten")
    if job.status is JobStatus.ACTIVE:
        needed, missing = needed_tasks(
            job, demand.results.held, lambda t: t in demand.tasks and demand.tasks[t].on_worker, demand.follows
        )
        assert missing is None, _story(state, name, f"needs {missing}, which no task computes")
        wanted = demand.results.held.get(job.spec.wanted)
        waits = wanted is not None and bool(wanted.origins) and name in wanted.awaited_by
        assert waits == job.waits_for_verdict, _story(state, name, "waits for the hashes of which files?")
        assert needed or waits, _story(state, name, "has its result and is not resolved")
        assert set(job.demands) == set(needed), _story(
            state, name, f"demands {list(job.demands)}, needs {list(needed)}"
        )
        assert not job.awaits, _story(state, name, "is active and awaits runs")
        assert all(losses < MOST_LOSSES for losses in job.losses.values()), _story(state, name, "losses")
    else:
        assert not job.demands, _story(state, name, "is cancelled and demands tasks")
        assert job.awaits, _story(state, name, "is stopping and awaits nothing")
    for task_id in job.demands:
        assert name in demand.tasks[task_id].demand, _story(state, name, f"{task_id} does not know")
    for task_id in job.awaits:
        assert name in demand.tasks[task_id].awaited_by, _story(state, name, f"{task_id} does not know")


def _task(state: SchedulerState, task: Task) -> None:
    demand, name = state.demand, task.spec.task_id
    held = demand.results.held
    assert all(name in demand.jobs[job_id].demands for job_id in task.demand), _story(state, name, "who demands it?")
    assert all(name in demand.jobs[job_id].awaits for job_id in task.awaited_by), _story(
        state, name, "awaited by whom?"
    )
    assert (task.worker_id is not None) == (task.status in _ON_WORKER), _story(
        state, name, f"is {task.status.value} on {task.worker_id}"
    )
    assert task.status is not TaskStatus.ENDED, _story(state, name, "ended and was not forgotten")
    if task.status is not TaskStatus.STOPPING:
        assert task.demand, _story(state, name, "is wanted by no job")
        assert not task.awaited_by, _story(state, name, "runs on and is awaited")
        assert name not in held, _story(state, name, "has a result and is computed again")
    assert task.order == (-task.priority, task.virtual_start, task.number), _story(state, name, "has another sort key")
    if task.status in (TaskStatus.BLOCKED, TaskStatus.READY):
        is_ready = all(need in held for need in task.spec.needs)
        assert is_ready == (task.status is TaskStatus.READY), _story(state, name, f"is {task.status.value}")
        # runs find out which machine has a file, and the weights on a GPU change meanwhile
        assert state.costs.nodes.lacking or state.membership.why_unfit(task.spec) is None, _story(
            state, name, "waits and fits on no worker"
        )
    for need in task.spec.needs:
        assert name in demand.results.readers.get(need, ()), _story(state, name, f"is no reader of {need}")
    assert task.failures < state.config.max_attempts, _story(state, name, f"failed {task.failures} times")
    assert len(task.crashed) <= task.failures + 1, _story(state, name, f"crashed {task.crashed}")
    if task.demand:
        suspected = len(set(task.crashed)) >= state.config.crash_limit
        assert not suspected or task.alone, _story(state, name, f"crashed {task.crashed}")
        assert len(task.memory_failures) <= task.failures, _story(state, name, "ran out of memory without a failure")
    assert task.oom_steps.count(OomStep.RECYCLE) <= 1, _story(state, name, "was recycled for twice")
    assert OomStep.QUARANTINE not in task.oom_steps, _story(state, name, "is quarantined and lives")
    assert not (task.recycle_first and task.pinned_to is None), _story(state, name, "whom to recycle?")
    assert task.pinned_to is None or task.worker_id is None, _story(state, name, "runs and waits for a worker")
    assert task.timed_out_at is None or task.on_worker, _story(state, name, "is late and does not run")
    assert not task.follows or (task.on_worker and state.starts.send_ahead.seconds), _story(
        state, name, "follows what?"
    )
    assert set(task.follows) <= set(task.spec.needs), _story(state, name, f"follows {task.follows}")
    assert not task.demand or all(need in held or need in demand.tasks for need in task.follows), _story(
        state, name, f"follows {task.follows}, which nobody computes"
    )
    assert task.failures <= task.attempt, _story(state, name, "failed more often than it ran")
    assert 0 <= task.passed < state.config.overtaking_limit + 1, _story(state, name, f"was passed {task.passed} times")
    if task.worker_id is not None:
        worker = state.worker_table.workers[task.worker_id]
        queue = {queued.task_id: queued for queued in worker.queue}
        assert (name in queue) != (name in worker.task_ids), _story(
            state, name, f"is on {worker.name}, which runs {worker.task_ids} and then {list(queue)}"
        )
        is_revoked = name in queue and queue[name].is_revoked
        expected = (TaskStatus.QUEUED, TaskStatus.STOPPING) if is_revoked else (TaskStatus.QUEUED,)
        assert name not in queue or task.status in expected, _story(state, name, f"is queued, and {task.status.value}")
        assert name in queue or task.status is not TaskStatus.QUEUED, _story(state, name, "is queued nowhere")
        assert worker.incarnation == task.incarnation, _story(state, name, "is on a worker that was lost")


def _worker(state: SchedulerState, worker: Worker) -> None:
    name = worker.worker_id
    up = worker.status in (WorkerState.IDLE, WorkerState.BUSY)
    assert worker.live == up, _story(state, name, f"is {worker.status.value} with residency {worker.residency}")
    runs = worker.task_id is not None or worker.gang is not None
    assert runs == (worker.status is WorkerState.BUSY), _story(state, name, "runs what?")
    assert worker.gang is None or worker.gang.gang_id in state.gangs.runs, _story(state, name, "in a gang that is over")
    assert worker.held_for is None or worker.held_for == state.gang_starts.held_for, _story(
        state, name, "held for what?"
    )
    assert worker.wanted or worker.status in (WorkerState.STARTING, WorkerState.BUSY), _story(state, name, "lingers")
    assert worker.incarnation == state.worker_table.incarnations[name], _story(state, name, "has an old number")
    _queue(state, worker)
    assert worker.cordon == state.worker_table.cordons.of(worker), _story(state, name, f"has cordon {worker.cordon}")
    assert worker.status is not WorkerState.DRAINED or worker.drains, _story(state, name, "is down without a drain")
    stays = worker.drains or _waits_for_hashes(state, worker)
    assert stays or not worker.is_idle or worker.restart_by is None, _story(state, name, "is idle, and not restarted")
    assert not (worker.is_idle and worker.drains) or _waits_for_hashes(state, worker), _story(
        state, name, "is idle, and its machine is drained"
    )
    limit = state.config.start_retry_limit
    given_up = worker.status is WorkerState.GIVEN_UP
    assert given_up == (worker.failures >= limit) or up, _story(state, name, f"failed {worker.failures} times")
    if worker.residency is None:
        assert not worker.entries, _story(state, name, "is down and holds weights")
        return
    entries = worker.residency.entries
    assert worker.entries == {e.component: e for e in entries}, _story(state, name, "holds other weights")
    assert len(worker.entries) == len(entries), _story(state, name, "holds a component twice")
    assert worker.used_bytes == worker.residency.used_bytes, _story(state, name, "counts bytes wrong")
    assert worker.capacity_bytes == worker.residency.capacity_bytes, _story(state, name, "has two capacities")
    assert all(e.resident_bytes > 0 for e in entries), _story(state, name, "holds an empty entry")
    running_bytes = 0
    tasks = [state.demand.tasks[task_id] for task_id in worker.task_ids]
    for task in tasks:
        assert task.worker_id == name, _story(state, name, f"runs {task.name}, which is on {task.worker_id}")
        is_same = task.cost_class is tasks[0].cost_class or (worker.pass_key and task.spec.pass_key == worker.pass_key)
        assert is_same, _story(state, name, f"runs {worker.task_ids} of other weights")
        assert worker.members == 1 or not task.alone, _story(state, name, f"runs {task.name} with others again")
    assert not worker.batch_mates or worker.task_id is not None, _story(state, name, "has mates of no run")
    assert bool(worker.pass_key) == (name in state.worker_table.open_passes), _story(state, name, "is open or not?")
    assert not worker.pass_key or tasks, _story(state, name, "has a pass of nobody")
    assert worker.free_rows >= 0, _story(state, name, f"has {len(tasks)} tasks in {worker.pass_rows} rows")
    assert len(set(worker.task_ids)) == len(tasks) <= worker.members, _story(state, name, "counts tasks wrong")
    most = max(state.config.batch_limit, tasks[0].spec.batch_size) if tasks else 0
    assert not tasks or worker.members <= most, _story(state, name, "runs too many tasks at once")
    if tasks:
        mode = tasks[0].cost_class.mode(worker.residency.capacity_bytes)
        running_bytes = (
            mode.activation_bytes * tasks[0].spec.multiple(worker.members) + tasks[0].cost_class.scratch_bytes
        )
        if tasks[0].cost_class.needed_bytes > worker.residency.capacity_bytes:
            return  # it was queued when there was more memory
    assert worker.used_bytes + running_bytes <= worker.residency.capacity_bytes, _story(state, name, "is overfull")


def _gang(state: SchedulerState, gang: GangRun) -> None:
    """The members that have not ended are those on their workers; one of them stands for the run while it counts."""
    name, workers = gang.task_id, state.worker_table.workers
    members = {member.worker_id: member.incarnation for member in gang.members}
    assert gang.left, _story(state, name, f"{gang.gang_id} is over and kept")
    assert set(gang.left) <= set(members), _story(state, name, f"{gang.left} are left of {members}")
    assert len(members) == len(gang.members) > 1, _story(state, name, f"{gang.members} share a run")
    for worker_id in gang.left:
        worker = workers[worker_id]
        assert worker.gang is gang, _story(state, name, f"{worker_id} is in {worker.gang}")
        assert worker.incarnation == members[worker_id], _story(state, name, f"{worker_id} is another process")
        assert not worker.queue, _story(state, name, f"{worker_id} has queued tasks")
        stands = worker_id == gang.lead and not gang.has_ended
        assert (worker.task_id == name) == stands, _story(state, name, f"{worker_id} stands for {worker.task_id}")
    assert {w.worker_id for w in workers.values() if w.gang is gang} == set(gang.left), _story(
        state, name, "who is left?"
    )
    assert gang.asked_at is not None or not (gang.has_ended or gang.failures), _story(state, name, "awaits no end")
    if not gang.has_ended:
        task = state.demand.tasks[name]
        assert gang.lead in gang.left, _story(state, name, f"{gang.lead} has ended")
        assert (task.worker_id, task.attempt) == (gang.lead, gang.attempt), _story(
            state, name, f"is on {task.worker_id}"
        )
        assert task.degree == gang.degree, _story(state, name, f"has {task.degree} GPUs, not {gang.degree}")
        assert not gang.failures or task.is_stopping, _story(state, name, "broke, and nobody was asked to stop")


def _waits_for_hashes(state: SchedulerState, worker: Worker) -> bool:
    return (worker.worker_id, worker.incarnation) in state.refutation.verdicts.pending


def _queue(state: SchedulerState, worker: Worker) -> None:
    name, queue = worker.worker_id, worker.queue
    assert not queue or worker.status is WorkerState.BUSY, _story(state, name, "has queued tasks, and no run")
    assert bool(queue) == (name in state.worker_table.with_queued), _story(state, name, "what is next?")
    assert not queue or state.starts.send_ahead.seconds, _story(state, name, "has queued tasks")
    assert len(queue) <= MOST_QUEUED, _story(state, name, f"has {len(queue)} queued tasks")
    assert abs(worker.queued_seconds - sum(queued.seconds for queued in queue)) < 1e-6, _story(
        state, name, f"counts {worker.queued_seconds} s of queued tasks"
    )
    stays = worker.takes_tasks and worker.drain_deadline is None and state.ends_at is None
    for queued in queue:
        task = state.demand.tasks[queued.task_id]
        assert task.worker_id == name, _story(state, name, f"runs {task.name} later, which is on {task.worker_id}")
        assert stays or queued.is_revoked, _story(state, name, "ends, and has a queued task")
        assert worker.is_barred or not queued.is_revoked, _story(state, name, "may be sent tasks behind a revoked one")
        assert not (queued.joins and task.alone), _story(state, name, f"runs {task.name} with others again")
        assert not (worker.overlaps_decode and task.alone), _story(state, name, f"may run {task.name} with others")


def _backlog(state: SchedulerState) -> None:
    backlog = state.demand.backlog
    filed = list(backlog)
    ready = [t for t in state.demand.tasks.values() if t.status is TaskStatus.READY]
    pinned = [*state.demand.pinned, *state.demand.fair_queue.limits.held(), *backlog.shared_only]
    assert all(task.degrees[0] > 1 for task in backlog.shared_only), "a task waits for several workers without need"
    held_for = None if state.ends_at is not None else state.gang_starts.held_for
    assert held_for is None or any(task.name == held_for for task in backlog.shared_only), (
        f"workers are held for {held_for}, which does not wait"
    )
    assert len(filed) == len(backlog), f"{len(filed)} tasks are in the backlog, which counts {len(backlog)}"
    wanted = Counter(key for task in filed for key in task.cost_class.components)
    assert backlog.wanted == wanted, f"the backlog counts {backlog.wanted} uses of components, there are {dict(wanted)}"
    assert len(filed) + len(pinned) == len(ready), f"{len(ready)} tasks are ready, {len(filed)} + {len(pinned)} wait"
    assert {t.name for t in (*filed, *pinned)} == {t.name for t in ready}, "others than the ready tasks wait"
    assert all(t.pinned_to is None for t in filed), "the backlog holds a task that waits for one worker"
    waiting = list(state.demand.pinned)
    assert len(waiting) == len(state.demand.pinned), f"{len(waiting)} are pinned, {len(state.demand.pinned)} counted"
    for task in waiting:
        _pinned(state, task)
    live = [w for s in (WorkerState.IDLE, WorkerState.BUSY) for w in state.worker_table.usable(s)]
    capacities = tuple(sorted({w.capacity_bytes or 0 for w in live}))
    assert backlog.capacities == capacities, f"the backlog knows {backlog.capacities}, live are {capacities}"
    firsts = [t for t in filed if (line := backlog.line(t.cost_class)) is not None and line.head is t]
    assert len(firsts) == len({t.cost_class for t in filed}) == backlog.line_count, "a line has no first task, or two"
    for capacity_bytes in capacities:
        fitting = [t for t in firsts if t.cost_class.needed_bytes <= capacity_bytes]
        lines = [line.head for line in backlog.lines(capacity_bytes)]
        assert lines == fitting, f"at {capacity_bytes} B lines begin with {lines}"
        assert backlog.oldest(capacity_bytes) is (fitting[0] if fitting else None), f"oldest at {capacity_bytes} B"
    uses = {(t.cost_class.uses[0].component, t.cost_class.uses[0].patch_digest) for t in filed if t.cost_class.uses}
    found = backlog.using([Resident(component, 1, digest) for component, digest in sorted(uses)])
    assert {line.head.name for line in found} == {t.name for t in firsts}, "the backlog does not find every line"
    for component in state.costs.components:
        first = [t for t in firsts if t.cost_class.uses and t.cost_class.uses[0].component == component]
        assert [line.head for line in backlog.of_component(component, len(filed))] == first, f"lines of {component}"
    _urgent(state, filed)


def _urgent(state: SchedulerState, filed: list[Task]) -> None:
    """Exactly those tasks of the backlog are urgent that have a reason, by the earliest of their deadlines."""
    urgent, limit = state.demand.backlog.urgent, state.config.overtaking_limit
    for task in filed:
        assert task.overdue == (task.passed >= limit), _story(state, task.name, f"was passed over {task.passed} times")
        due = AT_ONCE if task.goes_first or task.overdue else task.urgent_by
        expected = due if due < math.inf else None
        known = urgent.deadline_of(task)
        assert known == expected, _story(state, task.name, f"is urgent by {known}, expected {expected}")
    for deadline, order, task in urgent:
        assert task in filed, _story(state, task.name, "is urgent and does not wait")
        assert order == task.order, _story(state, task.name, "is urgent with another sort key")
        known = urgent.deadline_of(task)
        assert known == deadline, _story(state, task.name, f"is urgent by {deadline} and {known}")
    assert len(urgent) == sum(task in urgent for task in filed), "a task is urgent twice, or not found there"
    assert list(urgent) == sorted(urgent), "urgent tasks are out of order"


def _worker_index(state: SchedulerState) -> None:
    """The worker index agrees with a scan of all workers."""
    where = state.worker_table.worker_index
    idle, busy = state.worker_table.usable(WorkerState.IDLE), state.worker_table.usable(WorkerState.BUSY)
    assert set(where.idle_workers()) == set(idle), f"idle are {[w.name for w in idle]}"
    assert where.idle_count == len(idle), f"{where.idle_count} are counted as idle"
    assert where.busy_count == len(busy), f"{where.busy_count} are counted as busy"
    up = [*idle, *busy]
    assert where.count == len(up), f"{where.count} are counted, {len(up)} are up"
    largest_bytes = max((w.capacity_bytes or 0 for w in idle), default=0)
    assert where.largest_idle_bytes == largest_bytes, f"{where.largest_idle_bytes} B are free, not {largest_bytes} B"
    sizes = [w.capacity_bytes or 0 for w in up]
    devices = {"" if w.spec is None else w.spec.device_name for w in up}
    assert where.devices == devices, f"devices {sorted(devices)}"
    are_similar = len(devices) < 2 and max(sizes, default=0) <= SIMILAR_MEMORY * min(sizes, default=0)
    assert where.are_similar == are_similar, (
        f"{sizes} B on {sorted(devices)} are {'' if are_similar else 'not '}similar"
    )
    known = sorted((w.expected_end, w.worker_id) for w in busy if w.expected_end is not None)
    assert [(end, name) for end, name, _ in where.busy] == known, f"busy until {known}"
    holders = {c: {w for w in up if c in w.entries} for w in up for c in w.entries}
    assert {c: set(found) for c, found in where.holders.items()} == holders, "holders of components"
    for worker_class, workers in where.idle.items():
        for worker in workers:
            assert worker_class[0] == worker.capacity_bytes, _story(
                state, worker.name, f"is indexed under {worker_class}"
            )


def _pinned(state: SchedulerState, task: Task) -> None:
    """A task waits for one worker after it ran out of memory or lost one: for a limited time, and only for one that may
    take it and is not idle, or waits as in `_is_reported_in_parts`."""
    name, worker_id = task.spec.task_id, task.pinned_to
    assert task.memory_failures or task.crashed, _story(state, name, f"waits for {worker_id} without a reason")
    assert state.at < task.pinned_until, _story(state, name, f"waits for {worker_id} for too long")
    assert worker_id is not None, _story(state, name, "has an empty list of waiting tasks")
    assert state.worker_table.may_take(worker_id, task.cost_class.needed_bytes), _story(
        state, name, f"waits for {worker_id}"
    )
    is_idle = state.worker_table.workers[worker_id].status is WorkerState.IDLE
    first = state.demand.pinned.first(worker_id)
    may_start = first is not None and state.demand.fair_queue.may_start(first)
    can_start = is_idle and may_start and not _is_reported_in_parts(state)
    assert not can_start, _story(state, name, f"{worker_id} is idle")


def _results(state: SchedulerState) -> None:
    """Every result is held for a reason; those kept for later are within their limits."""
    demand, results = state.demand, state.demand.results
    for task_id, result in results.held.items():
        in_use = bool(result.providers) or bool(result.awaited_by)
        reasons = (bool(results.readers.get(task_id)), in_use, task_id in results.kept)
        assert all(demand.jobs[job_id].spec.wanted == task_id for job_id in result.awaited_by), _story(
            state, task_id, "is awaited by jobs that want another result"
        )
        for worker_id, incarnation, _ in result.origins:
            maker = state.worker_table.current(worker_id, incarnation)
            assert maker is not None, _story(state, task_id, f"was made by {worker_id}, which is gone")
            assert maker.live, _story(state, task_id, f"was made by {worker_id}, which is gone")
        assert any(reasons), _story(state, task_id, "its result is held without a reason")
        assert not (reasons[2] and (reasons[0] or reasons[1])), _story(
            state, task_id, "kept, though it is read or provided"
        )
        assert reasons[2] <= result.shareable, _story(state, task_id, "kept, though no later job can use it")
        for job_id in result.providers:
            assert task_id in demand.jobs[job_id].spec.given, _story(state, task_id, f"{job_id} did not provide it")
    assert all(task_id in results.held for task_id in results.kept), "a result is kept that is not held"
    kept_bytes = sum(results.held[task_id].result_bytes for task_id in results.kept)
    assert results.kept_bytes == kept_bytes <= state.config.kept_result_bytes, f"{kept_bytes} bytes are kept"
    assert len(results.kept) <= state.config.kept_results, f"{len(results.kept)} results are kept"
    for need, readers in results.readers.items():
        assert readers, f"{need} has an empty list of readers"
        for reader in readers:
            assert need in demand.tasks[reader].spec.needs, _story(state, reader, f"does not read {need}")


def _pool(state: SchedulerState) -> None:
    """Totals, and the consequences of having no worker left."""
    assert sum(state.demand.resolved.values()) >= len(state.demand.ended), "more jobs ended than were resolved"
    if state.worker_table.hopeless():
        active = [j.name for j in state.demand.jobs.values() if j.status is JobStatus.ACTIVE]
        assert not active, f"no worker is left, yet {active} are active"
    for task in state.demand.tasks.values():
        is_started = task.worker_id is not None and task.name in state.worker_table.workers[task.worker_id].task_ids
        if is_started and state.config.run_timeout_seconds is not None:
            latest = max(state.at, state.timeouts.time_up_at(task)) + 2 * LEAST_TICK_SECONDS
            due = state.ticks.due
            assert due is not None, _story(state, task.spec.task_id, "may hang, and no tick is pending")
            assert due <= latest, _story(state, task.spec.task_id, f"is checked at {due}, not by {latest}")
    totals = state.worker_table.totals
    assert 0 <= totals.runs_resident <= totals.runs, f"{totals.runs_resident} resident of {totals.runs} runs"


def _no_startable_task_waits(state: SchedulerState) -> None:
    """Idle workers and tasks that they can run coexist only while busy workers should be sooner; never for an overdue
    task. In a pool that ends, all tasks wait; and those that wait for the ends of the other tasks of a batch, or for
    the other jobs of a submission, which are reported one after the other."""
    idle = state.worker_table.usable(WorkerState.IDLE)
    if not idle or state.ends_at is not None or _is_reported_in_parts(state):
        return
    largest_bytes = max(w.capacity_bytes or 0 for w in idle)
    could_start = [
        line.head
        for line in state.demand.backlog.lines(largest_bytes)
        if any(state.costs.extra_seconds(line.head.spec, line.cost_class, worker) is not None for worker in idle)
    ]
    busy = state.worker_table.usable(WorkerState.BUSY)
    assert not could_start or busy, f"{could_start[0].name} waits, {idle[0].name} is idle and nothing runs"
    assert not could_start or state.ticks.due is not None, f"{could_start[0].name} waits and no tick is pending"
    if could_start:
        oldest = could_start[0]
        assert oldest.passed < state.config.overtaking_limit, _story(state, oldest.name, "is overdue and waits")
    for task in could_start:
        soonest = [w for w in busy if w.expected_end is not None]
        assert soonest, _story(state, task.name, f"waits, while {idle[0].name} is idle, for workers of unknown end")


def _is_reported_in_parts(state: SchedulerState) -> bool:
    """Return whether only some tasks of a batch are reported as ended, or some jobs of a submission as submitted:
    nothing starts before the last report."""
    if state.others_follow:
        return True
    busy = state.worker_table.usable(WorkerState.BUSY)
    return any(len(worker.task_ids) < worker.members for worker in busy if worker.members > 1 and not worker.pass_key)


def _predictions(state: SchedulerState) -> None:
    """The cached estimate of a cost class on a worker equals a new plan."""
    counts = Counter(task.cost_class for task in state.demand.tasks.values())
    on_workers = Counter(task.cost_class for task in state.demand.tasks.values() if task.on_worker)
    for cost_class, count in counts.items():
        assert cost_class.on_workers == on_workers[cost_class], (
            f"workers have {on_workers[cost_class]} tasks of {cost_class.stage} {cost_class.uses}, "
            f"not {cost_class.on_workers}"
        )
        assert cost_class.tasks == count, (
            f"{count} tasks have {cost_class.stage} {cost_class.uses}, not {cost_class.tasks}"
        )
    first_tasks: dict[int, Task] = {}
    for task in state.demand.tasks.values():
        first_tasks.setdefault(id(task.cost_class), task)
    for task in first_tasks.values():
        cost_class = task.cost_class
        for worker in state.worker_table.workers.values():
            if not worker.live or cost_class.needed_bytes > (worker.capacity_bytes or 0):
                continue
            assert worker.residency is not None, f"{worker.name} is live without residency"
            mode = choose_mode(task.spec, worker.residency.capacity_bytes - needed_bytes(cost_class.uses, 0))
            moves = plan(worker.residency, cost_class.uses, state.costs.components, mode.activation_bytes)
            load = state.costs.load_estimate(cost_class, worker)
            entries = tuple(worker.entries.get(use.component) for use in cost_class.uses)
            fresh = predict(cost_class, entries, worker.residency.capacity_bytes, state.costs.components)
            if load is None:
                node, read = state.costs.nodes.of(worker.spec), cost_class.files_of(fresh.reads)
                assert node is not None, _story(state, task.name, f"is not predicted on {worker.name}")
                is_lacking = node.unavailable_of(read, state.at) or node.differing_of(cost_class.files)
                is_lacking = is_lacking or node.refused_of(cost_class.files, state.at)
                assert is_lacking, _story(state, task.name, f"has all files on {node.node}")
                assert node.node in state.worker_table.worker_index.restricted, f"{node.node} is not restricted"
                continue
            node = state.costs.nodes.of(worker.spec)
            assert node is None or node.differing_of(cost_class.files) is None, _story(
                state, task.name, f"is predicted on {worker.name}, whose files differ"
            )
            assert load == fresh, _story(state, task.name, f"is predicted {load} on {worker.name}, expected {fresh}")
            shown = (load.mode, load.upload_bytes, load.streamed_bytes, load.switches, load.evicted_bytes(worker))
            true = (mode, moves.upload_bytes, moves.streamed_bytes, len(moves.switched), moves.evicted_bytes)
            assert shown == true, _story(
                state, task.name, f"is predicted {shown} on {worker.name}, the plan says {true}"
            )
            assert state.costs.residency_after(cost_class, worker) == moves.after, _story(state, task.name, "after?")
            known = cost_class.cached.get(worker)
            if known is not None and known.holds(worker):
                seconds = state.costs.seconds_of(load, worker)
                assert known.seconds == seconds, _story(state, task.name, f"costs {seconds} s, not {known.seconds} s")


def _story(state: SchedulerState, subject: str, problem: str) -> str:
    return f"{subject} {problem}\n{dump(state.log.lines(frozenset({subject})))}"
