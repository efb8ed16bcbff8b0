"""`modelpool replay` and `modelpool trace`: replay a recorded event log, or convert it to a workload.

Knows files; `scheduler.simulator.record.event_log` knows their content. Starts nothing.
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

from modelpool.actors.cli.terminal import options
from modelpool.pool.values.core.errors import CorruptFile, UserError, counted

if TYPE_CHECKING:
    from rich.console import Console

    from modelpool.scheduler.simulator.record.event_log import LogEntries, LogGap, LogHeader
    from modelpool.scheduler.simulator.record.replay import ReplayDifference, Replayed

EXIT_DIFFERENT = 1
Log = Annotated[
    Path, typer.Argument(metavar="LOG", help="A file written by `modelpool up --record LOG`.", show_default=False)
]


def replay(
    log: Log,
    check: Annotated[
        bool, typer.Option("--check", help="Check all invariants of the scheduler after each event.", metavar=" ")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Replay a recorded event log and compare each command. Exits with 1 at the first difference. A log that lacks
    events, because the disk was full, is replayed up to the first gap.
    """
    from modelpool.actors.cli.terminal.screen import print_json, say, user_console
    from modelpool.scheduler.simulator.record.replay import replay as decide_again

    began = time.monotonic()
    with opened_log(log) as (header, entries):
        outcome = decide_again(header, entries.up_to_gap(), check)
    wall_seconds = time.monotonic() - began
    if as_json:
        plain = json.dumps(dataclasses.asdict(outcome), default=_value)
        gap = None if entries.gap is None else dataclasses.asdict(entries.gap)
        print_json(sys.stdout, {**json.loads(plain), "same": outcome.same, "cut_off": entries.cut_off, "gap": gap})
    else:
        console = user_console(sys.stdout)
        rate = f", replayed in {wall_seconds:.2f} s" if wall_seconds > 0 else ""
        ends = ", log truncated" if entries.cut_off is not None else ""
        events, commands = counted(outcome.events, "event"), counted(outcome.commands, "command")
        summary = f"{events} in {outcome.seconds:.1f} s{ends}, {commands}{rate}"
        say(console, summary)
        _print_truncation(console, log, entries)
        if entries.gap is not None:
            say(console, f"{_gap_words(log, entries.gap)}: replayed up to here", "yellow")
        for line in _outcome_lines(log, outcome):
            say(console, line)
    if not outcome.same:
        raise typer.Exit(EXIT_DIFFERENT)


def trace(
    log: Log,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The trace to write.", show_default=False)],
) -> None:
    """Convert a recorded event log to a workload for `modelpool simulate`: its jobs with arrival times and measured
    run times.
    """
    from modelpool.actors.cli.simulate.simulate_workload import require_replaceable, save_trace
    from modelpool.actors.cli.terminal.screen import counted, say, user_console
    from modelpool.scheduler.simulator.record.log_trace import live_trace

    require_replaceable("OUT", out)
    with opened_log(log) as (_, entries):
        live = live_trace(entries, log.stem)
    workload = live.workload
    if not workload.jobs:
        raise UserError(f"{log}: no jobs that can be simulated")
    save_trace("OUT", out, workload)
    console = user_console(sys.stdout)
    _print_truncation(console, log, entries)
    if entries.gap is not None:
        missing = "without jobs, and without run times, of these"
        if entries.lost > entries.gap.lost:
            missing = f"{counted(entries.lost, 'event')} lost in all; {missing}"
        say(console, f"{_gap_words(log, entries.gap)}: {missing}", "yellow")
    say(console, f"{out}: {counted(len(workload.jobs), 'job')} over {workload.seconds:.1f} s")
    say(console, f"run times from {counted(live.measured, 'successful run')}")
    if live.cancelled:
        say(console, f"{counted(live.cancelled, 'job')} of these had been cancelled")
    if live.refused:
        say(console, f"{counted(live.refused, 'job')} skipped: rejected by the scheduler")


@contextlib.contextmanager
def opened_log(path: Path) -> Iterator[tuple[LogHeader, LogEntries]]:
    """Open a log and read its header; errors name the file. Raises UserError."""
    from modelpool.scheduler.simulator.record.event_log import read_entries, read_header

    try:
        with path.open(encoding="ascii", newline="\n") as file:
            yield read_header(file.readline()), read_entries(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise CorruptFile(f"{path}: not a text file, so not an event log") from None
    except UserError as problem:
        raise type(problem)(f"{path}: {problem}") from None


def _print_truncation(console: Console, log: Path, entries: LogEntries) -> None:
    from modelpool.actors.cli.terminal.screen import say

    if entries.cut_off is not None:
        say(console, f"{log}:{entries.cut_off}: the last line is truncated and ignored", "yellow")


def _gap_words(log: Path, gap: LogGap) -> str:
    return f"{log}:{gap.line}: the log lacks {counted(gap.lost, 'event')} ({gap.reason})"


def _outcome_lines(log: Path, outcome: Replayed) -> Iterator[str]:
    if outcome.same:
        yield "all commands are identical to the recorded ones"
    if outcome.failure is not None:
        yield f"{log}:{outcome.failure.line}: the scheduler failed after: {outcome.failure.cause}"
        yield from outcome.failure.traceback_text.splitlines()
    if outcome.difference is not None:
        yield from _difference_lines(log, outcome.difference)


def _difference_lines(log: Path, difference: ReplayDifference) -> Iterator[str]:
    yield f"{log}:{difference.line}: different decision after: {difference.cause}"
    yield f"  recorded: {_command(difference.recorded)}"
    yield f"  replayed: {_command(difference.made)}"
    yield from (f"  {line}" for line in difference.fields)
    yield "  event log of the task:" if difference.story else "  no event log of the task is available"
    for line in difference.story:
        move = f"{line.before} -> {line.after}" if line.before else line.after
        yield f"    {line.at:.3f} s  {line.subject}  {move}  {line.cause}{'; ' if line.note else ''}{line.note}"


def _command(command: object) -> str:
    if command is None:
        return "nothing more"
    assert dataclasses.is_dataclass(command), f"{command!r} is not a command"
    ids = [f"{field}={getattr(command, field)}" for field in _IDS if hasattr(command, field)]
    return f"{type(command).__name__}({', '.join(ids)})"


_IDS = ("worker_id", "incarnation", "task_id", "attempt", "job_id", "after_seconds")


def _value(item: object) -> object:
    assert isinstance(item, Enum), f"{item!r} is not a plain value"
    return item.value
