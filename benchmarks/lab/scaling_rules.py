"""Scaling rules of other systems, in place of `scheduler.autoscaling.wanted`: the same core, another number of nodes.

Each is for one group of nodes, reads the number of live jobs, and keeps its own windows in virtual time. Placement is
the same for all, so that a comparison shows the rule alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelpool.scheduler.autoscaling.autoscaler import Decide
from modelpool.scheduler.autoscaling.outlook import (
    Fleet,
    FleetNode,
    GiveUpNode,
    GroupOutlook,
    PendingWork,
    RequestNodes,
)
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup
from modelpool.scheduler.model.scaling_record import ScalingRule, ScalingWhy

#: live jobs, nodes that stay, time -> nodes
Rule = Callable[[int, int, float], int]


@dataclass(slots=True)
class OngoingRequests:
    """Ray Serve 2.60 (`serve/autoscaling_policy.py`): replicas = ceil(ongoing requests / target), where those requests
    are averaged over `look_back_period_s`. More replicas after `upscale_delay_s` of consecutive decisions for more,
    fewer after `downscale_delay_s`; from 0 at once. Defaults: target 2, 30 s, 30 s, 600 s. Nothing reads deadlines,
    weights, or the time that a node takes to start."""

    target: float = 2.0
    look_back_seconds: float = 30.0
    up_seconds: float = 30.0
    down_seconds: float = 600.0
    _seen: deque[tuple[float, int]] | None = None
    _since: float = 0.0
    _direction: int = 0

    def __call__(self, jobs: int, nodes: int, at: float) -> int:
        """The number of nodes wanted now."""
        if self._seen is None:
            self._seen = deque()
        self._seen.append((at, jobs))
        while self._seen[0][0] < at - self.look_back_seconds:
            self._seen.popleft()
        average = sum(count for _, count in self._seen) / len(self._seen)
        desired = math.ceil(average / self.target - 1e-9)
        if nodes == 0:
            return desired
        direction = (desired > nodes) - (desired < nodes)
        if direction != self._direction:
            self._direction, self._since = direction, at
        if direction > 0 and at - self._since >= self.up_seconds:
            self._direction = 0
            return desired
        if direction < 0 and at - self._since >= self.down_seconds:
            self._direction = 0
            return desired if nodes == 1 else max(1, desired)
        return nodes


@dataclass(slots=True)
class QueueLength:
    """Kubernetes' HorizontalPodAutoscaler on an external queue metric with AverageValue, as KEDA configures it
    (Kubernetes documentation, "Horizontal Pod Autoscaling"; KEDA 2.16 documentation, "Concepts"):
    replicas = ceil(queue length / target), unchanged within a tolerance of 10%; evaluated every 15 s; per 15 s at most
    the larger of twice as many and 4 more; fewer only as the maximum of the last 300 s (stabilization window). KEDA
    scales from 0 to 1 on any job (polled every 30 s), and to 0 after 300 s without jobs."""

    target: float = 5.0
    sync_seconds: float = 15.0
    window_seconds: float = 300.0
    cooldown_seconds: float = 300.0
    _recommended: deque[tuple[float, int]] | None = None
    _synced_at: float = -math.inf
    _active_at: float = 0.0

    def __call__(self, jobs: int, nodes: int, at: float) -> int:
        """The number of nodes wanted now."""
        if jobs:
            self._active_at = at
        if nodes == 0:
            return 1 if jobs else 0
        if at - self._synced_at < self.sync_seconds:
            return nodes
        self._synced_at = at
        if not jobs and at - self._active_at >= self.cooldown_seconds:
            return 0
        ratio = jobs / (self.target * nodes)
        desired = nodes if abs(ratio - 1.0) <= 0.1 else max(1, math.ceil(jobs / self.target - 1e-9))
        if self._recommended is None:
            self._recommended = deque()
        self._recommended.append((at, desired))
        while self._recommended[0][0] < at - self.window_seconds:
            self._recommended.popleft()
        if desired < nodes:
            return min(nodes, max(count for _, count in self._recommended))
        return min(desired, max(2 * nodes, nodes + 4))


@dataclass(slots=True)
class FixedNodes:
    """Always this many nodes."""

    nodes: int

    def __call__(self, jobs: int, nodes: int, at: float) -> int:
        """The number of nodes wanted now."""
        return self.nodes


def ruled_core(group: NodeGroup, rule: Rule, interval_seconds: float = 5.0) -> SchedulerState:
    """The core of the pool, with the number of nodes as `rule` wants it."""
    state = SchedulerState(
        SchedulerConfig(groups=(group,), autoscaling=AutoscalingConfig(interval_seconds=interval_seconds))
    )
    assert state.autoscaler is not None
    state.autoscaler.decide = _decide(state, group, rule)
    return state


def _decide(state: SchedulerState, group: NodeGroup, rule: Rule) -> Decide:
    def decide(
        backlog: PendingWork,
        groups: Sequence[GroupOutlook],
        fleet: Fleet,
        at: float,
        limits: AutoscalingConfig,
        margin_seconds: float,
    ) -> tuple[RequestNodes | GiveUpNode, ...]:
        staying = [node for node in fleet.nodes if not node.is_leaving and node.ends_at == math.inf]
        jobs = len(state.demand.jobs)
        wanted = min(max(rule(jobs, len(staying), at), group.min_nodes), group.max_nodes)
        figures = (("jobs", float(jobs)), ("nodes wanted", float(wanted)))
        if wanted > len(staying):
            more = min(wanted - len(staying), group.max_nodes - len(fleet.nodes))
            if more < 1 or groups[0].blocked_until > at:
                return ()
            return (RequestNodes(group.name, more, ScalingWhy(ScalingRule.BACKLOG, group.name, more, "", figures)),)
        leaving = sorted(staying, key=_end_order)[: len(staying) - wanted]
        return tuple(
            GiveUpNode(node.name, ScalingWhy(ScalingRule.SURPLUS, group.name, -1, node.name, figures))
            for node in leaving
        )

    return decide


def _end_order(node: FleetNode) -> tuple[bool, bool, float, str]:
    """Starting nodes first, then idle ones (Kubernetes prefers pods that are not ready, then the youngest)."""
    return not node.is_starting, node.idle_since is None, node.idle_since or 0.0, node.name
