"""`modelpool simulate`: runs a trace or a built-in workload in virtual time through the scheduler of the pool.

Needs no GPU and starts no pool.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.simulate import simulate_options as shared
from modelpool.actors.cli.terminal import options
from modelpool.pool.values.core.errors import UserError, counted, unusable_field

if TYPE_CHECKING:
    from modelpool.actors.cli.simulate.simulate_runs import Setting, Simulated
    from modelpool.actors.cli.simulate.simulate_workload import NamedWorkload
    from modelpool.pool.values.specs.spec import WorkerId
    from modelpool.scheduler.simulator.timeline import Timeline

EXIT_FAILED = 1
_GPUS = "GPUs by kind, such as 64xH100,32x4090, 4xH100:48GiB (less memory), 4x24GiB (no kind)."
_POLICIES = "Placement policies: one, several, or all (default: modelpool)."
_SEEDS = "Repeat a built-in workload with this many seeds and report medians (default: 1)."
_PLOT = "Plot the timeline of each GPU; with several policies, also a comparison."
_GROUPS = "Groups of nodes that the scheduler requests: a configuration with tables [groups.NAME]; instead of --gpus."
_LOST = "Part of the spot nodes that is taken back per hour, such as 0.05 (default: 0)."
_SAVE = "Write the workload as a trace."


@dataclass(frozen=True, slots=True)
class Simulation:
    """The results of one command. `by_policy` has one entry per seed, in the order of `seeds`."""

    workload: str
    jobs: int
    setting: Setting
    prices: dict[str, float] | None
    seeds: tuple[int, ...]
    by_policy: dict[str, tuple[Simulated, ...]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The data for plots: the first seed of one policy."""

    timeline: Timeline
    gpus: tuple[WorkerId, ...]
    latencies: tuple[float, ...]


