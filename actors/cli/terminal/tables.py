"""Builds the tables that the command line prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from modelpool.actors.cli.terminal.fitted_table import FittedColumn, FittedTable
from modelpool.actors.cli.terminal.screen import duration, visible
from modelpool.pool.values.core.errors import counted, format_bytes

if TYPE_CHECKING:
    from modelpool.actors.control.status import PoolStatus, WorkerStatus
    from modelpool.actors.outputs.results.outcomes import Summary, WorkerSummary
    from modelpool.pool.catalog.registry.listings import LoraListing, ModelListing

#: users listed individually
MOST_USERS = 6


def summary_table(summary: Summary) -> Table:
    """Build the table of what each worker did for a submission, with totals."""
    rows = summary.per_worker()
    headings = ["worker", "tasks", "resident", "loaded", "busy", "uploaded", "streamed", "LoRA switches"]
    table = _table(headings, right=headings[1:], has_footer=len(rows) > 1)
    for worker in rows:
        table.add_row(str(worker.worker), *_figures([worker]))
    if len(rows) > 1:
        for column, figure in zip(table.columns, ["total", *_figures(rows)], strict=True):
            column.footer = figure
    return table


def models_table(models: Iterable[ModelListing]) -> Table:
    """Build the table of a pool's checkpoints; a problem replaces the description."""
    table = _table(["model", "description", "native size", "file size", "file"], right=["native size", "file size"])
    for model in models:
        native_size = f"{model.width}x{model.height}" if model.width else "-"
        what = Text(visible(model.problem), style="red") if model.problem else Text(model.family)
        table.add_row(_text(model.name), what, native_size, format_bytes(model.file_bytes), _text(model.path))
    return table


def lora_description(lora: LoraListing) -> str:
    """Return what a pool knows of a LoRA, in a few words."""
    ranks = ", ".join(map(str, lora.ranks)) or "none"
    words = f"; trigger words: {', '.join(lora.trigger_words)}" if lora.trigger_words else ""
    return f"{counted(lora.modules, 'module')}, rank {ranks}{words}"


def loras_table(loras: Iterable[LoraListing]) -> Table:
    """Build the table of a pool's LoRAs, in the same form."""
    table = _table(["LoRA", "description", "file size", "file"], right=["file size"])
    for lora in loras:
        what = Text(visible(lora.problem), style="red") if lora.problem else Text(visible(lora_description(lora)))
        table.add_row(_text(lora.name), what, format_bytes(lora.file_bytes), _text(lora.path))
    return table


def status_table(status: PoolStatus) -> FittedTable:
    """Build the table of workers: state and resident weights. On a narrow terminal, device and node give way first."""
    workers = status.workers
    on_nodes = any(worker.node_name for worker in workers)
    starts = [f" (restarts: {worker.incarnation - 1})" if worker.incarnation > 1 else "" for worker in workers]
    resident = [", ".join(name.rsplit("@", 1)[0] for name in worker.resident) or "-" for worker in workers]
    used, capacity = ([format_bytes(n) for n in c] for c in _bytes_of(workers))
    places = [FittedColumn("node", [_text(w.node_name or "-") for w in workers], gives_way=2, least_cells=10)]
    return FittedTable(
        (
            FittedColumn("worker", [Text(str(worker.id)) for worker in workers]),
            *(places if on_nodes else []),
            FittedColumn(
                "state",
                [Text(_state(worker) + more) for worker, more in zip(workers, starts, strict=True)],
                gives_way=6,
                least_cells=10,
                stays=True,
            ),
            FittedColumn("device", [Text(worker.device or "-") for worker in workers], gives_way=1, least_cells=8),
            FittedColumn("task", [Text(worker.task or "-") for worker in workers]),
            FittedColumn("weights", [Text(text) for text in used], gives_way=5, least_cells=8, right=True),
            FittedColumn("of", [Text(text) for text in capacity], gives_way=4, least_cells=8, right=True),
            FittedColumn("resident", [_text(text) for text in resident], gives_way=3, least_cells=16, wraps=True),
        ),
        has_rule=True,
    )


