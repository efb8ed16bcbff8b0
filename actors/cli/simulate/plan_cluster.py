"""`modelpool plan-cluster`: finds how many GPUs finish a workload in time, by simulation.

Needs no GPU and starts no pool. The search is in `scheduler.simulator.sizing`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.simulate import simulate_options as shared
from modelpool.actors.cli.simulate.simulate import require_seed
from modelpool.actors.cli.terminal import options
from modelpool.pool.values.core.errors import DoesNotFit, UserError, unusable_field

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelpool.actors.cli.simulate.simulate_groups import ScaledSimulation
    from modelpool.actors.cli.simulate.simulate_runs import Setting, Simulated
    from modelpool.actors.cli.terminal.plots import Plot, PlotLine
    from modelpool.scheduler.simulator.gpu_spec import GpuGroup, NodeShape
    from modelpool.scheduler.simulator.metrics import Figures
    from modelpool.scheduler.simulator.sizing import Goal, LeastCount
    from modelpool.scheduler.simulator.workloads.workload import Workload

_GOAL = "Goal"
_KINDS = "GPU kinds to try, each separately, such as H100,4090."
_DEADLINE = "All jobs end within this time after the first arrives: 90s, 30m, 2h."
_LATENCY = "99% of the jobs take at most this time from submission to end."
_MOST = "Maximum number of GPUs to try (default: 256)."
_POLICY = "Placement policy (default: modelpool)."
_PLOT = "Plot numbers of GPUs against time and cost: as text, or to a FILE.svg, .png or .pdf."
EXIT_NONE = 1
#: numbers that are simulated for a plot only, besides the numbers of the search
MOST_PLOTTED = 8
#: simulated jobs over all kinds from which on processes of their own are worth their start
LEAST_JOBS_IN_PROCESSES = 1000


@dataclass(frozen=True, slots=True)
class KindPlan:
    """The answer for one kind. `problem` is why it could not be simulated; `simulated` has everything that was
    tried.
    """

    group: GpuGroup
    found: LeastCount | None
    simulated: dict[int, Simulated]
    price: float | None
    problem: str = ""
    #: the same goal with nodes that are requested when needed; None if not simulated
    scaled: ScaledSimulation | None = None
    #: numbers that were simulated for a plot only
    plotted: dict[int, Simulated] = field(default_factory=dict)

    @property
    def cost(self) -> float | None:
        """Cost of the smallest number; None without one or without a price."""
        if self.found is None or self.found.count is None or self.price is None:
            return None
        return self.simulated[self.found.count].figures.cost({self.group.kind: self.price})


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The result of `modelpool plan-cluster`."""

    workload: str
    jobs: int
    goal: Goal
    most: int
    shape: NodeShape
    kinds: tuple[KindPlan, ...]


