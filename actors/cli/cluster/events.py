"""`modelpool events`: what has happened to a pool, in the past months."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.cluster.history_options import find_history, local_time, parse_since, time_of_year
from modelpool.actors.cli.terminal import options
from modelpool.pool.values.core.errors import UnknownName

if TYPE_CHECKING:
    from modelpool.actors.cli.terminal.fitted_table import FittedTable
    from modelpool.actors.control.history.history_reader import StoredEvent

#: interval of looking for new events
_FOLLOW_SECONDS = 1.0
#: events that a table shows; --json prints all
MOST_SHOWN = 1000

Since = Annotated[
    str,
    typer.Option("--since", help="An age (90m, 12h, 2d, 3w) or a date (2026-01-31).", metavar="TIME"),
]


def events(
    context: typer.Context,
    since: Since = "2d",
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            help="Only events of this kind, as in worker_lost; may be repeated. A wrong name lists all kinds.",
            metavar="KIND",
            show_default=False,
        ),
    ] = None,
    node: Annotated[
        str,
        typer.Option(
            "--node",
            help="Only events of nodes or workers with this in their name.",
            metavar="NAME",
            show_default=False,
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.", metavar=" ")] = False,
    as_json: options.AsJson = False,
    pool: options.PoolName = None,
    config: options.Config = None,
) -> None:
    """Show what has happened to a pool of `modelpool up`, while it runs and afterwards: workers and nodes that came and
    went with the reason, decisions of autoscaling, restarts of the controller, outputs on hold, failures and retries.
    """
    from modelpool.actors.cli.terminal.screen import say, show, user_console

    kinds, from_time = _known_kinds(kind or ()), parse_since(since, time.time())
    found = find_history(context, pool, config)
    stored = found.reader.events(from_time, kinds, node)
    problems = user_console()
    if found.trouble:
        say(problems, f"this is not complete: {found.trouble}", "yellow")
    removed = found.reader.span()
    if removed.events_removed and removed.events_since is not None and from_time < removed.events_since:
        say(
            problems,
            f"events are kept since {local_time(removed.events_since)}; "
            f"{removed.events_removed} older ones were removed",
            "yellow",
        )
    if as_json:
        _print_json(stored)
    elif follow:
        _print_lines(stored)
    elif stored:
        left_out = len(stored) - MOST_SHOWN
        if left_out > 0:
            say(problems, f"{left_out} earlier events are left out; --json prints all", "yellow")
        show(user_console(sys.stdout), events_table(stored[-MOST_SHOWN:]))
    else:
        say(problems, f"pool {found.name!r} has no such events since {local_time(from_time)}")
    last = stored[-1].number if stored else 0
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            time.sleep(_FOLLOW_SECONDS)
            new = found.reader.events(from_time, kinds, node, after=last)
            if new:
                last = new[-1].number
                (_print_json if as_json else _print_lines)(new)


def events_table(stored: Sequence[StoredEvent]) -> FittedTable:
    """Build the table of events. On a narrow terminal, the node gives way; the text continues on the next line, and
    time and kind stay."""
    from rich.text import Text

    from modelpool.actors.cli.terminal.fitted_table import FittedColumn, FittedTable
    from modelpool.actors.cli.terminal.screen import visible

    def cells(values: Sequence[str]) -> list[Text]:
        return [Text(visible(value, kept="")) for value in values]

    shown = [each.event for each in stored]
    nodes = [event.node or "-" for event in shown]
    return FittedTable(
        (
            FittedColumn("when", cells([time_of_year(event.at, time.time()) for event in shown])),
            FittedColumn("kind", cells([event.kind for event in shown]), gives_way=3, least_cells=12, stays=True),
            *([FittedColumn("node", cells(nodes), gives_way=1, least_cells=8)] if any(e.node for e in shown) else []),
            FittedColumn(
                "what", cells([_what(each) for each in stored]), gives_way=2, least_cells=20, stays=True, wraps=True
            ),
        ),
        has_rule=True,
    )


def _what(stored: StoredEvent) -> str:
    event = stored.event
    if event.count == 1:
        return event.text
    return f"{event.text} (x{event.count}, until {time_of_year(event.until, time.time())})"


def _print_lines(stored: Sequence[StoredEvent]) -> None:
    from modelpool.actors.cli.terminal.screen import visible

    for each in stored:
        print(f"{local_time(each.event.at)}  {each.event.kind}  {visible(_what(each), kept='')}", flush=True)


def _print_json(stored: Sequence[StoredEvent]) -> None:
    from modelpool.actors.cli.terminal.screen import print_json
    from modelpool.actors.control.history.history_values import plain_event

    for each in stored:
        print_json(sys.stdout, {"number": each.number, **plain_event(each.event)})


def _known_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds that were named. Raises UnknownName with all of them."""
    from modelpool.actors.control.history.history_values import EventKind

    known = [kind.value for kind in EventKind]
    named = [name.strip() for text in kinds for name in text.split(",")]
    for name in named:
        if name not in known:
            raise UnknownName(f"--kind: unknown kind of event {name!r}. Known: {', '.join(known)}.")
    return tuple(named)
