"""Invariants of shares, limits and deadlines after every event: a part of `scheduler.core.invariants`."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from modelpool.pool.values.specs.spec import UserId
from modelpool.scheduler.decisions.queue.deadlines import SAFETY
from modelpool.scheduler.decisions.queue.shares import LEAST_AHEAD
from modelpool.scheduler.model.jobs import Job, JobStatus, Task, TaskStatus
from modelpool.scheduler.model.user_account import NO_VIRTUAL_START, UserAccount, UserFlow

if TYPE_CHECKING:
    from modelpool.scheduler.core.state import SchedulerState

#: tolerance for sums of seconds
CLOSE_SECONDS = 1e-6


def validate_fair_queue(state: SchedulerState) -> None:
    """Check all of them. Raises AssertionError."""
    for task in state.demand.tasks.values():
        _task(state, task)
    _limits(state)
    _shares(state)
    _deadlines(state)


def _task(state: SchedulerState, task: Task) -> None:
    """A task has the position of the first of the jobs that demand it, and is charged to the user of the first job."""
    name = task.name
    if not task.demand:
        return
    jobs = [state.demand.jobs[job_id] for job_id in task.demand]
    best = min((-job.priority, job.virtual_start) for job in jobs)
    assert (-task.priority, task.virtual_start) == best, (
        f"{name} is at {(-task.priority, task.virtual_start)}, its jobs at {best}"
    )
    assert task.payer == jobs[0].spec.user, f"{name} is charged to {task.payer!r}, requested by {jobs[0].name}"
    due = min((job.spec.deadline or 0.0 for job in jobs if job.urgent), default=math.inf)
    assert task.urgent_by == due, f"{name} is urgent by {task.urgent_by}, expected {due}"
    assert task.reserved_in is not None or task.reserved_seconds == 0.0, f"{name} has reserved seconds of no flow"
    if task.reserved_in is not None:
        payer = state.demand.fair_queue.shares.accounts.get(task.payer)
        assert task.reserved_in.account is payer, f"{name} has reserved seconds of another account than {task.payer!r}"


def _limits(state: SchedulerState) -> None:
    """No user has more tasks on workers than the limit, nor enough ready ones in the backlog to exceed it; none is held
    back without need, and those that are come last."""
    fair_queue = state.demand.fair_queue
    held = list(fair_queue.limits.held())
    waiting = [*state.demand.backlog, *state.demand.backlog.shared_only]
    filed = Counter(task.payer for task in waiting)
    last = {task.payer: task.order for task in sorted(waiting, key=lambda task: task.order)}
    assert all(task.held_back and task.status is TaskStatus.READY for task in held), "what is held back is not ready"
    assert sum(task.held_back for task in state.demand.tasks.values()) == len(held), (
        "held tasks are in no limited user's list"
    )
    for user in {task.payer for task in state.demand.tasks.values()}:
        limit = fair_queue.shares.share_of(user).running_limit
        mine = [task for task in held if task.payer == user]
        if limit is None:
            assert not mine, f"tasks of {user!r} are held back, who has no limit"
            continue
        running = fair_queue.limits.running(user)
        assert running <= limit, f"{running} tasks of {user!r} run, at most {limit} may"
        assert filed[user] <= limit - running, f"{filed[user]} more of {user!r} could start, {running} run"
        assert not mine or filed[user] == limit - running, f"a task of {user!r} is held back, though it could start"
        assert all(task.order > last[user] for task in mine if user in last), f"an early task of {user!r} is held back"


def _shares(state: SchedulerState) -> None:
    fair_queue, demand = state.demand.fair_queue, state.demand
    shares = fair_queue.shares
    live = Counter(job.spec.user for job in demand.jobs.values())
    reserved: dict[int, float] = {}
    for task in demand.tasks.values():
        if task.reserved_in is not None:
            key = id(task.reserved_in)
            reserved[key] = reserved.get(key, 0.0) + task.reserved_seconds
    for job in demand.jobs.values():
        assert job.joined, f"{job.name} is live and not in the queue"
        assert job.priority >= job.spec.priority, f"{job.name} fell in priority"
        _place(job, shares.accounts[job.spec.user])
    for user, account in shares.accounts.items():
        assert account.live == live[user], f"{account.live} jobs of {user!r} are counted, {live[user]} are live"
        assert account.paid >= 0.0, f"{user!r} has credit"
        for flow in account.flows.values():
            expected = reserved.get(id(flow), 0.0)
            assert abs(flow.reserved - expected) < CLOSE_SECONDS, f"{flow.reserved} s of {user!r}, not {expected}"
            _virtual_starts(user, flow, len(live) > 1)


def _place(job: Job, account: UserAccount) -> None:
    """A live job has one place in its flow."""
    flow = account.flows[job.priority]
    places = [jobs for jobs in (flow.unscheduled, flow.scheduled, flow.begun) if job.spec.job_id in jobs]
    assert len(places) == 1, f"{job.name} has {len(places)} places"
    expected = flow.scheduled if job.virtual_start < NO_VIRTUAL_START else flow.begun if job.begun else flow.unscheduled
    assert places[0] is expected, f"{job.name} is in another place"


def _virtual_starts(user: UserId, flow: UserFlow, are_others: bool) -> None:
    """While several users have jobs, some jobs of each have virtual start times, none later than the latest."""
    enough = len(flow.scheduled) >= LEAST_AHEAD or not (flow.unscheduled or flow.begun)
    assert not are_others or enough, (
        f"{len(flow.scheduled)} jobs of {user!r} have virtual starts, and {len(flow.unscheduled)} none"
    )
    assert all(job.virtual_start <= flow.virtual_start for job in flow.scheduled.values()), (
        f"a virtual start of {user!r} is later than the latest"
    )


def _deadlines(state: SchedulerState) -> None:
    """Jobs that have to go first are urgent; a check is scheduled before more have to."""
    deadlines, at = state.demand.fair_queue.deadlines, state.at
    timed = [job for job in state.demand.jobs.values() if job.spec.deadline is not None]
    assert len(deadlines) == len(timed), f"{len(timed)} jobs have a deadline, {len(deadlines)} are known"
    for job in state.demand.jobs.values():
        assert not job.urgent or job.spec.deadline is not None, f"{job.name} is urgent without a deadline"
    for deadline, seconds, longest_seconds, is_urgent in deadlines.groups():
        tasks = {job.name: set(job.demands) for job in timed if job.spec.deadline == deadline}
        assert seconds >= -CLOSE_SECONDS, f"{seconds} s are left to be done by {deadline}"
        begin = deadline - state.config.deadline_margin_seconds - SAFETY * longest_seconds
        assert is_urgent or begin > at, f"{list(tasks)} should have begun at {begin}"
        assert is_urgent or deadlines.next_check <= begin, f"no check of {list(tasks)} before {deadlines.next_check}"
        for job in timed:
            assert job.spec.deadline != deadline or job.urgent == is_urgent or job.status is JobStatus.STOPPING, (
                f"{job.name} is {'' if job.urgent else 'not '}urgent, others of its deadline are"
            )
    if deadlines.next_check < math.inf:
        due = state.ticks.due
        assert due is not None, f"no check of deadlines is scheduled, though one is due at {deadlines.next_check}"
        assert due <= max(at, deadlines.next_check) + 1.0, f"deadlines are checked only at {due}"
