"""`modelpool replay` and `modelpool trace`: what a pool recorded, decided again, or made a workload of.

Knows files; what is in them, `scheduler.record.event_log`. Starts nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli import options
from modelpool.pool.core.errors import CorruptFile, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from modelpool.scheduler.record.event_log import Entries, Header
    from modelpool.scheduler.record.replay import Difference, Replayed

EXIT_DIFFERENT = 1
Log = Annotated[Path, typer.Argument(metavar="LOG", help="What `modelpool up --record LOG` wrote.", show_default=False)]


def replay(
    log: Log,
    check: Annotated[
        bool, typer.Option("--check", help="Hold every invariant of the scheduler after each event.", metavar=" ")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Decide a recorded log again and compare each command. Exits with 1 at the first that is different."""
    from modelpool.actors.cli.screen import people_console, print_json, say
    from modelpool.scheduler.record.replay import replay as decide_again

    began = time.monotonic()
    with _opened(log) as (header, entries):
        outcome = decide_again(header, entries, check)
    wall_seconds = time.monotonic() - began
    if as_json:
        plain = json.dumps(dataclasses.asdict(outcome), default=_value)
        print_json(sys.stdout, {**json.loads(plain), "same": outcome.same, "cut_off": entries.cut_off})
    else:
        console = people_console(sys.stdout)
        rate = f", decided again in {wall_seconds:.2f} s" if wall_seconds > 0 else ""
        ends = ", of a log that ends in the middle" if entries.cut_off is not None else ""
        told = f"{outcome.events} events of {outcome.seconds:.1f} s{ends}, {outcome.commands} commands{rate}"
        say(console, told)
        _say_cut_off(console, log, entries)
        for line in _outcome_lines(log, outcome):
            say(console, line)
    if not outcome.same:
        raise typer.Exit(EXIT_DIFFERENT)


def trace(
    log: Log,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The trace to write.", show_default=False)],
) -> None:
    """Make a workload of a recorded log, for `modelpool simulate`: its jobs at their times, with measured seconds."""
    from modelpool.actors.cli.screen import counted, people_console, say
    from modelpool.actors.cli.simulate_workload import require_replaceable, save_trace
    from modelpool.scheduler.record.log_trace import live_trace

    require_replaceable("OUT", out)
    with _opened(log) as (_, entries):
        live = live_trace(entries, log.stem)
    workload = live.workload
    if not workload.jobs:
        raise UserError(f"{log}: found no jobs that can be simulated, expected at least one")
    save_trace("OUT", out, workload)
    console = people_console(sys.stdout)
    _say_cut_off(console, log, entries)
    say(console, f"{out}: {counted(len(workload.jobs), 'job')} over {workload.seconds:.1f} s")
    say(console, f"run seconds from {counted(live.measured, 'run')} that ended well")
    if live.cancelled:
        say(console, f"{counted(live.cancelled, 'job')} among them had been cancelled")
    if live.refused:
        say(console, f"{counted(live.refused, 'job')} left out: no scheduler would take them in")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Header, Entries]]:
    """A log, open: its header and its entries. Every complaint names the file. Raises UserError."""
    from modelpool.scheduler.record.event_log import read_entries, read_header

    try:
        with path.open(encoding="ascii", newline="\n") as file:
            yield read_header(file.readline()), read_entries(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise CorruptFile(f"{path}: is no text, so no log of a pool") from None
    except UserError as problem:
        raise type(problem)(f"{path}: {problem}") from None


def _say_cut_off(console: Console, log: Path, entries: Entries) -> None:
    from modelpool.actors.cli.screen import say

    if entries.cut_off is not None:
        say(console, f"{log}:{entries.cut_off}: this last line is cut off, and left out", "yellow")


def _outcome_lines(log: Path, outcome: Replayed) -> Iterator[str]:
    if outcome.same:
        yield "every command is the one that was recorded"
    if outcome.failure is not None:
        yield f"{log}:{outcome.failure.line}: the scheduler failed after: {outcome.failure.cause}"
        yield from outcome.failure.traceback_text.splitlines()
    if outcome.difference is not None:
        yield from _difference_lines(log, outcome.difference)


def _difference_lines(log: Path, difference: Difference) -> Iterator[str]:
    yield f"{log}:{difference.line}: a different decision after: {difference.cause}"
    yield f"  recorded: {_command(difference.recorded)}"
    yield f"  made now: {_command(difference.made)}"
    yield from (f"  {line}" for line in difference.fields)
    yield "  what led there:" if difference.story else "  nothing is remembered of what led there"
    for line in difference.story:
        move = f"{line.before} -> {line.after}" if line.before else line.after
        yield f"    {line.at:.3f} s  {line.subject}  {move}  {line.cause}{'; ' if line.note else ''}{line.note}"


def _command(command: object) -> str:
    if command is None:
        return "nothing more"
    assert dataclasses.is_dataclass(command), f"{command!r} is no command"
    ids = [f"{field}={getattr(command, field)}" for field in _IDS if hasattr(command, field)]
    return f"{type(command).__name__}({', '.join(ids)})"


_IDS = ("worker_id", "incarnation", "task_id", "attempt", "job_id", "after_seconds")


def _value(item: object) -> object:
    assert isinstance(item, Enum), f"{item!r} is no plain value"
    return item.value
