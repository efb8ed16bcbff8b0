"""Forecasts the steps of a sampling run on several GPUs: what each of them keeps, and what comes from the others and
from the host in each step. Pure arithmetic, by the functions with which the scheduler prices such runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelpool.actors.control.forecast import Speeds
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.pool.values.specs.execution_modes import choose_mode
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, Stage, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import Residency, needed_bytes, plan
from modelpool.pool.weights.plan.peer_shares import PeerLink, exchanged_in_run, run_share
from modelpool.scheduler.model.gang_times import prior_seconds


@dataclass(frozen=True, slots=True)
class GangForecast:
    """A sampling run on `gpus` GPUs, each of which has the capacity of the plan.

    components      that it uses
    resident_bytes  of their weights on each GPU, while it runs
    share_bytes     of each GPU, for weights that it holds for all
    peer_bytes      stored bytes that come from the GPUs of others in a step, those of the GPU itself included
    host_bytes      stored bytes that each GPU reads from the host in a step
    step_seconds    expected, with these moves
    """

    components: tuple[ComponentKey, ...]
    gpus: int
    resident_bytes: int
    share_bytes: int
    peer_bytes: int
    host_bytes: int
    step_seconds: float


def gang_forecasts(
    graph: JobGraph, capacity_bytes: int, speeds: Speeds, gang_link_bytes_per_second: float
) -> tuple[GangForecast, ...]:
    """Return the numbers of GPUs that may share each sampling run of `graph`, and one GPU; nothing for runs that are
    never shared. A link of 0 among GPUs: they hold nothing for each other."""
    specs = {component.key: component for component in graph.components}
    return tuple(
        _forecast(task, degree, capacity_bytes, specs, speeds, gang_link_bytes_per_second)
        for task in graph.job.tasks
        if task.stage is Stage.SAMPLE and task.degrees != (1,)
        for degree in sorted({1, *task.degrees})
    )


def _forecast(
    task: TaskSpec,
    degree: int,
    capacity_bytes: int,
    specs: Mapping[ComponentKey, ComponentSpec],
    speeds: Speeds,
    link: float,
) -> GangForecast:
    uses, host = task.uses, speeds.link_bytes_per_second
    mode = choose_mode(task, capacity_bytes - needed_bytes(uses, 0))
    room_bytes = capacity_bytes - needed_bytes(uses, mode.activation_bytes)
    share_bytes = 0
    if link > 0.0 and not task.options:  # members hold nothing where something acts inside of the model
        share_bytes = run_share(uses, specs, room_bytes, degree, host, PeerLink(link))
    moves = plan(Residency(capacity_bytes), uses, specs, mode.activation_bytes + share_bytes)
    entry = moves.after.of(uses[0].component)
    resident_bytes = 0 if entry is None else entry.resident_bytes
    exchanged = exchanged_in_run(uses[0], specs[uses[0].component], resident_bytes, share_bytes, degree)
    exchanged = exchanged if share_bytes else 0
    host_bytes, steps = max(0, moves.streamed_bytes - exchanged), max(1, uses[0].passes)
    moving = host_bytes / host + (exchanged / link if exchanged else 0.0)
    computing = prior_seconds(task, task.run_seconds * mode.slowdown, degree)
    seconds = max(computing, moving) if speeds.overlaps else computing + moving
    return GangForecast(
        tuple(use.component for use in uses),
        degree,
        moves.after.used_bytes,
        share_bytes,
        exchanged // steps,
        host_bytes // steps,
        seconds / steps,
    )
