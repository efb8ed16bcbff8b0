"""`modelpool up`, `status` and `down`: manage a pool that outlives one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.option_groups import Without, with_option_groups
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import session_of
from modelpool.pool.values.core.errors import UserError, format_bytes

if TYPE_CHECKING:
    from modelpool.actors.control.status_values import PoolStatus

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Name, or host:port (default: the latest pool).", show_default=False),
]


@with_option_groups
def up(
    detach: Annotated[bool, typer.Option("--detach", help="Keep it running in the background.", metavar=" ")] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the pool (default: modelpool).", metavar="N", show_default=False),
    ] = None,
    *,
    where: Annotated[PoolOptions, Without.of("allow_pickle", "pool")],
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            help="Record the event log in a file, for replay.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start a pool and keep it running until Ctrl-C, SIGTERM or `modelpool down`. Other commands use it
    with --pool NAME.
    """
    from modelpool.actors.cli.terminal.open_pool import settings_for
    from modelpool.actors.cli.terminal.screen import say, user_console

    console = user_console()
    settings = settings_for(where).override(name=name, record=record)
    if changes := settings.describe(changes_only=True).strip():
        say(console, changes, "dim")
    called = settings.cluster.name
    from modelpool.actors.cli.cluster import daemon

    if detach:
        running = daemon.start_in_background(settings)
        say(console, f"pool {called!r} is running: process {running.pid}, Ray at {running.address}", "bold")
        say(console, f"log: {running.log}")
        _say_what_next(called)
    else:
        daemon.serve_forever(settings, lambda: _say_what_next(called))
        say(console, f"pool {called!r} has ended")


def status(context: typer.Context, name: Name = None, as_json: options.AsJson = False) -> None:
    """Show the state of a running pool."""
    from modelpool.actors.cli.terminal.screen import print_json, show, user_console
    from modelpool.actors.cli.terminal.status_socket import plain_status
    from modelpool.actors.cli.terminal.tables import facts_table, status_table

    session, called = session_of(context), name or name_of_running()
    now = session.ask_status(called)
    if now is None:
        with session.open_pool(PoolOptions(pool=called)) as pool:
            now = pool.status()
    if as_json:
        print_json(sys.stdout, plain_status(now))
        return
    console = user_console(sys.stdout)
    show(console, status_table(now))
    show(console, facts_table(status_facts(now)))


def down(name: Name = None) -> None:
    """Stop the pool that `modelpool up` started. Running tasks end, or stop at a step if they would take longer than
    [cluster] drain_seconds; nothing new starts.
    """
    from modelpool.actors.cli.cluster.daemon import stop_running_pool
    from modelpool.actors.cli.terminal.screen import say, user_console

    ended = stop_running_pool(name)
    if ended is None:
        raise UserError(_none_runs(name))
    say(user_console(), f"pool {ended.name!r} has ended")


def status_facts(status: PoolStatus) -> list[tuple[str, str]]:
    """Return the figures of a pool that belong to no worker."""
    from modelpool.actors.cli.terminal.screen import duration
    from modelpool.actors.cli.terminal.tables import qos_facts, worker_facts

    waiting = ", ".join(f"{count} {stage}" for stage, count in status.waiting.items() if count)
    resident = f"{status.tasks_resident} of {status.tasks_total} had all weights resident"
    moved = f"{format_bytes(status.uploaded_bytes)} uploaded, {format_bytes(status.streamed_bytes)} streamed"
    facts = [
        ("jobs", ", ".join(f"{count} {outcome}" for outcome, count in status.jobs.items())),
        ("waiting", waiting or "nothing"),
        ("tasks", resident if status.tasks_total else "none yet"),
        ("weights", f"{moved}, {status.patch_switches} LoRA switches"),
        ("worker restarts", str(status.restarts)),
    ]
    facts += [("pinned", f"{pinned.model} {pinned.words}") for pinned in status.pins]
    facts += qos_facts(status)
    if status.controller_restarts:
        times = "once" if status.controller_restarts == 1 else f"{status.controller_restarts} times"
        since = f"{f'on {status.controller}, ' if status.controller else ''}restarted {times}"
        facts.append(("controller", f"{since}, the last time {duration(status.seconds)} ago"))
    elif status.controller:
        facts.append(("controller", f"on {status.controller}"))
    return facts + worker_facts(status)


def name_of_running() -> str:
    """Return the name of the latest pool on this machine. Raises UserError if none runs."""
    from modelpool.actors.ray.run_file import running_pool

    running = running_pool()
    if running is None:
        raise UserError(_none_runs(None))
    return running.name


def _say_what_next(called: str) -> None:
    from modelpool.actors.cli.terminal.screen import say, user_console

    say(user_console(), f"Use it:  modelpool generate --pool {called} ...   Inspect it:  modelpool status {called}")
    say(user_console(), f"Stop it:  modelpool down {called}")


def _none_runs(name: str | None) -> str:
    called = f" called {name!r}" if name else ""
    return f"no pool{called} is running on this machine; start one with `modelpool up`"
