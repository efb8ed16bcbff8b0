"""Tables of simulation results: one in detail, several policies compared, and everything as JSON values."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from modelpool.actors.cli.simulate.simulate_options import OURS
from modelpool.actors.cli.simulate.simulate_runs import Simulated, node_words
from modelpool.actors.cli.terminal.screen import counted, duration
from modelpool.actors.cli.terminal.tables import facts_table, rows_table
from modelpool.pool.values.core.errors import GIB, MIB, format_bytes
from modelpool.scheduler.simulator.comparison import MEASURES, Measure, Spread, best, ratio, spreads
from modelpool.scheduler.simulator.metrics import Figures, GpuTime

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelpool.actors.cli.simulate.simulate import Simulation

#: users listed individually
MOST_USERS = 12
TIB = GIB << 10


def tables_of(found: Simulation) -> tuple[RenderableType, ...]:
    """Return the tables."""
    given = [
        ("work", f"{found.workload}: {counted(found.jobs, 'job')}"),
        ("cluster", found.setting.words),
        ("machines", node_words(found.setting.shape)),
    ]
    if len(found.seeds) > 1:
        given.append(("seeds", f"{found.seeds[0]} to {found.seeds[-1]}; medians, with minimum and maximum below"))
    parts: list[RenderableType] = [facts_table(given)]
    if len(found.by_policy) > 1 or len(found.seeds) > 1:
        parts += _compared(found)
        parts.append(facts_table(_legend(found)))
        parts += _failures(found)
        return tuple(parts)
    ((one,),) = found.by_policy.values()
    parts.append(facts_table(_facts(one, found.prices, has_disks=found.setting.shape.gpus > 0)))
    parts.append(_gpus_table(one.figures.gpus))
    if len(one.figures.users) > 1:
        parts.append(_users_table(one.figures))
    return (*parts, *_failures(found))


def as_plain(found: Simulation) -> dict[str, Any]:
    """Return everything as JSON values, with each GPU and user."""
    return {
        "workload": found.workload,
        "jobs": found.jobs,
        "gpus": [dataclasses.asdict(group) for group in found.setting.groups],
        "node": dataclasses.asdict(found.setting.shape),
        "seeds": list(found.seeds),
        "policies": {
            name: [plain_run(one, found.prices) for one in of_seeds] for name, of_seeds in found.by_policy.items()
        },
    }


def plain_run(one: Simulated, prices: dict[str, float] | None) -> dict[str, Any]:
    """Return one simulation as JSON values: figures, derived values, and the speed of the core."""
    figures = one.figures
    derived = (
        "jobs_per_minute", "running_seconds", "loading_seconds", "idle_seconds", "loading_share", "busy_share",
        "lora_loads_per_job",
    )  # fmt: skip
    return {
        "seed": one.seed,
        **dataclasses.asdict(figures),
        **{name: getattr(figures, name) for name in derived},
        "cost": figures.cost(prices) if prices is not None else None,
        "events": one.events,
        "core_seconds": one.core_seconds,
        "events_per_second": one.events_per_second,
        "failures": [{"reason": reason, "first_job": job} for reason, job in one.failures],
        "deadlines_met": one.deadlines_met,
        "deadlines_missed": one.deadlines_missed,
    }


def _facts(one: Simulated, prices: dict[str, float] | None, has_disks: bool) -> list[tuple[str, str]]:
    figures = one.figures
    late = figures.latency
    ended = [f"{figures.succeeded} succeeded"]
    ended += [f"{figures.failed} failed"] if figures.failed else []
    ended += [f"{figures.cancelled} cancelled"] if figures.cancelled else []
    unresolved = figures.jobs - figures.succeeded - figures.failed - figures.cancelled
    ended += [f"{unresolved} never ended"] if unresolved else []
    whole = figures.makespan_seconds * len(figures.gpus) or 1.0
    spent = {"running": figures.running_seconds, "loading": figures.loading_seconds, "idle": figures.idle_seconds}
    facts = [
        ("policy", one.policy),
        ("jobs", ", ".join(ended)),
        (
            "makespan",
            f"{duration(figures.makespan_seconds)}; the last job arrived at {duration(figures.last_arrival_seconds)}",
        ),
        ("throughput", f"{figures.jobs_per_minute:.1f} jobs per minute"),
        (
            "latency",
            f"half within {duration(late.p50_seconds)}, 90% {duration(late.p90_seconds)}, "
            f"99% {duration(late.p99_seconds)}, all {duration(late.longest_seconds)}",
        ),
        ("weights", f"{figures.resident_share:.1%} of {counted(figures.runs, 'run')} had all weights resident"),
        ("LoRAs", _lora_words(figures, has_disks)),
        (
            "bytes",
            f"{_amount(figures.uploaded_bytes)} uploaded, {_amount(figures.streamed_bytes)} streamed"
            + (f", {_amount(figures.storage_bytes)} from disks" if has_disks else ""),
        ),
        (
            "GPU time",
            ", ".join(f"{name} {duration(seconds)} ({seconds / whole:.1%})" for name, seconds in spent.items())
            + f"; {figures.loading_share:.1%} of the busy time was loading",
        ),
    ]
    if len(figures.users) > 1:
        facts.append(("fairness", _fairness_words(figures)))
    if prices is not None:
        each = figures.cost(prices) / figures.succeeded if figures.succeeded else 0.0
        facts.append(("cost", f"{figures.cost(prices):.2f} including idle time; {each:.4f} per job"))
    if one.deadlines_met or one.deadlines_missed:
        facts.append(("deadlines", f"{one.deadlines_met} met, {one.deadlines_missed} missed"))
    facts.append(("core", _core_words(one)))
    return facts


def _lora_words(figures: Figures, has_disks: bool) -> str:
    if not figures.adapters_needed:
        return "none requested"
    if not has_disks:
        return f"{figures.adapters_needed} needed by runs; patches switched {figures.patch_switches}x"
    loads = f"{figures.adapters_loaded} of {figures.adapters_needed} needed by runs"
    return f"{figures.lora_loads_per_job:.3f} disk reads per job ({loads}); patches switched {figures.patch_switches}x"


def _fairness_words(figures: Figures) -> str:
    users = counted(len(figures.users), "user")
    if all(one.service_ratio is None for one in figures.users):
        return f"{users}; no contention"
    return f"{figures.fairness:.3f} over {users} (Jain index of received over fair share; 1 is even)"


def _core_words(one: Simulated) -> str:
    rate = f"{one.events_per_second:,.0f} events/s"
    return f"{rate} on this machine ({counted(one.events, 'event')}; simulation time {duration(one.wall_seconds)})"


def _gpus_table(gpus: Sequence[GpuTime]) -> RenderableType:
    """Build the table of GPU kinds, with the busiest and the least busy GPU of each."""
    by_kind: defaultdict[str, list[GpuTime]] = defaultdict(list)
    for gpu in gpus:
        by_kind[gpu.kind].append(gpu)
    headings = ("kind", "GPUs", "runs", "running", "loading", "idle", "busiest", "idlest")
    rows = []
    for kind, of_kind in by_kind.items():
        shares = {gpu.worker_id: _busy(gpu) for gpu in of_kind}
        most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        sums = [sum(getattr(gpu, f"{what}_seconds") for gpu in of_kind) for what in ("running", "loading", "idle")]
        rows.append(
            (
                kind,
                str(len(of_kind)),
                str(sum(gpu.runs for gpu in of_kind)),
                *(f"{duration(value)} ({value / (sum(sums) or 1.0):.1%})" for value in sums),
                f"{most} ({shares[most]:.0%} busy)",
                f"{least} ({shares[least]:.0%} busy)",
            )
        )
    return rows_table(headings, rows, right=headings[1:6])


def _busy(gpu: GpuTime) -> float:
    busy = gpu.running_seconds + gpu.loading_seconds
    return busy / (busy + gpu.idle_seconds) if busy > 0 else 0.0


def _users_table(figures: Figures) -> RenderableType:
    """Build the table of the users with the most GPU-seconds."""
    headings = ("user", "jobs", "GPU time", "p50", "p99", "of fair share")
    users = sorted(figures.users, key=lambda one: -one.gpu_seconds)
    rows = [
        (
            one.user or "(no name)",
            str(one.jobs),
            duration(one.gpu_seconds),
            duration(one.p50_seconds),
            duration(one.p99_seconds),
            "-" if one.service_ratio is None else f"{one.service_ratio:.2f}x",
        )
        for one in users[:MOST_USERS]
    ]
    rest = users[MOST_USERS:]
    if rest:
        together = duration(sum(one.gpu_seconds for one in rest))
        slowest = duration(max(one.p99_seconds for one in rest))
        rows.append((f"{len(rest)} more", str(sum(one.jobs for one in rest)), together, "", f"up to {slowest}", ""))
    return rows_table(headings, rows, right=headings[1:])


def _compared(found: Simulation) -> list[RenderableType]:
    """Build a row per policy and a column per measure: first results, then reasons; the best of each column is
    marked.
    """
    by_policy = {name: [one.figures for one in of_seeds] for name, of_seeds in found.by_policy.items()}
    all_figures = [figures for of_seeds in by_policy.values() for figures in of_seeds]
    silent = set() if any(figures.adapters_needed for figures in all_figures) else {"LoRAs/job"}
    silent |= set() if any(len(figures.users) > 1 for figures in all_figures) else {"even"}
    silent |= set() if found.setting.shape.gpus else {"LoRAs/job", "from disk"}
    measures = [measure for measure in MEASURES if measure.name not in silent]
    if found.prices is not None:
        prices = found.prices
        measures.append(Measure("cost", lambda figures: figures.cost(prices), is_headline=True))
    speed = {
        name: (f"{median(one.events_per_second for one in of_seeds):,.0f}", "")
        for name, of_seeds in found.by_policy.items()
    }
    tables: list[RenderableType] = []
    for is_reasons in (False, True):
        columns = {
            measure.name: _column(measure, spreads(measure, by_policy))
            for measure in measures
            if (measure.name in _REASONS) == is_reasons
        }
        columns |= {"events/s": speed} if is_reasons else _deadline_column(found)
        rows = []
        for name, of_seeds in found.by_policy.items():
            rows.append((name, *(column[name][0] for column in columns.values())))
            if len(of_seeds) > 1:
                rows.append(("", *(column[name][1] for column in columns.values())))
        headings = ("why" if is_reasons else "policy", *columns)
        tables.append(rows_table(headings, rows, right=headings[1:]))
    return tables


def _deadline_column(found: Simulation) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the share of deadlines that were met, over all seeds, if there are any."""
    sums = {
        name: (sum(one.deadlines_met for one in of_seeds), sum(one.deadlines_missed for one in of_seeds))
        for name, of_seeds in found.by_policy.items()
    }
    if not any(met + missed for met, missed in sums.values()):
        return {}
    return {"in time": {name: (f"{met / (met + missed or 1):.0%}", "") for name, (met, missed) in sums.items()}}


