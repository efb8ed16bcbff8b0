"""`modelpool report`: writes one HTML page about a folder of outputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.run.repair import Folder
from modelpool.pool.values.core.errors import UserError, counted, unusable_field

if TYPE_CHECKING:
    from modelpool.actors.control.detached.records import RequestOutcome
    from modelpool.actors.outputs.report_figures import PoolRecord

REPORT_NAME = "report.html"


def report(
    context: typer.Context,
    folder: Folder,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help=f"File to write (default: {REPORT_NAME} in DIR).", metavar="FILE", show_default=False
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            help="Event log of the pool ([output] record): adds its failed jobs, lost workers and autoscaling.",
            metavar="LOG",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", help="Price of a GPU hour: adds the cost.", metavar="X", show_default=False),
    ] = None,
) -> None:
    """Write an HTML report of a batch: failures first, then plots of throughput, GPU use, stages and cost, timings and
    loads, and a contact sheet by model and LoRA with why each task ran where it did. The page needs no other file.
    Needs no pool for a folder, which remembers the jobs that failed and have no output yet; for the id of a submission,
    the pool names those that failed.
    """
    from modelpool.actors.cli.run.repair import named_place, named_submission
    from modelpool.actors.cli.terminal.screen import say, user_console
    from modelpool.actors.config.output_address import output_address
    from modelpool.actors.outputs.atomic_write import write_atomically
    from modelpool.actors.outputs.open_outputs import existing_outputs
    from modelpool.actors.outputs.report_figures import report_figures
    from modelpool.actors.outputs.report_page import report_page
    from modelpool.scheduler.model.messages import Outcome

    if price is not None and not 0.0 <= price < float("inf"):
        raise unusable_field("--price", price, "a price of at least 0")
    address, failed, noted, failed_at = named_place(folder), [], frozenset[str](), list[float]()
    if address is None:
        with named_submission(context, folder, None) as jobs:
            address = output_address(jobs.progress().record.output)
            failed = [_failure(each) for each in jobs.outcomes() if each.outcome is Outcome.FAILED]
        place = existing_outputs(address)
    else:
        place = existing_outputs(address)
        failures = place.failures()
        failed, noted = [(each.title, each.words) for each in failures], frozenset(each.job_id for each in failures)
        failed_at = [each.at for each in failures]
    damaged = [(one.entry.file, one.reason) for one in place.damaged(quick=True)]
    recorded = None if record is None else _record_of(record)
    figures = report_figures(place.entries(), damaged, recorded, failed, noted, failed_at)
    page = report_page(f"Report of {address}", figures, place.local_file, price)
    target = out or (address / REPORT_NAME if isinstance(address, Path) else Path(REPORT_NAME))
    try:
        write_atomically(target, page.encode())
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from None
    outputs = counted(figures.outputs, "output")
    say(user_console(sys.stdout), f"wrote {target}: {outputs}, {counted(figures.totals.runs, 'run')}")


def _failure(outcome: RequestOutcome) -> tuple[str, str]:
    named = f" ({outcome.labels.id})" if outcome.labels.id else ""
    return f"job {outcome.place}{named}", f"{outcome.error_kind}: {outcome.message}"


def _record_of(log: Path) -> PoolRecord:
    from modelpool.actors.cli.simulate.replay import opened_log
    from modelpool.actors.outputs.report_figures import read_record

    with opened_log(log) as (_, entries):
        found = read_record(entries)
    if entries.gap is not None:
        from modelpool.actors.cli.terminal.screen import say, user_console

        lost = counted(entries.lost, "event")
        words = f"{log}:{entries.gap.line}: the log lacks {lost} ({entries.gap.reason}); the report is without them"
        say(user_console(sys.stderr), words, "yellow")
    return found
