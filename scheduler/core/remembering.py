"""Exports what limits, shares and estimates depend on as a `PoolMemory`, and takes over one of an earlier core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING

from modelpool.pool.values.specs.spec import NO_NODE, NO_WORKER, NodeId, WorkerId
from modelpool.scheduler.model.cordons import Cordon, Cordons
from modelpool.scheduler.model.pool_memory import PoolMemory, RememberedCordon, RememberedGroup, RememberedUser

if TYPE_CHECKING:
    from modelpool.scheduler.autoscaling.autoscaler import Autoscaler
    from modelpool.scheduler.core.state import SchedulerState

#: users that are remembered: those who used most
MOST_USERS = 10_000
HOUR = 3600.0


def memory_of(state: SchedulerState, at: float) -> PoolMemory:
    """Return the memory of a core, at `at`."""
    shares, deadlines, scaler = state.demand.fair_queue.shares, state.demand.fair_queue.deadlines, state.autoscaler
    used = sorted(shares.accounts.items(), key=lambda item: -item[1].seconds)[:MOST_USERS]
    spent = cost_per_hour = 0.0
    if scaler is not None:
        spent, cost_per_hour = scaler.spent_until(at), scaler.cost_per_hour
    return PoolMemory(
        spent,
        cost_per_hour,
        deadlines.met,
        deadlines.missed,
        tuple(
            RememberedUser(user, max(0.0, account.paid - shares.virtual_seconds), account.seconds, account.load_seconds)
            for user, account in used
        ),
        () if scaler is None else tuple(_group(scaler, name, at) for name in scaler.groups),
        state.costs.run_kinds.remembered(),
        state.costs.remembered_patches(),
        tuple(_cordons(state.worker_table.cordons, at)),
        state.costs.gang_times.remembered(),
    )


def remember(state: SchedulerState, memory: PoolMemory, gap_seconds: float) -> None:
    """Take over the memory of an earlier core, which ended `gap_seconds` ago. Its nodes cost money since then. What
    this core has learned itself counts more."""
    shares, deadlines = state.demand.fair_queue.shares, state.demand.fair_queue.deadlines
    deadlines.met += memory.deadlines_met
    deadlines.missed += memory.deadlines_missed
    for each in memory.users:
        account = shares.account(each.user)
        account.paid += each.paid_ahead
        account.seconds += each.seconds
        account.load_seconds = account.load_seconds or each.load_seconds
    state.costs.run_kinds.remember(memory.runs)
    state.costs.gang_times.remember(memory.gangs, state.costs.run_kinds)
    state.costs.remember_patches(memory.patches)
    _remember_cordons(state, memory.cordons, gap_seconds)
    if state.autoscaler is not None:
        state.autoscaler.spent += memory.spent + memory.cost_per_hour * gap_seconds / HOUR
        for group in memory.groups:
            _remember_group(state.autoscaler, group, state.at, gap_seconds)
        state.autoscaler.remembered(state.at)


def _cordons(cordons: Cordons, at: float) -> Iterator[RememberedCordon]:
    for node, cordon in cordons.nodes.items():
        yield RememberedCordon(node, NO_WORKER, at - cordon.since, _left(cordon.deadline, at))
    for worker_id, cordon in cordons.workers.items():
        yield RememberedCordon(NO_NODE, worker_id, at - cordon.since, _left(cordon.deadline, at))
    for worker_id, deadline in cordons.restarts.items():
        yield RememberedCordon(NO_NODE, worker_id, 0.0, _left(deadline, at), restarts=True)


def _left(deadline: float | None, at: float) -> float | None:
    return None if deadline is None else max(0.0, deadline - at)


def _remember_cordons(state: SchedulerState, remembered: Iterable[RememberedCordon], gap_seconds: float) -> None:
    nodes: dict[NodeId, Cordon] = {}
    workers: dict[WorkerId, Cordon] = {}
    restarts: dict[WorkerId, float] = {}
    for each in remembered:
        left_seconds = None if each.left_seconds is None else max(0.0, each.left_seconds - gap_seconds)
        deadline = None if left_seconds is None else state.at + left_seconds
        if each.restarts:
            restarts[each.worker_id] = state.at if deadline is None else deadline
        elif each.worker_id:
            workers[each.worker_id] = Cordon(state.at - each.age_seconds - gap_seconds, deadline)
        else:
            nodes[each.node] = Cordon(state.at - each.age_seconds - gap_seconds, deadline)
    if nodes or workers or restarts:
        state.maintenance.remember(nodes, workers, restarts)


def _group(scaler: Autoscaler, name: str, at: float) -> RememberedGroup:
    record = scaler.groups[name]
    blocked = None if record.blocked_until == inf else max(0.0, record.blocked_until - at)
    is_blocked = blocked is None or blocked > 0.0
    return RememberedGroup(
        name,
        record.starts.measurements,
        record.failures,
        record.crashes,
        blocked,
        record.reason if is_blocked else "",
    )


def _remember_group(scaler: Autoscaler, group: RememberedGroup, at: float, gap_seconds: float) -> None:
    record = scaler.groups.get(group.name)
    if record is None:  # of an earlier configuration
        return
    record.starts.fill(group.starts)
    if record.failures or record.has_been_up:  # it has been tried since
        return
    record.failures, record.crashes = group.failures, group.crashes
    until = inf if group.blocked_seconds is None else at + group.blocked_seconds - gap_seconds
    if until > at:
        record.blocked_until, record.reason = until, group.reason