def _column(measure: Measure, found: dict[str, Spread]) -> dict[str, tuple[str, str]]:
    """Return the column of a measure: the median with its mark and multiple, and the range."""
    from modelpool.actors.cli.simulate.simulate_lab import policies

    words = _WORDS[measure.name]
    leading = best(measure, {name: one for name, one in found.items() if not policies()[name].is_ideal})
    ours = found.get(OURS)
    column = {}
    for name, one in found.items():
        mark = "*" if name in leading else ""
        times = ratio(one.median, ours.median) if ours is not None and measure.is_headline and name != OURS else None
        multiple = "" if times is None else f" ({times:.2f}x)"
        column[name] = (f"{words(one.median)}{mark}{multiple}", f"{words(one.least)}-{words(one.most)}")
    return column


def _legend(found: Simulation) -> list[tuple[str, str]]:
    from modelpool.actors.cli.simulate.simulate_lab import policies

    about = [
        ("*", "best of the column, without ideal policies, which no real pool can implement"),
        *([("(1.50x)", f"relative to {OURS}")] if OURS in found.by_policy and len(found.by_policy) > 1 else []),
        ("found", "runs with all weights resident; moved: weights uploaded and streamed to GPUs"),
        ("loading", "GPU time moving weights before runs; events/s: of the core, on this machine"),
    ]
    return about + [(name, policies()[name].source) for name in found.by_policy]


