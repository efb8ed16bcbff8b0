"""Shows the progress of a submission: bars on a terminal, one line per image elsewhere.

Knows how to draw a `Progress`, not how to get one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, Self

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from modelpool.actors.cli.terminal.screen import duration, say

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rich.console import Console, RenderableType

    from modelpool.actors.outputs.results.progress import Progress

_BAR_CELLS = 22
#: interval of lines about the check of the requests
CHECKED_SECONDS = 2.0
_MOST_RUNNING = 16


class View(Protocol):
    """Shows one submission while entered. `update` may be called from another thread than the rest. Its `checked` says
    how far the check of the requests is; "" once it is complete.
    """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, progress: Progress, checked: str = "") -> None: ...
    def image(self, text: str) -> None: ...
    def failure(self, text: str) -> None: ...
    def notice(self, text: str) -> None: ...


def view_for(console: Console) -> View:
    """Return bars if the console can draw them, else lines."""
    return BarsView(console) if console.is_terminal and not console.is_dumb_terminal else LinesView(console)


class BarsView:
    """One bar for the submission and one for each running job. Finished images only move the bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        # drawn by `update` only: drawing from two threads makes a terminal flicker
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, progress: Progress, checked: str = "") -> None:
        """Draw `progress` now."""
        rows = min(_MOST_RUNNING, max(1, self._console.height - 4))
        self._live.update(bars(progress, time.monotonic() - self._started, rows, checked), refresh=True)

    def image(self, text: str) -> None:
        """Do nothing: the bar has moved."""

    def failure(self, text: str) -> None:
        """Print a permanent line above the bars."""
        say(self._console, text, "red")

    def notice(self, text: str) -> None:
        """Print a permanent line above the bars."""
        say(self._console, text, "yellow")


class LinesView:
    """Prints one line for each image and each failure, and at most every `CHECKED_SECONDS`, how far the check of the
    requests is, if that has changed.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._ended = 0
        self._total = 0
        self._checked, self._checked_at = "", clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: Progress, checked: str = "") -> None:
        """Keep the number of jobs for later lines."""
        self._total = progress.total
        if checked and checked != self._checked and self._clock() - self._checked_at >= CHECKED_SECONDS:
            self._checked, self._checked_at = checked, self._clock()
            self.notice(checked)

    def image(self, text: str) -> None:
        """Print one line."""
        self._count(text)

    def failure(self, text: str) -> None:
        """Print one line."""
        self._count(text)

    def notice(self, text: str) -> None:
        """Print one line."""
        say(self._console, text)

    def _count(self, text: str) -> None:
        self._ended += 1
        total = max(self._total, self._ended)
        say(self._console, f"[{self._ended:>{len(str(total))}}/{total}] {text}")


def bars(
    progress: Progress, elapsed_seconds: float, most_running: int = _MOST_RUNNING, checked: str = ""
) -> RenderableType:
    """Draw `progress`: the submission first, with how far the check of its requests is, then the running jobs by
    worker.
    """
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(width=_BAR_CELLS)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True, ratio=1)  # the rest of the line: prompts are truncated first
    grid.add_row(
        Text("images", style="bold"),
        "",
        _bar(progress.ended, progress.total),
        f"{progress.ended}/{progress.total}",
        Text(", ".join((*_remarks(progress, elapsed_seconds), *filter(None, [checked]))), overflow="ellipsis"),
    )
    shown = sorted(progress.running, key=lambda job: (job.worker, job.index))[:most_running]
    for job in shown:
        grid.add_row(
            Text(str(job.worker), style="cyan"),
            job.stage.value,
            _bar(job.step, job.steps),
            f"{job.step}/{job.steps}" if job.steps else "",
            Text(job.prompt.replace("\n", " "), overflow="ellipsis", style="dim"),
        )
    if len(shown) < len(progress.running):
        grid.add_row("", "", f"and {len(progress.running) - len(shown)} more running")
    return grid


def _remarks(progress: Progress, elapsed_seconds: float) -> list[str]:
    remarks = [duration(elapsed_seconds)]
    if 0 < progress.done < progress.total:
        remarks.append(f"{duration(elapsed_seconds / progress.ended * (progress.total - progress.ended))} left")
    if progress.failed:
        remarks.append(f"{progress.failed} failed")
    if progress.cancelled:
        remarks.append(f"{progress.cancelled} cancelled")
    return remarks


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, width=_BAR_CELLS)
