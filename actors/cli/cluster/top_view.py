"""Draws one frame of `modelpool top` from a pool's status, and the rates between two.

Knows no pool and no keyboard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelpool.actors.cli.terminal.fitted_table import FittedColumn, FittedTable
from modelpool.actors.cli.terminal.screen import duration, visible
from modelpool.actors.cli.terminal.tables import facts_table, qos_facts, rows_table, worker_facts
from modelpool.pool.values.core.errors import counted, format_bytes

if TYPE_CHECKING:
    from modelpool.actors.control.status import NodeCosts, PoolStatus, WorkerStatus

BAR_CELLS = 28
#: of components, in the order in which a frame first names them
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta", "bright_yellow")
#: the same for consoles without colours
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def frame(now: PoolStatus, before: PoolStatus | None = None) -> RenderableType:
    """Draw the pool as it is, with rates since `before`, else since it was opened."""
    letters = _letters(now)
    parts: list[RenderableType] = [Text(_headline(now), style="bold"), Text(""), _workers(now, letters), Text("")]
    if letters:
        parts += [_legend(now, letters), Text("")]
    if len(now.nodes) > 1:
        parts += [_nodes(now), Text("")]
    if now.scaling is not None:
        parts += [_groups(now.scaling), Text("")]
    if any(now.waiting.values()):
        parts += [_queues(now), Text("")]
    if now.failures:
        parts += [_failures(now), Text("")]
    return Group(*parts, facts_table(_facts(now, before)))


def _headline(now: PoolStatus) -> str:
    up = sum(worker.state in ("idle", "busy") for worker in now.workers)
    busy = sum(worker.state == "busy" for worker in now.workers)
    jobs = ", ".join(f"{count} {outcome}" for outcome, count in now.jobs.items() if count) or "no jobs yet"
    left = f"; {duration(now.left_seconds)} left" if now.left_seconds and now.jobs.get("live") else ""
    return f"{up} of {len(now.workers)} GPUs up, {busy} busy; jobs: {jobs}{left}; up for {duration(now.seconds)}"


def _workers(now: PoolStatus, letters: Mapping[str, str]) -> FittedTable:
    """Build the table of GPUs. On a narrow terminal, bar and kind give way first; id, state and task stay."""
    workers = now.workers
    on_nodes = any(worker.node_name for worker in workers)
    used = [
        f"{format_bytes(worker.used_bytes)} of {format_bytes(worker.capacity_bytes)}" if worker.capacity_bytes else "-"
        for worker in workers
    ]
    runs = [Text(str(worker.runs)) for worker in workers]
    hits = [_share(worker.runs_resident, worker.runs) for worker in workers]
    nodes = [Text(visible(worker.node_name or "-", kept="")) for worker in workers]

    def bars(cells: int) -> list[Text]:
        return [_bar(worker, letters, cells) for worker in workers]

    return FittedTable(
        (
            FittedColumn("GPU", [Text(str(worker.id)) for worker in workers]),
            *([FittedColumn("node", nodes, gives_way=3, least_cells=10)] if on_nodes else []),
            FittedColumn("kind", [Text(worker.device or "-") for worker in workers], gives_way=2, least_cells=8),
            FittedColumn("state", [Text(_state(worker)) for worker in workers]),
            FittedColumn("task", [Text(_task(worker)) for worker in workers], gives_way=7, least_cells=16, stays=True),
            FittedColumn("weights", bars(BAR_CELLS), gives_way=1, least_cells=8, redrawn=bars),
            FittedColumn("", [Text(text) for text in used], gives_way=6, least_cells=20, right=True),
            FittedColumn("runs", runs, gives_way=5, least_cells=4, right=True),
            FittedColumn("hits", [Text(text) for text in hits], gives_way=4, least_cells=4, right=True),
        )
    )


def _state(worker: WorkerStatus) -> str:
    """Return its state, or what the operator wants of it, unless it is busy with the last run before that."""
    return worker.order if worker.order and worker.state != "busy" else worker.state.replace("_", " ")


def _task(worker: WorkerStatus) -> str:
    run = worker.run
    if run is None:
        return "-"
    step = f" {run.step}/{run.steps}" if run.steps else ""
    stopping = ", stopping" if run.stopping else ""
    others = f" + {run.mates} more" if run.mates else ""
    others += f" on {run.gpus} GPUs" if run.gpus > 1 else ""
    return f"{run.stage}{step} of {run.job_id or '-'}{others}, {duration(run.seconds)}{stopping}"


def _bar(worker: WorkerStatus, letters: Mapping[str, str], bar_cells: int) -> Text:
    """Draw each component with a length proportional to its bytes; free memory as dots."""
    bar, filled = Text(), 0
    if not worker.capacity_bytes:
        return Text("-")
    end_bytes = 0
    for part in sorted(worker.parts, key=lambda part: part.component):
        end_bytes += part.resident_bytes
        cells = min(bar_cells, round(bar_cells * end_bytes / worker.capacity_bytes)) - filled
        bar.append(letters[part.component] * cells, style=_colour(letters[part.component]))
        filled += cells
    return bar.append("." * (bar_cells - filled), style="dim")


def _legend(now: PoolStatus, letters: Mapping[str, str]) -> Table:
    """Build the table of letters: component, size, and number of GPUs that hold it."""
    rows = []
    for component, letter in letters.items():
        places = [part for worker in now.workers for part in worker.parts if part.component == component]
        whole = sum(part.resident_bytes >= part.whole_bytes for part in places)
        patched = sum(part.patched for part in places)
        where = f"resident on {whole}" + (f", partial on {len(places) - whole}" if whole < len(places) else "")
        rows.append(
            (
                letter,
                component.rsplit("@", 1)[0],
                format_bytes(max(part.whole_bytes for part in places)),
                where + (f", with LoRAs on {patched}" if patched else ""),
            )
        )
    return rows_table(["", "component", "size", "GPUs"], rows, right=["size"])


def _queues(now: PoolStatus) -> Table:
    """Build the table of waiting tasks by stage, and by user if any has a name."""
    stages = list(now.waiting)
    rows = [("all users", *(str(now.waiting[stage]) for stage in stages))]
    if any(now.waiting_by_user):
        for user, counts in sorted(now.waiting_by_user.items(), key=lambda item: (-sum(item[1].values()), item[0])):
            rows.append((user or "no name", *(str(counts.get(stage, 0)) for stage in stages)))
    return rows_table(["waiting", *stages], rows, right=stages)


def _nodes(now: PoolStatus) -> Table:
    """Build the table of nodes: their GPUs, runs and memory, and when they end."""
    rows = []
    for node, name in sorted(now.nodes.items(), key=lambda item: item[1]):
        workers = [worker for worker in now.workers if worker.node == node]
        up = [worker for worker in workers if worker.state in ("idle", "busy")]
        leaves = [worker.leaves_in for worker in workers if worker.leaves_in is not None]
        rows.append(
            (
                name,
                str(len(up)),
                str(sum(worker.state == "busy" for worker in up)),
                str(sum(worker.runs for worker in workers)),
                f"{format_bytes(sum(w.used_bytes for w in up))} of {format_bytes(sum(w.capacity_bytes for w in up))}",
                f"ends in {duration(min(leaves))}" if leaves else now.cordoned_nodes.get(name, ""),
            )
        )
    return rows_table(["node", "GPUs", "busy", "runs", "weights", ""], rows, right=["GPUs", "busy", "runs"])


def _groups(scaling: NodeCosts) -> Table:
    """Build the table of groups of nodes, with their cost."""
    rows = [
        (
            group.name,
            f"{group.nodes} of {group.max_nodes}",
            str(group.starting),
            f"{group.price_per_hour * group.nodes:.2f}",
            group.obstacle,
        )
        for group in scaling.groups
    ]
    rows.append(("all groups", "", "", f"{scaling.per_hour:.2f}", f"{scaling.spent:.2f} so far"))
    table = rows_table(["group", "nodes", "starting", "cost per hour", ""], rows, right=["starting", "cost per hour"])
    if scaling.latest_decision:
        table.caption, table.caption_justify = visible(scaling.latest_decision), "left"
    return table


def _failures(now: PoolStatus) -> Table:
    """Build the table of the latest failed jobs, newest first."""
    rows = [
        (failed.job_id, f"{duration(failed.seconds)} ago", failed.message.splitlines()[0] if failed.message else "")
        for failed in reversed(now.failures)
    ]
    return rows_table(["failed", "", "why"], rows)


def _facts(now: PoolStatus, before: PoolStatus | None) -> list[tuple[str, str]]:
    seconds = now.seconds - before.seconds if before else now.seconds
    made = now.jobs.get("succeeded", 0) - (before.jobs.get("succeeded", 0) if before else 0)
    tasks = now.tasks_total - (before.tasks_total if before else 0)
    uploaded = now.uploaded_bytes - (before.uploaded_bytes if before else 0)
    streamed = now.streamed_bytes - (before.streamed_bytes if before else 0)
    since = f"in the last {duration(seconds)}" if before else "since the start"
    facts = [
        ("throughput", f"{_rate(made, seconds)} jobs, {_rate(tasks, seconds)} tasks per second {since}"),
        (
            "weights",
            f"{format_bytes(round(uploaded / seconds)) if seconds > 0 else '-'} uploaded, "
            f"{format_bytes(round(streamed / seconds)) if seconds > 0 else '-'} streamed per second "
            f"{since}",
        ),
        (
            "total",
            f"{format_bytes(now.uploaded_bytes)} uploaded, {format_bytes(now.streamed_bytes)} streamed, "
            f"{now.patch_switches} LoRA switches",
        ),
        (
            "hit rate",
            f"{_share(now.tasks_resident, now.tasks_total)} of {counted(now.tasks_total, 'task')} "
            "had all weights resident",
        ),
    ]
    facts += qos_facts(now)
    return facts + worker_facts(now)


def _letters(now: PoolStatus) -> dict[str, str]:
    """Assign a letter to each component, by name, so that letters are stable while components are."""
    names: Sequence[str] = sorted({part.component for worker in now.workers for part in worker.parts})
    return {name: LETTERS[index % len(LETTERS)] for index, name in enumerate(names)}


def _colour(letter: str) -> str:
    return COLOURS[LETTERS.index(letter) % len(COLOURS)]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.2f}" if seconds > 0 else "-"
