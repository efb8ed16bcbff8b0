"""`modelpool costs`: GPU time and money of the past months, by whom and for what."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.cluster.events import Since
from modelpool.actors.cli.cluster.history_options import find_history, local_time, parse_since
from modelpool.actors.cli.terminal import options
from modelpool.pool.values.core.errors import UserError, unknown_name

if TYPE_CHECKING:
    from modelpool.actors.cli.terminal.fitted_table import FittedTable
    from modelpool.actors.control.history.history_reader import CostRow

#: the columns of JSON and CSV behind the columns of --by, with their sums
COLUMNS = {
    "runs": "runs",
    "gpu_seconds": "seconds",
    "load_seconds": "load_seconds",
    "failed_runs": "failed_runs",
    "failed_gpu_seconds": "failed_seconds",
    "lost_runs": "lost_runs",
    "lost_gpu_seconds": "lost_seconds",
    "cost": "cost",
    "failed_cost": "failed_cost",
}
#: stands for no name: jobs without a user, runs without a LoRA, workers without a group
_NONE = "-"


def costs(
    context: typer.Context,
    by: Annotated[
        str, typer.Option("--by", help="Sum by these: user, model, lora, group, hour, day, month.", metavar="A,B")
    ] = "user,model",
    since: Since = "30d",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV to stdout.", metavar=" ")] = False,
    as_json: options.AsJson = False,
    pool: options.PoolName = None,
    config: options.Config = None,
) -> None:
    """Show what a pool of `modelpool up` has used, while it runs and afterwards: GPU time, and money where groups of
    nodes have a price. Runs that failed or were lost count, and are shown apart. Counted for whole hours.
    """
    from modelpool.actors.cli.terminal.screen import print_json, say, show, user_console

    fields = parse_by(by)
    if as_csv and as_json:
        raise UserError("--csv: found --json, too, expected one of them")
    from_time = parse_since(since, time.time())
    found = find_history(context, pool, config)
    rows = found.reader.costs(fields, from_time)
    problems = user_console()
    if found.trouble:
        say(problems, f"this is not complete: {found.trouble}", "yellow")
    span = found.reader.span()
    if span.costs_removed and span.costs_since is not None and from_time < span.costs_since:
        say(problems, f"costs are kept since {local_time(span.costs_since)}; older ones were removed", "yellow")
    if as_json:
        for row in rows:
            print_json(sys.stdout, plain_row(fields, row))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, [*fields, *COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(plain_row(fields, row) for row in rows)
    elif rows:
        console = user_console(sys.stdout)
        show(console, costs_table(fields, rows))
        if failures := failures_line(rows):  # the columns give way on a narrow terminal
            say(console, failures)
    else:
        say(problems, f"pool {found.name!r} has used nothing since {local_time(from_time)}")


def parse_by(text: str) -> tuple[str, ...]:
    """Return the fields that `--by` names. Raises UnknownName with the known ones, and UnusableField."""
    from modelpool.actors.control.history.history_reader import COST_FIELDS

    fields = tuple(filter(None, (name.strip() for name in text.split(","))))
    for name in fields:
        if name not in COST_FIELDS:
            raise unknown_name("field in --by", name, COST_FIELDS)
    if not fields:
        raise unknown_name("field in --by", text, COST_FIELDS)
    return tuple(dict.fromkeys(fields))


def plain_row(fields: Sequence[str], row: CostRow) -> dict[str, Any]:
    """Return a row for JSON and CSV: its fields, and its sums in seconds and in the unit of price_per_hour."""
    sums = {name: getattr(row.sums, field) for name, field in COLUMNS.items()}
    return dict(zip(fields, row.values, strict=True)) | {
        name: round(value, 6) if isinstance(value, float) else value for name, value in sums.items()
    }


def failures_line(rows: Sequence[CostRow]) -> str:
    """Return how much of the costs is of runs that have not succeeded; "" if none is."""
    from modelpool.actors.cli.terminal.screen import counted, duration

    failed, lost = sum(row.sums.failed_runs for row in rows), sum(row.sums.lost_runs for row in rows)
    parts = []
    if failed:
        seconds = sum(row.sums.failed_seconds for row in rows)
        parts.append(f"failed or cancelled: {counted(failed, 'run')}, {duration(seconds)}")
    if lost:
        seconds = sum(row.sums.lost_seconds for row in rows)
        parts.append(f"lost with workers: {counted(lost, 'run')}, {duration(seconds)}")
    money = sum(row.sums.failed_cost for row in rows)
    return "; ".join([*parts, *([f"their cost: {money:.2f}"] if money else [])])


def costs_table(fields: Sequence[str], rows: Sequence[CostRow]) -> FittedTable:
    """Build the table of costs, the largest first unless it is by time, with a total. On a narrow terminal, what was
    lost and what failed give way first; names are shortened at last."""
    from rich.text import Text

    from modelpool.actors.cli.terminal.fitted_table import FittedColumn, FittedTable
    from modelpool.actors.cli.terminal.screen import duration, visible
    from modelpool.actors.control.history.history_reader import CostRow
    from modelpool.actors.control.history.history_values import CostSums

    if fields[0] not in ("hour", "day", "month"):
        rows = sorted(rows, key=lambda row: (row.cost, row.sums.charged_seconds), reverse=True)
    total = CostSums()
    for row in rows:
        total.add(row.sums)
    shown = [*rows, CostRow(("total", *[""] * (len(fields) - 1)), total)]

    def texts(values: Sequence[str]) -> list[Text]:
        return [Text(visible(value, kept=""), "bold" if n == len(rows) else "") for n, value in enumerate(values)]

    def part(runs: int, seconds: float) -> str:
        return f"{runs}: {duration(seconds)}" if runs else _NONE

    columns = [
        FittedColumn(
            name,
            texts([row.values[place] or ("" if n == len(rows) else _NONE) for n, row in enumerate(shown)]),
            gives_way=9 - place,
            least_cells=8,
            stays=True,
        )
        for place, name in enumerate(fields)
    ]
    used = texts([duration(row.sums.seconds) for row in shown])
    columns += [
        FittedColumn("runs", texts([str(row.sums.runs) for row in shown]), gives_way=3, least_cells=4, right=True),
        FittedColumn("GPU time", used, right=True),
    ]
    if total.failed_runs:
        failed = texts([part(row.sums.failed_runs, row.sums.failed_seconds) for row in shown])
        columns.append(FittedColumn("failed", failed, gives_way=2, least_cells=6, right=True))
    if total.lost_runs:
        lost = texts([part(row.sums.lost_runs, row.sums.lost_seconds) for row in shown])
        columns.append(FittedColumn("lost", lost, gives_way=1, least_cells=6, right=True))
    if total.cost or total.failed_cost:
        columns.append(FittedColumn("cost", texts([f"{row.cost:.2f}" for row in shown]), right=True))
    return FittedTable(columns, has_rule=True)
