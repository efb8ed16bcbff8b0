"""`modelpool simulate --groups`: a workload on groups of nodes, as many as the scheduler decides; and the same for
`modelpool plan-cluster`."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modelpool.pool.values.core.errors import DoesNotFit, UserError, unusable_field

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelpool.scheduler.model.config import SchedulerConfig
    from modelpool.scheduler.model.scaling_record import ScalingWhy
    from modelpool.scheduler.simulator.gpu_spec import GpuGroup, NodeShape
    from modelpool.scheduler.simulator.metrics import Latency
    from modelpool.scheduler.simulator.scaled_run import ScalingFigures
    from modelpool.scheduler.simulator.sizing import Goal
    from modelpool.scheduler.simulator.workloads.workload import Workload

EXIT_FAILED = 1
#: decisions in the printed table, the first ones
MOST_DECISIONS = 20


@dataclass(frozen=True, slots=True)
class ScaledSimulation:
    """The result. `problem` is the first reason why a job failed."""

    workload: str
    jobs: int
    succeeded: int
    seconds: float
    latency: Latency
    deadlines_met: int
    deadlines_missed: int
    figures: ScalingFigures
    decisions: tuple[ScalingWhy, ...]
    problem: str = ""


def simulate_groups(
    trace: str, groups: Path, seed: int, node: str | None, measured_on: str, lost_per_hour: float, as_json: bool
) -> None:
    """Simulate and report. Raises UserError; exits with 1 if a job failed."""
    from modelpool.actors.cli.simulate.simulate import require_seed
    from modelpool.actors.cli.simulate.simulate_runs import parse_node
    from modelpool.actors.cli.simulate.simulate_workload import load_work
    from modelpool.actors.cli.terminal.screen import print_json, show, user_console
    from modelpool.actors.config.config import PoolConfig

    if not 0.0 <= lost_per_hour < 1.0:
        raise unusable_field("--spot-losses", lost_per_hour, "a part of the spot nodes per hour, from 0 to below 1")
    config = PoolConfig.load(groups).scheduler
    if not config.groups:
        raise UserError(f"--groups: {groups} has no groups, expected tables such as [groups.a100]")
    work = load_work(trace)
    require_seed(seed, work)
    found = run_scaled(work.make(seed), config, parse_node(node), measured_on, seed, lost_per_hour, work.name)
    if as_json:
        print_json(sys.stdout, as_plain(found))
    else:
        console = user_console(sys.stdout)
        for part in tables_of(found, config):
            show(console, part)
    if found.succeeded < found.jobs:
        raise typer.Exit(EXIT_FAILED)


def run_scaled(
    workload: Workload,
    config: SchedulerConfig,
    shape: NodeShape,
    measured_on: str,
    seed: int,
    lost_per_hour: float = 0.0,
    name: str = "",
    goal: Goal | None = None,
) -> ScaledSimulation:
    """Simulate a workload on groups. With a goal, jobs get its deadlines."""
    from modelpool.scheduler.core.state import SchedulerState
    from modelpool.scheduler.simulator.metrics import latency, succeeded_seconds
    from modelpool.scheduler.simulator.scaled_run import (
        random_conditions,
        scaled_cluster,
        scaling_figures,
        simulated_groups,
        with_deadline,
    )

    state = SchedulerState(config)
    groups = simulated_groups(config.groups, shape, measured_on)
    cluster = scaled_cluster(state, groups, random_conditions(seed, lost_per_hour))
    cluster.start(workload.components)
    jobs = list(workload.jobs)
    if goal is not None and jobs:
        by = None if goal.deadline_seconds is None else jobs[0].at + goal.deadline_seconds
        jobs = with_deadline(jobs, by, goal.latency_seconds)
    for submitted in jobs:
        cluster.post(submitted)
    decisions: list[ScalingWhy] = []

    def note(core: SchedulerState) -> None:
        assert core.autoscaler is not None
        new: list[ScalingWhy] = []
        for why in reversed(core.autoscaler.decisions):
            if decisions and why is decisions[-1]:
                break
            new.append(why)
        decisions.extend(reversed(new))

    cluster.run(note)
    ended = succeeded_seconds(cluster)
    ends = [cluster.submitted[job].at + seconds for job, seconds in cluster.latency_seconds.items()]
    begun_at = jobs[0].at if jobs else 0.0
    deadlines = state.demand.fair_queue.deadlines
    problem = next((error.message for error in cluster.errors.values()), "")
    return ScaledSimulation(
        name,
        len(jobs),
        len(ended),
        max(ends, default=begun_at) - begun_at,
        latency(ended),
        deadlines.met,
        deadlines.missed,
        scaling_figures(cluster),
        tuple(decisions),
        problem,
    )


def autoscaled(
    workload: Workload, group: GpuGroup, shape: NodeShape, goal: Goal, most: int, price: float | None, seed: int
) -> ScaledSimulation | None:
    """The same goal with nodes of one GPU of this kind, up to `most`, that are requested when needed; None if a job
    does not fit, or fails."""
    from modelpool.scheduler.model.config import SchedulerConfig
    from modelpool.scheduler.model.node_groups import NodeGroup
    from modelpool.scheduler.simulator.gpu_spec import REFERENCE_KIND

    nodes = NodeGroup(
        "autoscaled",
        gpu_type=group.kind.partition(":")[0],
        gpu_bytes=group.memory_bytes,
        max_nodes=most,
        price_per_hour=price or 0.0,
    )
    try:
        found = run_scaled(
            workload, SchedulerConfig(groups=(nodes,)), shape, REFERENCE_KIND, seed, name=group.kind, goal=goal
        )
    except DoesNotFit:
        return None
    return None if found.problem else found


def tables_of(found: ScaledSimulation, config: SchedulerConfig) -> tuple[RenderableType, ...]:
    """Return the result as tables."""
    from modelpool.actors.cli.terminal.screen import counted, duration
    from modelpool.actors.cli.terminal.tables import facts_table, rows_table

    figures, latency = found.figures, found.latency
    facts = [
        ("work", f"{found.workload}: {counted(found.jobs, 'job')}"),
        ("groups", ", ".join(f"{g.name} {g.min_nodes} to {g.max_nodes}" for g in config.groups)),
        ("makespan", duration(found.seconds)),
        ("latency", f"p50 {duration(latency.p50_seconds)}, p99 {duration(latency.p99_seconds)}"),
        ("cost", f"{figures.cost:.2f} for {figures.gpu_seconds / 3600.0:.2f} GPU-hours, {figures.idle_share:.0%} idle"),
        ("nodes", f"{figures.nodes} launched, at most {figures.most_nodes} at a time, {figures.nodes_lost} lost"),
        ("changes", f"{figures.resizes_per_hour:.1f} per hour; {counted(figures.reloads, 'reload')} caused by them"),
    ]
    if found.deadlines_met + found.deadlines_missed:
        facts.append(("deadlines", f"{found.deadlines_met} met, {found.deadlines_missed} missed"))
    if found.problem:
        facts.append(("failed", f"{counted(found.jobs - found.succeeded, 'job')}: {found.problem}"))
    rows = [[duration(why.at), why.words] for why in found.decisions[:MOST_DECISIONS]]
    if len(found.decisions) > MOST_DECISIONS:
        rows.append(["", f"... and {len(found.decisions) - MOST_DECISIONS} more; --json has all"])
    return facts_table(facts), rows_table(["at", "decision"], rows, right=["at"])


def as_plain(found: ScaledSimulation) -> dict[str, Any]:
    """Return the result as JSON values."""
    plain = dataclasses.asdict(found)
    plain["decisions"] = [
        {**dataclasses.asdict(why), "rule": why.rule.name.lower(), "figures": dict(why.figures)}
        for why in found.decisions
    ]
    return plain
