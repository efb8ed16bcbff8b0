"""Explains in `modelpool why` what a task that has not started waits for, and what the other choices would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from modelpool.scheduler.core.waiting_task import TaskWait
    from modelpool.scheduler.model.placement_record import PlacementOption


def wait_words(now: float, wait: TaskWait) -> str:
    """Return what the task waits for, since when and until when, as a sentence."""
    since = "" if wait.since is None else f", for {now - wait.since:.2f} s so far"
    if wait.until is None:
        until = "; when it will start is unknown"
    else:
        until = f"; should start in {max(0.0, wait.until - now):.2f} s"
    return f"{wait.reason}{since}{until}"


def options_table(wait: TaskWait) -> Table | None:
    """Build the table of the workers that the task could run on, with what it would cost there; None without any."""
    from modelpool.actors.cli.terminal.tables import rows_table

    headings = ["", "worker", "wait", "setup", "run", "together"]
    rows = [_row("waits for it" if option.worker_id == wait.worker_id else "", option) for option in wait.options]
    if wait.evaluated and wait.evaluated != wait.options:
        rows += [_row("at the last placement", option) for option in wait.evaluated]
    return rows_table(headings, rows, right=headings[2:]) if rows else None


def _row(first: str, option: PlacementOption) -> list[str]:
    seconds = (option.wait_seconds, option.extra_seconds, option.run_seconds, option.seconds)
    return [first, str(option.worker_id), *(f"{value:.2f} s" for value in seconds)]