def _state(worker: WorkerStatus) -> str:
    """Return its state, with what the operator wants of it."""
    return worker.state if worker.order in ("", worker.state) else f"{worker.state}, {worker.order}"


def _bytes_of(workers: Sequence[WorkerStatus]) -> tuple[list[int], list[int]]:
    return [worker.used_bytes for worker in workers], [worker.capacity_bytes for worker in workers]


def qos_facts(status: PoolStatus) -> list[tuple[str, str]]:
    """Return met deadlines, if there were any, and GPU time by user, if there are several."""
    facts = []
    if status.deadlines_met or status.deadlines_missed:
        facts.append(("deadlines", f"{status.deadlines_met} met, {status.deadlines_missed} missed"))
    most = sorted(status.seconds_by_user.items(), key=lambda item: (-item[1], item[0]))
    if len(most) > 1:
        named = [f"{user or 'no name'} {duration(seconds)}" for user, seconds in most[:MOST_USERS]]
        rest = sum(seconds for _, seconds in most[MOST_USERS:])
        named += [f"{len(most) - MOST_USERS} more {duration(rest)}"] if len(most) > MOST_USERS else []
        facts.append(("GPU time", ", ".join(named)))
    return facts


def worker_facts(status: PoolStatus) -> list[tuple[str, str]]:
    """Return where the event log is and why it is not written, what workers without a GPU and detached jobs wait for,
    how many jobs wait for hashes, and for each worker why it is not up, that it does not answer, that its node is
    drained or lacks files, or its latest trouble."""
    place = f" on {status.controller}" if status.controller else ""
    facts = [("record", status.record + place)] if status.record else []
    facts += [("GPUs", status.waiting_for)] if status.waiting_for else []
    if status.cordoned_nodes:
        named = ", ".join(f"{name} ({state})" for name, state in status.cordoned_nodes.items())
        facts.append(("out of use", f"{named}; `modelpool uncordon NODE` brings a node back"))
    facts += [("detached jobs", f"wait: {trouble}") for trouble in status.jobs_troubles]
    if status.history_trouble:
        facts.append(("history", f"not written: {status.history_trouble}"))
    if status.jobs_unverified:
        verb = "job waits" if status.jobs_unverified == 1 else "jobs wait"
        facts.append(("files", f"{status.jobs_unverified} {verb} for the hashes of files that nodes are computing"))
    reasons = ((str(worker.id), _worker_fact(worker)) for worker in status.workers)
    return facts + [(name, reason) for name, reason in reasons if reason and reason != "starting"]


def _worker_fact(worker: WorkerStatus) -> str:
    silent = [f"not answering for {worker.silent_seconds:.0f} s"] if worker.silent_seconds else []
    if worker.not_up:
        return "; ".join([worker.not_up, *silent])
    facts = silent if worker.leaves_in is None else [*silent, f"its node ends in {duration(worker.leaves_in)}"]
    if worker.order:
        facts.append(worker.order_words)
    if worker.unavailable:
        facts.append(f"its node lacks files: {'; '.join(worker.unavailable)}")
    return "; ".join(facts) or worker.trouble


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Build a table of names and values without headings. Text is literal, with control characters escaped."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(_text(name), Text(visible(value)))
    return table


def rows_table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> Table:
    """Build a table of literal text, control characters escaped; columns named in `right` are right-aligned."""
    table = _table(headings, right)
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(name: str) -> Text:
    """Return a name on one line, without markup."""
    return Text(visible(name, kept=""))


def _figures(workers: Sequence[WorkerSummary]) -> list[str]:
    tasks = sum(w.tasks for w in workers)
    resident = sum(w.tasks_resident for w in workers)
    share = f"{resident} ({resident / tasks:.0%})" if tasks else "0"
    return [
        str(tasks),
        share,
        str(tasks - resident),
        duration(sum(w.seconds for w in workers)),
        format_bytes(sum(w.uploaded_bytes for w in workers)),
        format_bytes(sum(w.streamed_bytes for w in workers)),
        str(sum(w.patch_switches for w in workers)),
    ]


def _table(headings: Sequence[str], right: Sequence[str] = (), has_footer: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_footer=has_footer, show_edge=False, pad_edge=False, footer_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table
