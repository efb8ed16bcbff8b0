"""What a pool would request now, without requesting it: by its own groups of nodes, or by others."""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.values.core.errors import UnusableField, unusable_field
from modelpool.scheduler.autoscaling.autoscaler import Autoscaler
from modelpool.scheduler.autoscaling.preview import ScalingPreview
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup


def preview(
    state: SchedulerState, at: float, groups: tuple[NodeGroup, ...] = (), limits: AutoscalingConfig | None = None
) -> ScalingPreview:
    """Return what would be requested for the waiting work at `at`, at or after the latest event. Raises UnusableField
    for `groups` without one that a worker is of, and without groups for a pool that has none."""
    scaler = state.autoscaler
    if not groups and scaler is None:
        raise UnusableField(
            "groups: this pool has no groups of nodes; name a configuration file with tables such as [groups.a100]"
        )
    if groups:
        names = {group.name for group in groups}
        used = {worker.group for worker in state.worker_table.workers.values() if worker.group}
        if used - names:
            missing = ", ".join(sorted(used - names))
            raise unusable_field("groups", ", ".join(sorted(names)), f"also {missing}, which workers are of")
        config = replace(state.config, groups=groups, autoscaling=limits or AutoscalingConfig())
        scaler = Autoscaler(
            config,
            state.worker_table,
            state.demand,
            state.costs,
            state.pinned_loads.replicas,
            state.node_limits.draining,
            state.refutation.verdicts.pending,
        )
    assert scaler is not None, "there are groups"
    return scaler.preview(at)