def simulate(
    trace: shared.Trace,
    gpus: Annotated[str | None, options._option("--gpus", _GPUS, shared.CLUSTER, "LIST")] = None,
    groups: Annotated[Path | None, options._option("--groups", _GROUPS, shared.CLUSTER, "FILE")] = None,
    spot_losses: Annotated[float, options._option("--spot-losses", _LOST, shared.CLUSTER, "PART")] = 0.0,
    policy: Annotated[str, options._option("--policy", _POLICIES, shared.WORK, "NAMES")] = shared.OURS,
    seeds: Annotated[int, options._option("--seeds", _SEEDS, shared.WORK, "N")] = 1,
    seed: shared.Seed = 0,
    config: shared.Config = None,
    node: shared.Node = None,
    measured_on: shared.Reference = "H100",
    price: shared.Price = None,
    plot: Annotated[Path | None, options._option("--plot", _PLOT, options._OUTPUT, "FILE")] = None,
    save_as: Annotated[Path | None, options._option("--save-trace", _SAVE, options._OUTPUT, "FILE")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Simulate a workload on a cluster in virtual time, and report makespan, latency, GPU use and cost.

    TRACE is a trace file (docs/explanation/simulation.md) or a built-in workload with parameters, such as
    zipf:jobs=2000,models=12. The scheduler of the pool makes the decisions, or another policy. Exits with 1 if a job
    failed.
    """
    from modelpool.actors.cli.simulate.simulate_groups import simulate_groups
    from modelpool.actors.cli.simulate.simulate_runs import parse_policies, parse_prices, prices_of, setting_of
    from modelpool.actors.cli.simulate.simulate_tables import as_plain, tables_of
    from modelpool.actors.cli.simulate.simulate_workload import load_work, require_replaceable, save_trace
    from modelpool.actors.cli.terminal.plots import require_drawable
    from modelpool.actors.cli.terminal.screen import print_json, say, show, user_console

    if seeds < 1:
        raise unusable_field("--seeds", seeds, "a whole number from 1")
    if groups is not None:
        for option, is_set in (
            ("--gpus", gpus is not None),
            ("--policy", policy != shared.OURS),
            ("--config", config is not None),
            ("--price", bool(price)),
            ("--plot", plot is not None),
            ("--save-trace", save_as is not None),
            ("--seeds", seeds != 1),
        ):
            if is_set:
                raise UserError(f"{option} cannot be combined with --groups")
        simulate_groups(trace, groups, seed, node, measured_on, spot_losses, as_json)
        return
    if gpus is None and save_as is None:
        raise UserError("--gpus is required, such as 64xH100,32x4090 or 4x24GiB; or --groups")
    if plot is not None:
        require_drawable(plot)
    if save_as is not None:
        require_replaceable("--save-trace", save_as)
    work = load_work(trace)
    if seeds > 1 and not work.has_seeds:
        raise unusable_field("--seeds", seeds, "1 for a trace file, which has no seeds")
    require_seed(seed, work)
    setting = None if gpus is None else setting_of(gpus, node, measured_on, config)
    policies, prices = parse_policies(policy), parse_prices(price)
    if save_as is not None:
        save_trace("--save-trace", save_as, work.make(seed))
        say(user_console(), f"written: {save_as}")
    if setting is None:
        return
    found, drawn = run_all(work, setting, policies, range(seed, seed + seeds), prices_of(setting.groups, prices))
    if as_json:
        print_json(sys.stdout, as_plain(found))
    else:
        console = user_console(sys.stdout)
        for part in tables_of(found):
            show(console, part)
    if plot is not None:
        for path in draw(plot, found, drawn):
            say(user_console(), f"drawn: {path}")
    if any(one.figures.succeeded < one.figures.jobs for of_seeds in found.by_policy.values() for one in of_seeds):
        raise typer.Exit(EXIT_FAILED)


def require_seed(seed: int, work: NamedWorkload) -> None:
    """Raise UnusableField for a seed that would change nothing."""
    if seed != 0 and not work.has_seeds:
        raise unusable_field("--seed", seed, "0 for a trace file, which has no seeds")


def run_all(
    work: NamedWorkload,
    setting: Setting,
    policies: Sequence[str],
    seeds: Sequence[int],
    prices: dict[str, float] | None,
) -> tuple[Simulation, dict[str, Drawn]]:
    """Simulate every policy with every seed. Raises DoesNotFit for a job that none of the GPUs can run."""
    from modelpool.actors.cli.simulate.simulate_runs import simulate_one
    from modelpool.actors.cli.terminal.screen import say, user_console
    from modelpool.scheduler.simulator.metrics import succeeded_seconds
    from modelpool.scheduler.simulator.timeline import timeline

    by_policy: dict[str, list[Simulated]] = {name: [] for name in policies}
    drawn: dict[str, Drawn] = {}
    jobs, console = 0, user_console()
    for seed in seeds:
        workload = work.make(seed)
        jobs = len(workload.jobs)
        for name in policies:
            if console.is_terminal:
                say(console, f"{name}, seed {seed}: {counted(jobs, 'job')}", "dim")
            one, cluster = simulate_one(workload, seed, name, setting)
            by_policy[name].append(one)
            if name not in drawn:
                ids = tuple(gpu.worker_id for gpu in cluster.gpus)
                drawn[name] = Drawn(timeline(cluster), ids, tuple(succeeded_seconds(cluster)))
    results = {name: tuple(of_seeds) for name, of_seeds in by_policy.items()}
    return Simulation(work.name, jobs, setting, prices, tuple(seeds), results), drawn


def draw(path: Path, found: Simulation, drawn: dict[str, Drawn]) -> Iterator[Path]:
    """Plot the results; yields the written files. Raises OutputFailed."""
    from modelpool.actors.cli.simulate.simulate_lab import policies
    from modelpool.actors.cli.simulate.simulate_plots import MOST_TIMELINES, Compared, draw_comparison, draw_timeline

    title = f"{found.workload} on {found.setting.words}"
    several = len(drawn) > 1
    if several:
        compared = {
            name: Compared([one.figures for one in of_seeds], drawn[name].latencies, policies()[name].is_ideal)
            for name, of_seeds in found.by_policy.items()
        }
        draw_comparison(path, title, compared)
        yield path
    for name in list(drawn)[: MOST_TIMELINES if len(drawn) <= MOST_TIMELINES else 1]:
        place = path.with_stem(f"{path.stem}-{name}") if several else path
        draw_timeline(place, f"{title}, {name}", drawn[name].timeline, drawn[name].gpus)
        yield place
