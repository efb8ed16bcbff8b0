"""What a task that has not started waits for, since when and until when, and what each worker would cost it.

Computed on request from the state and from the evaluation that the last placement kept; decides nothing, and changes no
later decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from modelpool.pool.values.specs.spec import TaskId, WorkerId
from modelpool.pool.values.specs.wire_value import WireValue
from modelpool.scheduler.decisions.placement.joining import takes_joining
from modelpool.scheduler.model.jobs import Task, TaskStatus
from modelpool.scheduler.model.placement_record import PlacementOption, WaitEvaluation
from modelpool.scheduler.model.workers import Worker, WorkerState

if TYPE_CHECKING:
    from modelpool.scheduler.core.state import SchedulerState

#: options that are reported, and workers of each sort that are examined for them
MOST_OPTIONS = 16
MOST_EXAMINED = 32
#: an evaluation is current as long as the worker that it waits for has not become free since
_LATE_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class TaskWait(WireValue):
    """Why a task has not started.

    reason        what it waits for, as a clause
    since         when it began to wait: when it could have started, or when its job was submitted; None if unknown
    until         when it is expected to start; None if that cannot be predicted
    ahead         tasks before it in the order of the backlog
    worker_id     the busy worker that the last placement let it wait for; None if it waits for any
    options       the expected times on each worker, if it had the next turn there; soonest first
    evaluated_at  when a placement last let it wait although a worker was idle; None if none did
    evaluated     the expected times then, soonest first
    """

    reason: str
    since: float | None = None
    until: float | None = None
    ahead: int = 0
    worker_id: WorkerId | None = None
    options: tuple[PlacementOption, ...] = ()
    evaluated_at: float | None = None
    evaluated: tuple[PlacementOption, ...] = ()


def wait_of(state: SchedulerState, task: Task, now: float) -> TaskWait | None:
    """Return why a live task has not started; None if a worker has it."""
    if task.status is TaskStatus.BLOCKED:
        return _blocked(state, task, now)
    return _ready(state, task, now) if task.status is TaskStatus.READY else None


def _blocked(state: SchedulerState, task: Task, now: float) -> TaskWait:
    """A task that waits for the results of others."""
    missing = [need for need in task.spec.needs if need not in state.demand.results.held]
    ends = [_end_of(state, need, now) for need in missing]
    until = max((end for end in ends if end is not None), default=None) if None not in ends else None
    names = ", ".join(_doing(state, need) for need in missing)
    return TaskWait(f"waits for {names}", task.ready_at, until, options=_options(state, task, now))


def _doing(state: SchedulerState, task_id: TaskId) -> str:
    task = state.demand.tasks.get(task_id)
    if task is None:
        return f"the result of {task_id}"
    doing = f"runs on {task.worker_id}" if task.on_worker else task.status.value
    return f"the result of {task_id} ({doing})"


def _end_of(state: SchedulerState, task_id: TaskId, now: float) -> float | None:
    """When the result of a task is expected; None if unknown."""
    task = state.demand.tasks.get(task_id)
    if task is None:
        return None
    if task.worker_id is not None:
        worker = state.worker_table.workers.get(task.worker_id)
        wait_seconds = None if worker is None else worker.wait_seconds(now)
        return None if wait_seconds is None else now + wait_seconds
    wait = wait_of(state, task, now)
    if wait is None or wait.until is None or not wait.options:
        return None
    return wait.until + min(option.extra_seconds + option.run_seconds for option in wait.options)


def _ready(state: SchedulerState, task: Task, now: float) -> TaskWait:
    """A task that could start."""
    options = _options(state, task, now)
    since = task.ready_at
    if state.ends_at is not None:
        return TaskWait("the pool is ending, and nothing starts any more", since, options=options)
    if task.held_back:
        return TaskWait("its user has reached the limit of running tasks", since, options=options)
    if task.pinned_to is not None:
        reason = f"waits for {task.pinned_to}: it {'ran out of memory' if task.memory_failures else 'failed'} before"
        until = next((now + option.wait_seconds for option in options if option.worker_id == task.pinned_to), None)
        return TaskWait(reason, since, until, worker_id=task.pinned_to, options=options)
    index = state.worker_table.worker_index
    if not options:
        if not any(_may_run_on(state, task, worker) for worker in _some_workers(state, task)):
            return _without_worker(state, since)
        busy_words = f"{index.busy_count} of {index.count} are busy, with runs of a length that was not measured yet"
        return TaskWait(f"waits for a worker: {busy_words}{_in_a_pass(state, task)}", since)
    ahead, ahead_seconds = _work_ahead(state, task, options[0])
    evaluation = task.evaluation
    evaluated = () if evaluation is None else _evaluated(state, task, evaluation)
    at = None if evaluation is None else evaluation.at
    if evaluation is not None and evaluated and evaluated[0].worker_id != evaluation.idle:
        chosen = evaluated[0]
        until = evaluation.at + chosen.wait_seconds
        if until + _LATE_SECONDS >= now and not _is_idle(state, chosen.worker_id):
            there = next((option for option in evaluated if option.worker_id == evaluation.idle), None)
            instead = "" if there is None else f"; {there.seconds:.2f} s on {there.worker_id}, which was idle"
            reason = f"waits for {chosen.worker_id}: {chosen.seconds:.2f} s until its result there{instead}"
            reason += _in_a_pass(state, task)
            return TaskWait(reason, since, until, ahead, chosen.worker_id, options, at, evaluated)
    live = index.count
    until = now + min(option.wait_seconds for option in options) + ahead_seconds / max(1, live)
    busy = index.busy_count
    before = f", {ahead} tasks before it" if ahead != 1 else ", 1 task before it"
    overtaken = f", overtaken by later tasks {task.passed:.1f} times" if task.passed else ""
    reason = (
        f"waits for a worker: {busy} of {live} are busy{before if ahead else ''}{overtaken}{_in_a_pass(state, task)}"
    )
    return TaskWait(reason, since, until, ahead, None, options, at, evaluated)


def _in_a_pass(state: SchedulerState, task: Task) -> str:
    """Say which pass a task of a fixed batch size may join, or with how many others it begins one; "" for others."""
    spec, demand = task.spec, state.demand
    if spec.batch_size == 1:
        return ""
    for worker in state.worker_table.open_passes.values():
        if worker.pass_key != spec.pass_key:
            continue
        running = [demand.tasks[task_id] for task_id in worker.task_ids]
        if not worker.free_rows:
            return f"; or joins the pass on {worker.worker_id} when one of its {worker.pass_rows} rows is free"
        if takes_joining(worker, running):
            return f"; the pass on {worker.worker_id} has a free row, but would take longer with it, and others wait"
    line = demand.backlog.line(task.cost_class)
    ready = 0 if line is None else len(line.tasks)
    return f"; then runs in a pass of {spec.batch_size} images, for which {ready} of its kind wait"


def _without_worker(state: SchedulerState, since: float | None) -> TaskWait:
    """No worker that is up can run it: one may come."""
    workers = [worker for worker in state.worker_table.workers.values() if worker.wanted]
    kept_off = [worker for worker in workers if worker.cordon is not None]
    starting = [worker for worker in workers if not worker.live and worker.cordon is None]
    if not starting:
        others = [worker for worker in workers if worker.status is not WorkerState.GIVEN_UP]
        reason = "no worker that is up can run it"
        if kept_off:
            reason = _kept_off(kept_off, len(kept_off) == len(others), state.at)
        return TaskWait(reason, since)
    ends = [
        worker.requested_at + state.autoscaler.groups[worker.group].start_seconds
        for worker in starting
        if worker.group and state.autoscaler is not None
    ]
    names = ", ".join(worker.worker_id for worker in starting[:MOST_OPTIONS])
    return TaskWait(f"no worker that is up can run it; starting: {names}", since, min(ends, default=None))


def _kept_off(workers: list[Worker], are_all: bool, at: float) -> str:
    """Say which workers an operator keeps it off."""
    said = []
    for worker in workers[:MOST_OPTIONS]:
        assert worker.cordon is not None, f"{worker.name} is not cordoned"
        doing = "drained" if worker.drains else "cordoned"
        said.append(f"{worker.worker_id} is {doing} by the operator, since {at - worker.cordon.since:.0f} s ago")
    more = f"; and {len(workers) - MOST_OPTIONS} more" if len(workers) > MOST_OPTIONS else ""
    begins = "every worker is out of use" if are_all else "no other worker that is up can run it"
    return f"{begins}: {'; '.join(said)}{more}. `modelpool uncordon` lets them take tasks again"


def _is_idle(state: SchedulerState, worker_id: WorkerId) -> bool:
    worker = state.worker_table.workers.get(worker_id)
    return worker is None or worker.is_idle


def _work_ahead(state: SchedulerState, task: Task, on: PlacementOption) -> tuple[int, float]:
    """The tasks before this one in order, and the seconds of their runs with all weights resident, on the GPU of
    `on`."""
    worker = state.worker_table.workers[on.worker_id]
    count, seconds = 0, 0.0
    for line, before in state.demand.backlog.before(task.order):
        count += before
        seconds += before * state.costs.resident_seconds(line.head.spec, line.cost_class, worker)
    return count, seconds


def _evaluated(state: SchedulerState, task: Task, evaluation: WaitEvaluation) -> tuple[PlacementOption, ...]:
    """What a placement considered, without workers that are gone."""
    found = [(evaluation.idle, 0.0, evaluation.idle_extra_seconds), *evaluation.busy]
    workers = state.worker_table.workers
    options = [
        PlacementOption(
            worker_id,
            wait_seconds,
            extra_seconds,
            state.costs.resident_seconds(task.spec, task.cost_class, workers[worker_id]),
        )
        for worker_id, wait_seconds, extra_seconds in found
        if worker_id in workers
    ]
    return _soonest(options)


def _options(state: SchedulerState, task: Task, now: float) -> tuple[PlacementOption, ...]:
    """What the task would cost on some of the live workers: all of a small pool."""
    options = []
    for worker in _some_workers(state, task):
        wait_seconds = worker.wait_seconds(now)
        extra_seconds = state.costs.extra_seconds(task.spec, task.cost_class, worker)
        if wait_seconds is not None and extra_seconds is not None:
            run_seconds = state.costs.resident_seconds(task.spec, task.cost_class, worker)
            options.append(PlacementOption(worker.worker_id, wait_seconds, extra_seconds, run_seconds))
    return _soonest(options)


def _may_run_on(state: SchedulerState, task: Task, worker: Worker) -> bool:
    return state.costs.extra_seconds(task.spec, task.cost_class, worker) is not None


def _some_workers(state: SchedulerState, task: Task) -> Iterable[Worker]:
    """Holders of its components, the first to be free, and idle ones."""
    index = state.worker_table.worker_index
    found: dict[Worker, None] = {}
    for use in task.cost_class.uses:
        found.update(dict.fromkeys(islice(index.holders.get(use.component, ()), MOST_EXAMINED)))
    found.update((worker, None) for _, _, worker in islice(index.busy, MOST_EXAMINED))
    found.update(dict.fromkeys(islice(index.idle_workers(), MOST_EXAMINED)))
    return [worker for worker in found if worker.live]


def _soonest(options: list[PlacementOption]) -> tuple[PlacementOption, ...]:
    options.sort(key=lambda option: (option.seconds, option.worker_id))
    return tuple(options[:MOST_OPTIONS])
