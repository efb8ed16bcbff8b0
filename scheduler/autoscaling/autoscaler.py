"""`Autoscaler`: keeps the number of nodes of each group as `scheduler.autoscaling.wanted` decides.

The part with a state: it follows the events of the core, builds the input of a decision at intervals and after events
that matter, and carries the decisions out in the worker table. Without groups it does not exist.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from math import inf
from typing import TypeAlias

from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.specs.spec import ComponentKey, NodeId, WorkerSpec
from modelpool.scheduler.autoscaling.drain_time import finish_at, servers
from modelpool.scheduler.autoscaling.group_records import GroupRecord
from modelpool.scheduler.autoscaling.outlook import (
    DueWork,
    Fleet,
    FleetNode,
    GiveUpNode,
    GroupOutlook,
    PendingWork,
    RequestNodes,
    WaitingWork,
)
from modelpool.scheduler.autoscaling.preview import ScalingPreview, WaitingLevel, group_previews
from modelpool.scheduler.autoscaling.recent_work import WorkHistory
from modelpool.scheduler.autoscaling.steady_arrivals import SteadyArrivals
from modelpool.scheduler.autoscaling.wanted import (
    HOUR,
    LAST_RUN_SECONDS,
    LAST_SECONDS,
    fits_limits,
    least_cost,
    obstacles_of,
    pays_minimum,
    wanted,
)
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.cordons import unavailable
from modelpool.scheduler.model.cost_classes import CostClass
from modelpool.scheduler.model.estimates import Estimate
from modelpool.scheduler.model.file_verdicts import Incarnation
from modelpool.scheduler.model.messages import (
    Cordoned,
    DisruptionsAllowed,
    Event,
    FilesJudged,
    LossCause,
    NodeDraining,
    PinComponents,
    RunEnded,
    StartFailed,
    Submitted,
    Uncordoned,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from modelpool.scheduler.model.node_groups import AutoscalingConfig
from modelpool.scheduler.model.scaling_record import ScalingRule, ScalingWhy
from modelpool.scheduler.model.workers import Worker, WorkerState, WorkerTable

#: two evaluations are at least this far apart, except for notices that a node ends
LEAST_SECONDS = 1.0
#: latest decisions that are kept for users
MOST_DECISIONS = 64
#: seconds of a restart of a process on a node that exists
RESTART_SECONDS = 20.0
#: a start is overdue after this multiple of its expected time, and these seconds
OVERDUE = 1.5
OVERDUE_SECONDS = 30.0
#: part of the time that jobs with deadlines leave, for which their work may queue for fewer GPUs
SLACK_PART = 0.25
#: work without a deadline counts as absent after this time without any
FORGET_SECONDS = 1800.0
#: memory sizes of workers that the shell named are one level up to this ratio
SIMILAR_MEMORY = 1.05
#: weight of the past in the ratio of loading to running, per run
KEPT_PART = 0.99
#: seconds of runs without loads that this ratio begins with: the first runs of a worker load, and say little
PRIOR_SECONDS = 300.0
MOST_LOADING = 1.0
#: causes that concern the process, not the supply of nodes
_OF_THE_PROCESS = (LossCause.CRASH, LossCause.OUT_OF_MEMORY)
_OF_THE_NODE = (LossCause.NODE_LOST, LossCause.PREEMPTED)

Decide: TypeAlias = Callable[
    [PendingWork, Sequence[GroupOutlook], Fleet, float, AutoscalingConfig, float], tuple[RequestNodes | GiveUpNode, ...]
]


class Autoscaler:
    """The nodes of all groups. Methods change the worker table; its commands follow from that."""

    def __init__(
        self,
        config: SchedulerConfig,
        worker_table: WorkerTable,
        demand: Demand,
        costs: Costs,
        pins: Mapping[ComponentKey, int],
        draining: Mapping[NodeId, float],
        unverified: Container[Incarnation] = (),
    ) -> None:
        """`pins`, `draining` (machines, and when they end) and `unverified` (workers that compute hashes of files for
        which results wait) are kept up to date by the caller."""
        self._config = config
        self._worker_table = worker_table
        self._demand = demand
        self._costs = costs
        #: the policy; `benchmarks.lab.scaling_rules` has others
        self.decide: Decide = wanted
        self.groups = {group.name: GroupRecord(group) for group in config.groups}
        #: money spent on nodes, from their request to their end
        self.spent = 0.0
        #: the latest decisions, oldest first
        self.decisions: deque[ScalingWhy] = deque(maxlen=MOST_DECISIONS)
        #: when the next evaluation is due; infinity if nothing can change without an event
        self.next_at = 0.0
        #: component -> workers that must hold it
        self.pins = pins
        self._draining = draining
        self._unverified = unverified
        self._history = WorkHistory()
        self._arrivals = SteadyArrivals(config.autoscaling.interval_seconds)
        self._at = 0.0
        self._evaluated_at = -inf
        #: price of all nodes, requested ones included, and the number of workers that it was computed for
        self.cost_per_hour = 0.0
        self._counted = 0
        #: workers that must end their runs now: `max_cost` is spent
        self.expired: list[Worker] = []
        #: since when no task waits
        self._unused_since = 0.0
        #: seconds of loads and of runs, the latest count most
        self._loading = 0.0
        self._running = 0.0
        #: seconds that jobs with deadlines had at submission, and when one without was submitted
        self._slack = Estimate()
        self._free_at = -inf
        #: groups that jobs may count on
        self._usable = self._usable_groups()

    # ---- events ------------------------------------------------------------------------------------------------------

    def step(self, event: Event, at: float) -> bool:
        """An event was applied. Returns whether workers were requested or given up."""
        self._bill(at)
        match event:
            case RunEnded():
                cost = event.report.cost
                self._loading = KEPT_PART * self._loading + cost.load_seconds
                self._running = KEPT_PART * self._running + cost.run_seconds
                self._due(at + self._config.autoscaling.interval_seconds)
            case Submitted():
                if event.job.deadline is None:
                    self._free_at = at
                else:
                    self._slack.add(max(0.0, event.job.deadline - at))
                if not self._worker_table.worker_index.count or self.next_at == inf:
                    self._due(max(at, self._evaluated_at + LEAST_SECONDS))
            case NodeDraining() | Cordoned() | Uncordoned() | DisruptionsAllowed():
                self._due(at)
            case WorkerDown() | StartFailed():
                self._drop_given_up(at)
                self._due(max(at, self._evaluated_at + LEAST_SECONDS))
            case WorkersWanted() | WorkerUp() | PinComponents() | FilesJudged():
                self._due(max(at, self._evaluated_at + LEAST_SECONDS))
            case _:
                pass
        return at >= self.next_at and self._evaluate(at)

    def spent_until(self, at: float) -> float:
        """Money spent on nodes until `at`, at or after the latest event."""
        return self.spent + self.cost_per_hour * max(0.0, at - self._at) / HOUR

    def remembered(self, at: float) -> None:
        """The memory of an earlier core has changed what was spent, and the records of groups."""
        self._usable = self._usable_groups()
        self._due(at)

    def came_up(self, spec: WorkerSpec, at: float, is_new: bool = True) -> None:
        """A worker introduces itself; the table does not know yet. Workers of groups that were given up are ignored.
        Only the start of a new process (`is_new`) measures how long starts take."""
        worker = self._worker_table.workers.get(spec.worker_id)
        if worker is None or not worker.group:
            return
        is_first = is_new and worker.spec is None and spec.incarnation == 1
        self.groups[worker.group].came_up(spec, at - worker.requested_at if is_first else None)

    def lost(self, worker: Worker, cause: LossCause) -> None:
        """A worker of a group that was up is lost; the table does not know yet. It is forgotten if its machine is gone;
        the next evaluation decides whether to request another."""
        if cause in _OF_THE_NODE:
            worker.wanted = False

    def start_failed(self, worker: Worker, cause: LossCause, reason: str, at: float) -> None:
        """A worker of a group did not start; the table does not know yet. If it never was up, its node did not come or
        is unusable: it is forgotten, and the group backs off."""
        if worker.spec is None:
            is_crash = cause in _OF_THE_PROCESS
            self.groups[worker.group].start_failed(at, reason, is_crash, self._config.start_retry_limit)
            worker.wanted = False
        elif cause in _OF_THE_NODE:
            worker.wanted = False

    def nodes_left(self, at: float) -> None:
        """Workers left machines that end: others may be needed instead."""
        self._due(at)

    # ---- what jobs may count on --------------------------------------------------------------------------------------

    def largest(self) -> tuple[int, str] | None:
        """The most memory that a worker has or could have, with its name; None if unknown."""
        found: list[tuple[int, str]] = []
        for worker in self._worker_table.workers.values():
            if worker.wanted and worker.status is not WorkerState.GIVEN_UP:
                if worker.capacity_bytes is not None:
                    found.append((worker.capacity_bytes, worker.worker_id))
                elif not worker.group:
                    return None
        for name, record in self.groups.items():
            if name in self._usable:
                if record.gpu_bytes == inf:
                    return None
                found.append((int(record.gpu_bytes), f"a node of {name}"))
        return max(found, default=None)

    def hopeless(self) -> str | None:
        """Why no task can ever run; None if a worker exists or could."""
        if any(w.wanted and w.status is not WorkerState.GIVEN_UP for w in self._worker_table.workers.values()):
            return None
        if self._usable:
            return None
        limits = self._config.autoscaling
        reasons = []
        for name, record in self.groups.items():
            if not record.group.max_nodes:
                reasons.append(f"{name}: max_nodes is 0")
            elif record.blocked_until == inf:
                reasons.append(f"{name}: {record.reason}")
            elif not fits_limits(record.group, self._config.groups, limits):
                reasons.append(f"{name}: a node exceeds the limits over all groups")
            else:
                reasons.append(f"{name}: {self.spent:.4g} of max_cost {limits.max_cost:g} is spent")
        return f"no worker is left, and no group can start one ({'; '.join(reasons)})"

    def _usable_groups(self) -> frozenset[str]:
        """The groups that have nodes, or may get some now or later."""
        limits, counts = self._config.autoscaling, self.node_counts()
        left = inf if limits.max_cost is None else limits.max_cost - self.spent
        return frozenset(
            name
            for name, record in self.groups.items()
            if record.group.max_nodes
            and record.blocked_until < inf
            and fits_limits(record.group, self._config.groups, limits)
            and (counts.get(name) or least_cost(record.group, record.start_seconds) <= left)
        )

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def _due(self, at: float) -> None:
        self.next_at = min(self.next_at, at)

    def _bill(self, at: float) -> None:
        """Charge for the time since the last event, and count the nodes again if the event changed the workers."""
        if at > self._at:
            self.spent += self.cost_per_hour * (at - self._at) / HOUR
            self._at = at
        if len(self._worker_table.workers) != self._counted:
            self._count()

    def _count(self) -> None:
        self._counted = len(self._worker_table.workers)
        counts = self.node_counts()
        self.cost_per_hour = sum(self.groups[name].group.price_per_hour * count for name, count in counts.items())

    def _drop_given_up(self, at: float) -> None:
        """Forget workers that fail again and again on a node that exists."""
        for worker in list(self._worker_table.workers.values()):
            if worker.group and worker.status is WorkerState.GIVEN_UP:
                record = self.groups[worker.group]
                reason = f"{worker.name} failed {counted(worker.failures, 'time')} in a row"
                record.start_failed(at, reason, True, self._config.start_retry_limit)
                why = ScalingWhy(ScalingRule.FAILED, worker.group, -1, _node_name(worker), at=at)
                self._worker_table.release(worker, why)

    def node_counts(self) -> dict[str, int]:
        """group -> nodes that exist or are requested."""
        machines: dict[str, set[object]] = {}
        workers: dict[str, int] = {}
        for worker in self._worker_table.workers.values():
            if worker.group:
                workers[worker.group] = workers.get(worker.group, 0) + 1
                if worker.spec is not None:
                    machines.setdefault(worker.group, set()).add(_node_name(worker))
        return {
            name: max(len(machines.get(name, ())), -(-count // self.groups[name].group.gpus_per_node))
            for name, count in workers.items()
        }

    def _evaluate(self, at: float) -> bool:
        self._evaluated_at = at
        self._drop_given_up(at)
        limits = self._config.autoscaling
        outlooks, reference = self._outlooks()
        levels = self._levels(outlooks)
        backlog, arrived = self._backlog(levels, reference, at, self._arrivals)
        for cost_class in self._costs.cost_classes():
            cost_class.arrived_seconds = 0.0
        if backlog.tasks:
            self._unused_since = at
        nodes, members = self._nodes(outlooks, reference, backlog.tasks > 0, at)
        tolerated = self._pass_time(backlog, levels, arrived, outlooks, at)
        fleet = Fleet(nodes, self.spent, self._history.recent(tolerated), self._pinned(), self._may_end()[0])
        decisions = self.decide(backlog, outlooks, fleet, at, limits, self._config.deadline_margin_seconds)
        for decision in decisions:
            self.decisions.append(decision.why)
            if isinstance(decision, RequestNodes):
                self._request(decision, at)
            else:
                self._give_up(decision, members[decision.node])
        self._count()
        usable = self._usable_groups()
        has_changed, self._usable = bool(decisions) or usable != self._usable, usable
        self.next_at = self._next_at(nodes, bool(decisions), at)
        return has_changed

    def preview(self, at: float) -> ScalingPreview:
        """Return what would be requested and given up at `at`, at or after the latest event. Changes nothing."""
        outlooks, reference = self._outlooks()
        levels = self._levels(outlooks)
        backlog, _ = self._backlog(levels, reference, at, deepcopy(self._arrivals))
        nodes, _ = self._nodes(outlooks, reference, backlog.tasks > 0, at)
        recent = self._history.recent(self._tolerated_seconds(at))
        may_end, held_back = self._may_end()
        fleet = Fleet(nodes, self.spent_until(at), recent, self._pinned(), may_end)
        limits, margin_seconds = self._config.autoscaling, self._config.deadline_margin_seconds
        decisions = self.decide(backlog, outlooks, fleet, at, limits, margin_seconds)
        obstacles = obstacles_of(outlooks, fleet, at, limits)
        end_at = finish_at(servers(nodes, 0.0, at), backlog.seconds) if backlog.tasks else at
        return ScalingPreview(
            tuple(
                WaitingLevel(None if work.level_bytes == inf else int(work.level_bytes), work.tasks, work.seconds)
                for work in backlog.levels
            ),
            group_previews(outlooks, fleet, decisions, obstacles, backlog),
            None if end_at == inf else end_at - at,
            held_back if may_end == 0 else "",
        )

    def _may_end(self) -> tuple[int | None, str]:
        """Nodes that disruption limits allow to give up now, and why not more."""
        cordons, most = self._worker_table.cordons, self._config.max_unavailable_nodes
        if cordons.obstacle:
            return 0, cordons.obstacle
        if most is None:
            return None, ""
        count = len(unavailable(cordons, self._worker_table.workers.values(), self._draining))
        return max(0, most - count), f"{count} of at most {most} nodes are unavailable (max_unavailable)"

    def _next_at(self, nodes: tuple[FleetNode, ...], has_changed: bool, at: float) -> float:
        """When to look again: at the interval, while something may change by itself."""
        limits = self._config.autoscaling
        left, rate = inf, self.cost_per_hour / HOUR
        if limits.max_cost is not None and rate > 0.0:
            left = (limits.max_cost - self.spent) / rate
            left = max(0.0, left - (LAST_RUN_SECONDS if left > LAST_RUN_SECONDS else LAST_SECONDS))
        is_busy = has_changed or bool(self._demand.tasks) or any(node.is_starting for node in nodes)
        if not is_busy:
            starts = ((record.group, record.start_seconds) for record in self.groups.values())
            is_paid = pays_minimum(starts, limits, self.spent)
            for name, record in self.groups.items():
                same = record.group.set_name
                mine = [node for node in nodes if node.group and self.groups[node.group].group.set_name == same]
                spare = sum(self._may_be_spare(node) for node in mine)
                is_short = is_paid and len(mine) < record.group.min_nodes and name in self._usable
                is_busy = is_busy or (spare > 0 and len(mine) > record.group.min_nodes) or is_short
        return at + min(left + 1e-6, limits.interval_seconds if is_busy else inf)

    def _may_be_spare(self, node: FleetNode) -> bool:
        """Whether time alone may lead to giving the node up."""
        return not node.is_kept and not node.is_cordoned and (node.is_starting or self._may_end()[0] != 0)

    def _outlooks(self) -> tuple[tuple[GroupOutlook, ...], str]:
        """The groups, with speeds relative to the GPUs of the first one, and the name of these GPUs."""
        reference = next(iter(self.groups.values())).device_name
        slowness = self._costs.run_kinds.slowness
        return tuple(r.outlook(1.0 / slowness(r.device_name, reference)) for r in self.groups.values()), reference

    def _levels(self, outlooks: Iterable[GroupOutlook]) -> list[float]:
        """The memory sizes of all GPUs that exist or could exist, ascending, and infinity."""
        found = {outlook.gpu_bytes for outlook in outlooks if outlook.group.max_nodes}
        static = sorted(
            {w.capacity_bytes for w in self._worker_table.workers.values() if not w.group and w.capacity_bytes}
        )
        last = 0.0
        for capacity_bytes in static:
            if capacity_bytes > SIMILAR_MEMORY * last:
                found.add(float(capacity_bytes))
                last = capacity_bytes
        return sorted({*found, inf})

    def _backlog(
        self, levels: list[float], reference: str, at: float, arrivals: SteadyArrivals
    ) -> tuple[PendingWork, list[float]]:
        """The waiting work, and GPU-seconds that arrived since the last evaluation, by level. They are added to
        `arrivals`; the caller takes them off the cost classes."""
        overhead = 1.0 + min(MOST_LOADING, self._loading / (self._running + PRIOR_SECONDS))
        running: dict[CostClass, tuple[int, float]] = {}
        tasks = self._demand.tasks
        for worker in self._worker_table.workers.values():
            for task_id in worker.task_ids:
                task = tasks[task_id]
                count, seconds = running.get(task.cost_class, (0, 0.0))
                running[task.cost_class] = (count + 1, seconds + task.spec.run_seconds)
        counts, sums, loads, longest, arrived = ([0.0] * len(levels) for _ in range(5))
        components = self._costs.components
        for cost_class in self._costs.cost_classes():
            if not cost_class.tasks and not cost_class.arrived_seconds:
                continue
            level = bisect_left(levels, cost_class.needed_bytes)
            ratio = overhead * self._ratio(cost_class, reference)
            arrived[level] += ratio * cost_class.arrived_seconds
            run_count, run_seconds = running.get(cost_class, (0, 0.0))
            count = cost_class.tasks - run_count
            if count <= 0:
                continue
            seconds = max(0.0, ratio * (cost_class.prior_seconds - run_seconds))
            load_bytes = sum(components[key].upload_bytes for key in cost_class.components if key in components)
            counts[level] += count
            sums[level] += seconds
            loads[level] += load_bytes * seconds
            longest[level] = max(longest[level], ratio * cost_class.pattern.run_seconds)
        arriving = arrivals.note(at, arrived if self._free_at > at - FORGET_SECONDS else [0.0] * len(levels))
        found = tuple(
            WaitingWork(
                levels[i], int(counts[i]), sums[i], loads[i] / sums[i] if sums[i] else 0.0, longest[i], arriving[i]
            )
            for i in range(len(levels))
            if counts[i]
        )
        total = sum(sums)
        ahead = over = 0.0
        due: list[DueWork] = []
        deadlines = self._demand.fair_queue.deadlines
        for deadline, seconds, _, _ in deadlines.groups() if found else ():
            if deadline > at and seconds > 0.0:
                due.append(DueWork(deadline, overhead * seconds))
                ahead += seconds
            else:
                over += max(0.0, seconds)
        # by number: the sums are of estimates that differ a little
        with_deadline = len(deadlines) / max(1, len(self._demand.jobs)) if due else 0.0
        free = total * (1.0 - with_deadline * ahead / (ahead + over)) if due else total
        return PendingWork(found, tuple(due), free), arrived

    def _ratio(self, cost_class: CostClass, device_name: str) -> float:
        ratio = cost_class.ratios.get(device_name)
        return self._costs.run_kinds.ratio(cost_class.kind, device_name, cost_class.size) if ratio is None else ratio

    def _nodes(
        self, outlooks: Iterable[GroupOutlook], reference: str, is_work: bool, at: float
    ) -> tuple[tuple[FleetNode, ...], dict[str, list[Worker]]]:
        """The machines with workers, and the workers of each."""
        by_group = {outlook.group.name: outlook for outlook in outlooks}
        members: dict[str, list[Worker]] = {}
        machines = _machines(self._worker_table.workers.values())
        for worker in self._worker_table.workers.values():
            if worker.status not in (WorkerState.GIVEN_UP, WorkerState.DRAINED):
                known = machines.get((worker.group, worker.request)) if worker.spec is None else None
                members.setdefault(known or _node_name(worker), []).append(worker)
        kept, holders = self._kept(), self._worker_table.worker_index.holders
        needed = self._demand.backlog.wanted
        nodes = []
        for name, workers in members.items():
            first = workers[0]
            outlook = by_group.get(first.group)
            live = [worker for worker in workers if worker.live]
            is_starting = all(worker.spec is None for worker in workers)
            start_seconds = 0.0 if outlook is None else outlook.start_seconds
            free_at = sum(_free_at(worker, start_seconds, at) for worker in workers) / len(workers)
            idle_since: float | None = None
            if is_starting and not is_work:
                idle_since = max(first.requested_at, self._unused_since)
            elif live and all(worker.is_idle for worker in live):
                idle_since = max(worker.idle_since for worker in live)
            value = reload = 0.0
            for worker in live:
                rate = worker.link_bytes_per_second
                reload = max(reload, worker.used_bytes / rate)
                for entry in worker.entries.values():
                    alone = 1.0 if len(holders.get(entry.component, ())) < 2 else 0.25
                    soon = 1.0 if entry.component in needed else 0.5
                    value += alone * soon * entry.resident_bytes / rate
            spec = next((worker.spec for worker in workers if worker.spec is not None), None)
            device = "" if spec is None else spec.device_name
            nodes.append(
                FleetNode(
                    name=name,
                    group=first.group,
                    gpus=sum(worker.cordon is None for worker in workers),
                    gpu_bytes=float(first.capacity_bytes or 0) if outlook is None else outlook.gpu_bytes,
                    speed=1.0 / self._costs.run_kinds.slowness(device, reference) if outlook is None else outlook.speed,
                    free_at=free_at,
                    ends_at=self._ends_at(workers),
                    is_starting=is_starting,
                    is_overdue=is_starting and at - first.requested_at > OVERDUE * start_seconds + OVERDUE_SECONDS,
                    is_leaving=not any(worker.wanted for worker in workers),
                    is_cordoned=any(worker.cordon is not None for worker in workers),
                    idle_gpus=sum(worker.is_idle and worker.cordon is None for worker in live),
                    idle_since=idle_since,
                    reload_seconds=reload,
                    value_seconds=value,
                    is_kept=any(
                        worker in kept or (worker.worker_id, worker.incarnation) in self._unverified for worker in live
                    ),
                )
            )
        return tuple(nodes), members

    def _ends_at(self, workers: Iterable[Worker]) -> float:
        """When their machine ends, or an operator has drained it; infinity if that is not known to happen."""
        ends = [self._draining.get(worker.spec.node, inf) for worker in workers if worker.spec is not None]
        drained = [worker.cordon.deadline for worker in workers if worker.cordon is not None]
        return min((at for at in (*ends, *drained) if at is not None), default=inf)

    def _pass_time(
        self,
        backlog: PendingWork,
        levels: list[float],
        arrived: list[float],
        outlooks: Sequence[GroupOutlook],
        at: float,
    ) -> float:
        """Add the work that arrived to the history. Returns the time for which work may queue."""
        waiting = {work.level_bytes: work.seconds for work in backlog.levels}
        is_unknown = any(outlook.gpu_bytes == inf for outlook in outlooks)
        found, came, there = [], 0.0, 0.0
        for place in range(len(levels) - 1, -1, -1):
            came += arrived[place]
            there += waiting.get(levels[place], 0.0)
            if levels[place] < inf or is_unknown:
                found.append((levels[place], came, there))
        self._history.pass_time(at, found)
        return self._tolerated_seconds(at)

    def _tolerated_seconds(self, at: float) -> float:
        """The time for which work may queue."""
        tolerated = self._config.autoscaling.wait_seconds
        if self._free_at < at - FORGET_SECONDS and self._slack.value is not None:
            tolerated = max(tolerated, SLACK_PART * self._slack.value)
        return tolerated

    # ---- pins --------------------------------------------------------------------------------------------------------

    def _kept(self) -> set[Worker]:
        """Workers with pinned components of which there are no more than required."""
        kept: set[Worker] = set()
        for component, replicas in self.pins.items():
            holders = self._worker_table.worker_index.holders.get(component, {})
            if len(holders) <= replicas:
                kept.update(holders)
        return kept

    def _pinned(self) -> tuple[tuple[float, int], ...]:
        """The workers that pinned components need, by memory."""
        found: dict[float, int] = {}
        for component, replicas in self.pins.items():
            spec = self._costs.components.get(component)
            level_bytes = 0.0 if spec is None else float(spec.weight_bytes)
            found[level_bytes] = max(found.get(level_bytes, 0), replicas)
        return tuple(sorted(found.items()))

    # ---- carrying out ------------------------------------------------------------------------------------------------

    def _request(self, decision: RequestNodes, at: float) -> None:
        record = self.groups[decision.group]
        for _ in range(decision.nodes):
            worker_ids = record.new_request()
            self._worker_table.request(worker_ids, decision.group, record.requests, at, decision.why)

    def _give_up(self, decision: GiveUpNode, workers: Iterable[Worker]) -> None:
        for worker in workers:
            if decision.is_hard and worker.task_id is not None:
                worker.wanted, worker.end_why = False, decision.why
                self.expired.append(worker)
            else:
                self._worker_table.release(worker, decision.why)


def _machines(workers: Iterable[Worker]) -> dict[tuple[str, int], str]:
    """(group, request) -> the machine on which a worker of it is up: its other workers start there."""
    return {(one.group, one.request): str(one.spec.node) for one in workers if one.group and one.spec and one.spec.node}


def _node_name(worker: Worker) -> str:
    """The machine of a worker; until it is known, its request."""
    if worker.spec is not None and worker.spec.node:
        return str(worker.spec.node)
    return f"{worker.group} request {worker.request}" if worker.group else str(worker.worker_id)


def _free_at(worker: Worker, start_seconds: float, at: float) -> float:
    """When it should be free. Overdue work is expected to take as long again as it is late."""
    if worker.status is WorkerState.STARTING:
        up_at = at + RESTART_SECONDS if worker.spec is not None else worker.requested_at + start_seconds
        return at + abs(up_at - at)
    wait_seconds = worker.wait_seconds(at)
    return at if wait_seconds is None else at + wait_seconds