def plan_cluster(
    trace: shared.Trace,
    gpus: Annotated[str, options._option("--gpus", _KINDS, _GOAL, "KINDS")],
    deadline: Annotated[str | None, options._option("--deadline", _DEADLINE, _GOAL, "TIME")] = None,
    latency: Annotated[str | None, options._option("--latency", _LATENCY, _GOAL, "TIME")] = None,
    most: Annotated[int, options._option("--most", _MOST, _GOAL, "N")] = 256,
    policy: Annotated[str, options._option("--policy", _POLICY, _GOAL, "NAME")] = shared.OURS,
    config: shared.Config = None,
    node: shared.Node = None,
    measured_on: shared.Reference = "H100",
    price: shared.Price = None,
    seed: shared.Seed = 0,
    plot: Annotated[str | None, options._option("--plot", _PLOT, options._OUTPUT, "[FILE]")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Find the smallest number of GPUs that finishes a workload in time, by simulation.

    TRACE is as for simulate. One GPU more and one less are also simulated and shown. Exits with 1 if no number
    suffices.
    """
    from modelpool.actors.cli.simulate.simulate_runs import setting_of
    from modelpool.actors.cli.terminal.plots import plot_file, show_plots
    from modelpool.actors.cli.terminal.screen import print_json, show, user_console

    goal, file = _goal(deadline, latency), plot_file(plot, as_json)
    setting = setting_of(gpus, node, measured_on, config)
    found = make_plan(trace, seed, goal, most, policy, setting, price, is_plotted=plot is not None)
    console = user_console(sys.stdout)
    if as_json:
        print_json(sys.stdout, as_plain(found))
    else:
        for part in tables_of(found):
            show(console, part)
    if plot is not None:
        show_plots(user_console() if as_json else console, f"{found.workload}: GPUs", plots_of(found), file)
    if all(kind.found is None or kind.found.count is None for kind in found.kinds):
        raise typer.Exit(EXIT_NONE)


def _goal(deadline: str | None, latency: str | None) -> Goal:
    from modelpool.actors.request.qos import parse_seconds
    from modelpool.scheduler.simulator.sizing import Goal

    if deadline is None and latency is None:
        raise UserError("--deadline or --latency is required, such as --deadline 2h")
    return Goal(
        None if deadline is None else parse_seconds(deadline, "--deadline"),
        None if latency is None else parse_seconds(latency, "--latency"),
    )


def make_plan(
    trace: str,
    seed: int,
    goal: Goal,
    most: int,
    policy: str,
    setting: Setting,
    price: list[str] | None,
    is_plotted: bool = False,
) -> ClusterPlan:
    """Find the smallest number of each kind; for a plot, simulate numbers around it. Raises UserError for wrong
    arguments before anything is simulated."""
    from modelpool.actors.cli.simulate.simulate_runs import parse_policies, parse_prices, prices_of
    from modelpool.actors.cli.simulate.simulate_workload import load_work
    from modelpool.scheduler.simulator.gpu_spec import MOST_GPUS

    if not 1 <= most <= MOST_GPUS:
        raise unusable_field("--most", most, f"a whole number from 1 to {MOST_GPUS}")
    if any(group.count != 1 for group in setting.groups):
        raise unusable_field("--gpus", setting.words, "kinds without numbers: the number is the result")
    policies = parse_policies(policy)
    if len(policies) != 1:
        raise unusable_field("--policy", policy, "one policy")
    prices = prices_of(setting.groups, parse_prices(price))
    work = load_work(trace)
    require_seed(seed, work)
    workload = work.make(seed)
    late_seconds = workload.jobs[-1].at - workload.jobs[0].at if workload.jobs else 0.0
    if goal.deadline_seconds is not None and goal.deadline_seconds <= late_seconds:
        found = f"{goal.deadline_seconds:g}s"
        raise unusable_field("--deadline", found, f"more than {late_seconds:.0f}s, when the last job arrives")
    plans = [
        partial(
            _plan_kind,
            workload,
            seed,
            goal,
            most,
            policies[0],
            dataclasses.replace(setting, groups=(group,)),
            None if prices is None else prices[group.kind],
            is_plotted,
        )
        for group in setting.groups
    ]
    kinds = _run_all(plans, len(workload.jobs))
    return ClusterPlan(work.name, len(workload.jobs), goal, most, setting.shape, kinds)


def _run_all(plans: Sequence[Callable[[], KindPlan]], jobs: int) -> tuple[KindPlan, ...]:
    """Plan all kinds, at the same time in processes of their own if that is faster: they do not depend on each
    other."""
    processes = min(len(plans), os.cpu_count() or 1)
    if processes < 2 or jobs * len(plans) < LEAST_JOBS_IN_PROCESSES:
        return tuple(plan() for plan in plans)
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as executor:
        return tuple(running.result() for running in [executor.submit(plan) for plan in plans])


def _plan_kind(
    workload: Workload,
    seed: int,
    goal: Goal,
    most: int,
    policy: str,
    setting: Setting,
    price: float | None,
    is_plotted: bool = False,
) -> KindPlan:
    """Find the smallest number of the single kind of `setting`."""
    from modelpool.actors.cli.simulate.simulate_groups import autoscaled
    from modelpool.actors.cli.simulate.simulate_runs import simulate_one
    from modelpool.actors.cli.terminal.screen import say, user_console
    from modelpool.scheduler.simulator.sizing import first_estimate, least_count

    (group,) = setting.groups
    simulated: dict[int, Simulated] = {}
    console = user_console()

    def simulate(count: int) -> Simulated:
        if console.is_terminal:
            say(console, f"{count}x{group.kind}", "dim")
        groups = (dataclasses.replace(group, count=count),)
        return simulate_one(workload, seed, policy, dataclasses.replace(setting, groups=groups))[0]

    def does(count: int) -> bool:
        simulated[count] = simulate(count)
        return goal.is_met(simulated[count].figures)

    work = {task.task_id: task.run_seconds for one in workload.jobs for task in one.job.tasks}
    estimate = first_estimate(sum(work.values()) / group.speed, goal, workload.seconds)
    try:
        found = least_count(does, most, estimate)
        scaled = None
        if found.count is not None and policy == shared.OURS:
            scaled = autoscaled(workload, group, setting.shape, goal, min(most, 2 * found.count), price, seed)
        extra = plotted_counts(found.count, most, simulated) if is_plotted else ()
        plotted = {count: simulate(count) for count in extra}
        return KindPlan(group, found, simulated, price, scaled=scaled, plotted=plotted)
    except DoesNotFit as problem:
        return KindPlan(group, None, simulated, price, str(problem))


def plotted_counts(answer: int | None, most: int, known: Collection[int]) -> tuple[int, ...]:
    """Return up to MOST_PLOTTED numbers of GPUs from half to twice the answer that are not `known`; without an answer,
    up to `most`."""
    first, last = (1, most) if answer is None else (max(1, answer // 2), min(most, 2 * answer))
    step = max(1, -(-(last - first) // (MOST_PLOTTED - 1)))
    return tuple(count for count in range(first, last + 1, step) if count not in known)[:MOST_PLOTTED]


def plots_of(found: ClusterPlan) -> list[Plot]:
    """Return the plots of numbers of GPUs: against the times that the goal bounds, and against the cost if all kinds
    have a price."""
    from modelpool.actors.cli.terminal.plots import Limit, Plot, time_words

    goal = found.goal
    nodes = f"GPUs, {found.shape.gpus} on each node" if found.shape.gpus > 1 else "GPUs, 1 on each node"
    times: list[tuple[str, float | None, Callable[[Figures], float]]] = []
    if goal.deadline_seconds is not None or goal.latency_seconds is None:
        times.append(("time until all jobs have ended", goal.deadline_seconds, lambda each: each.makespan_seconds))
    if goal.latency_seconds is not None:
        times.append(("time of 99% of the jobs", goal.latency_seconds, lambda each: each.latency.p99_seconds))
    plots = [
        Plot(
            title,
            nodes,
            _lines(found, lambda kind, figures, value=value: value(figures)),  # type: ignore[misc]
            _count_words,
            time_words,
            (Limit("goal", limit),) if limit is not None else (),
            is_whole=True,
        )
        for title, limit, value in times
    ]
    if all(kind.price is not None for kind in found.kinds):
        costs = _lines(found, lambda kind, figures: figures.cost({kind.group.kind: kind.price or 0.0}))
        plots.append(Plot("cost", nodes, costs, _count_words, lambda cost: f"{cost:.2f}", is_whole=True))
    return plots


def _lines(found: ClusterPlan, value_of: Callable[[KindPlan, Figures], float]) -> tuple[PlotLine, ...]:
    """Return a line for each kind; numbers with which jobs fail have no time, and no point."""
    from modelpool.actors.cli.terminal.plots import PlotLine

    lines = []
    for kind in found.kinds:
        runs = sorted({**kind.plotted, **kind.simulated}.items())
        points = [(float(count), value_of(kind, one.figures)) for count, one in runs if not one.figures.failed]
        answer = None if kind.found is None or kind.found.count is None else float(kind.found.count)
        lines.append(PlotLine(kind.group.kind, tuple(points), answer))
    return tuple(lines)


def _count_words(count: float) -> str:
    return f"{count:g}"


def tables_of(found: ClusterPlan) -> tuple[RenderableType, ...]:
    """Return the result as tables."""
    from modelpool.actors.cli.simulate.simulate_runs import node_words
    from modelpool.actors.cli.terminal.screen import counted, duration
    from modelpool.actors.cli.terminal.tables import facts_table

    wanted = []
    if found.goal.deadline_seconds is not None:
        wanted.append(f"all jobs end within {duration(found.goal.deadline_seconds)}")
    if found.goal.latency_seconds is not None:
        wanted.append(f"99% of jobs within {duration(found.goal.latency_seconds)} each")
    parts: list[RenderableType] = [
        facts_table(
            [
                ("work", f"{found.workload}: {counted(found.jobs, 'job')}"),
                ("goal", ", ".join(wanted)),
                ("machines", node_words(found.shape)),
            ]
        )
    ]
    for kind in found.kinds:
        if kind.simulated:
            parts.append(_tried_table(kind, found.goal))
        parts.append(facts_table([(kind.group.kind, sentence) for sentence in _sentences(kind, found.most)]))
    costs = {kind.group.kind: kind.cost for kind in found.kinds if kind.cost is not None}
    if len(costs) > 1:
        cheapest = min(costs, key=lambda name: costs[name] or 0.0)
        parts.append(facts_table([("cheapest", f"{cheapest}, at {costs[cheapest]:.2f}")]))
    return tuple(parts)


def as_plain(found: ClusterPlan) -> dict[str, Any]:
    """Return the result as JSON values, with the figures of everything that was tried."""
    from modelpool.actors.cli.simulate.simulate_groups import as_plain as scaled_as_plain
    from modelpool.actors.cli.simulate.simulate_tables import plain_run

    kinds = {}
    for kind in found.kinds:
        prices = None if kind.price is None else {kind.group.kind: kind.price}
        kinds[kind.group.kind] = {
            "count": None if kind.found is None else kind.found.count,
            "is_steady": None if kind.found is None else kind.found.is_steady,
            "cost": kind.cost,
            "problem": kind.problem,
            "autoscaled": None if kind.scaled is None else scaled_as_plain(kind.scaled),
            "tried": {
                str(count): {"meets": found.goal.is_met(one.figures), **plain_run(one, prices)}
                for count, one in sorted(kind.simulated.items())
            },
        }
    return {
        "workload": found.workload,
        "jobs": found.jobs,
        "goal": dataclasses.asdict(found.goal),
        "most": found.most,
        "node": dataclasses.asdict(found.shape),
        "kinds": kinds,
    }


def _sentences(kind: KindPlan, most: int) -> list[str]:
    from modelpool.actors.cli.terminal.screen import counted
    from modelpool.scheduler.simulator.sizing import bottleneck

    if kind.found is None:
        return [f"impossible: {kind.problem}"]
    last = kind.found.count if kind.found.count is not None else max(kind.simulated)
    figures = kind.simulated[last].figures
    why = f"bottleneck with {last}: {bottleneck(figures)}"
    if kind.found.count is None:
        failed = f"; {figures.failed} jobs fail" if figures.failed else ""
        return [f"not with up to {most}{failed}", why]
    sentences = [counted(kind.found.count, "GPU"), why]
    before = kind.simulated.get(kind.found.count - 1)
    if before is not None:
        sentences.append(f"bottleneck with {kind.found.count - 1}: {bottleneck(before.figures)}")
    if not kind.found.is_steady:
        worse = [str(n) for n, meets in kind.found.tried.items() if meets != (n >= kind.found.count)]
        sentences.append(f"more GPUs are not always better here: exceptions among those tried: {', '.join(worse)}")
    if kind.scaled is not None:
        sentences.append(_scaled_words(kind.scaled, kind.price, kind.cost))
    return sentences


def _scaled_words(scaled: ScaledSimulation, price: float | None, fixed_cost: float | None) -> str:
    from modelpool.actors.cli.terminal.screen import duration

    figures = scaled.figures
    met = scaled.deadlines_met + scaled.deadlines_missed
    cost = "" if price is None or fixed_cost is None else f", cost {figures.cost:.2f} instead of {fixed_cost:.2f}"
    return (
        f"autoscaled from 0 (nodes of one GPU that start in 2 to 4 minutes): at most {figures.most_nodes} at a time, "
        f"{scaled.deadlines_met} of {met} jobs in time, makespan {duration(scaled.seconds)}, "
        f"{figures.gpu_seconds / 3600.0:.2f} GPU-hours{cost}"
    )


def _tried_table(kind: KindPlan, goal: Goal) -> RenderableType:
    """Build the table of the answer and its neighbours; without an answer, of the largest number tried."""
    from modelpool.actors.cli.terminal.screen import duration
    from modelpool.actors.cli.terminal.tables import rows_table

    answer = None if kind.found is None else kind.found.count
    near = [max(kind.simulated)] if answer is None else [n for n in sorted(kind.simulated) if abs(n - answer) <= 2]
    headings = [kind.group.kind, "in time", "makespan", "p50", "p99", "jobs/min", "busy", "loading"]
    headings += ["cost"] if kind.price is not None else []
    rows = []
    for count in near:
        figures = kind.simulated[count].figures
        row = [
            f"{count}x" + (" <" if count == answer else ""),
            "yes" if goal.is_met(figures) else "no",
            duration(figures.makespan_seconds),
            duration(figures.latency.p50_seconds),
            duration(figures.latency.p99_seconds),
            f"{figures.jobs_per_minute:.1f}",
            f"{figures.busy_share:.0%}",
            f"{figures.loading_share:.0%}",
        ]
        row += [] if kind.price is None else [f"{figures.cost({kind.group.kind: kind.price}):.2f}"]
        rows.append(row)
    return rows_table(headings, rows, right=headings[1:])
