"""`modelpool top`: shows a running pool live until q or Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.cluster.serve import Name, name_of_running
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import session_of
from modelpool.pool.values.core.errors import unusable_field

if TYPE_CHECKING:
    from modelpool.actors.cli.terminal.command_ports import Pool
    from modelpool.actors.control.status import PoolStatus

#: rates are averages over this time
RATE_SECONDS = 10.0
LEAST_SECONDS = 0.1
MOST_SECONDS = 3600.0


def top(
    context: typer.Context,
    name: Name = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.", metavar=" ")] = False,
    every: Annotated[float, typer.Option("--every", help="Refresh interval in seconds.", metavar="SECONDS")] = 1.0,
) -> None:
    """Show the GPUs, resident weights, queues and rates of a running pool, live. q or Ctrl-C exits; the pool keeps
    running.
    """
    from modelpool.actors.cli.terminal.screen import show, user_console

    if not LEAST_SECONDS <= every <= MOST_SECONDS:
        raise unusable_field("--every", every, f"a number of seconds from {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    console = user_console(sys.stdout)
    with session_of(context).open_pool(PoolOptions(pool=name or name_of_running())) as pool:
        if once or not console.is_terminal:
            from modelpool.actors.cli.cluster.top_view import frame

            show(console, frame(pool.status()))
            return
        with contextlib.suppress(KeyboardInterrupt), _keys():
            _draw(pool, every)


def _draw(pool: Pool, every: float) -> None:
    from rich.live import Live

    from modelpool.actors.cli.cluster.top_view import frame
    from modelpool.actors.cli.terminal.screen import user_console

    seen: deque[PoolStatus] = deque()
    with Live(console=user_console(sys.stdout), screen=True, auto_refresh=False) as live:
        while True:
            now = pool.status()
            while seen and seen[0].seconds < now.seconds - RATE_SECONDS:
                seen.popleft()
            live.update(frame(now, seen[0] if seen else None), refresh=True)
            seen.append(now)
            if _quit_requested(every):
                return


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Read keys at once and without echo, if there is a keyboard."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quit_requested(seconds: float) -> bool:
    """Wait for a q, for `seconds` at most; without a keyboard, just wait."""
    keyboards = [sys.stdin] if sys.stdin.isatty() else []
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select(keyboards, [], [], left)
        if ready and set(os.read(sys.stdin.fileno(), 64) or b"q") & set(b"qQ"):
            return True
    return False