def _failures(found: Simulation) -> list[RenderableType]:
    """Build the table of failure reasons, each once per policy."""
    rows = [
        (name, job, reason)
        for name, of_seeds in found.by_policy.items()
        for reason, job in dict(pair for one in of_seeds for pair in one.failures).items()
    ]
    return [rows_table(("policy", "first failed job", "why"), rows)] if rows else []


def _amount(count: float) -> str:
    """Format bytes; large amounts in TiB, which no memory budget uses."""
    return f"{count / TIB:.2f} TiB" if count >= TIB else format_bytes(int(count))


def _short_amount(count: float) -> str:
    for unit, letter in ((TIB, "T"), (GIB, "G"), (MIB, "M")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return f"{count / MIB:.1f}M" if count else "0"


#: measures that explain the results
_REASONS = {"found", "LoRAs/job", "moved", "from disk", "loading"}
_WORDS: dict[str, Callable[[float], str]] = {
    "makespan": duration,
    "jobs/min": lambda value: f"{value:.1f}",
    "p50": duration,
    "p99": duration,
    "found": lambda value: f"{value:.0%}",
    "LoRAs/job": lambda value: f"{value:.2f}",
    "moved": _short_amount,
    "from disk": _short_amount,
    "loading": duration,
    "even": lambda value: f"{value:.2f}",
    "cost": lambda value: f"{value:.2f}",
}
