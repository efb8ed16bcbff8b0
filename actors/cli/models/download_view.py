"""The progress of a download: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from modelpool.actors.cli.terminal.screen import duration, say
from modelpool.pool.files.fetch.hub_download import DownloadPlan, OnBytes
from modelpool.pool.values.core.errors import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

#: between two lines where there is no terminal
LINE_SECONDS = 10.0


@contextlib.contextmanager
def download_view(console: Console, plan: DownloadPlan) -> Iterator[OnBytes]:
    """Show the progress of `plan`; yields the function that is called with the bytes which arrive, also by several
    threads."""
    if not plan.left_bytes:
        yield lambda count: None
    elif not console.is_terminal or console.is_dumb_terminal:
        yield Lines(console, plan.size_bytes, plan.size_bytes - plan.left_bytes).arrived
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
            done_bytes = plan.size_bytes - plan.left_bytes
            task = bar.add_task(plan.folder.name, total=plan.size_bytes, completed=done_bytes)
            yield lambda count: bar.advance(task, count)


class Lines:
    """Prints how far a download is, every LINE_SECONDS. Call it from one thread at a time."""

    def __init__(self, console: Console, size_bytes: int, done_bytes: int) -> None:
        self._console = console
        self._size_bytes = size_bytes
        self._done_bytes = self._begun_bytes = done_bytes
        self._began = self._printed = time.monotonic()

    def arrived(self, count: int) -> None:
        """Count bytes that arrived."""
        self._done_bytes += count
        now = time.monotonic()
        if now - self._printed < LINE_SECONDS:
            return
        self._printed = now
        speed = (self._done_bytes - self._begun_bytes) / (now - self._began)
        left = duration((self._size_bytes - self._done_bytes) / speed)
        done, size = format_bytes(self._done_bytes), format_bytes(self._size_bytes)
        say(self._console, f"fetched {done} of {size}, {format_bytes(round(speed))}/s, about {left} left")
