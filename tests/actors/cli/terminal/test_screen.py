"""What a terminal shows: bars that give way in the right order, figures in words, tables that add up."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from modelpool.actors.cli.run.progress_view import BarsView, LinesView, bars, view_for
from modelpool.actors.cli.terminal.screen import counted, duration, say, show, spinner, user_console
from modelpool.actors.cli.terminal.tables import facts_table, rows_table, summary_table
from modelpool.actors.outputs.results.outcomes import Summary
from modelpool.actors.outputs.results.progress import Progress, RunningJob
from modelpool.pool.values.specs.spec import JobId, Stage, WorkerId
from tests.actors.cli.fakes import task

LONG = "a prompt that goes on and on and would push everything else off the line if it could"


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def running(count: int, prompt: str = LONG) -> tuple[RunningJob, ...]:
    return tuple(RunningJob(JobId(f"j{i}"), i, prompt, WorkerId(f"gpu-{i}"), Stage.SAMPLE, i, 20) for i in range(count))


def shown(progress: Progress, width: int, most_running: int = 16) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(bars(progress, 75.0, most_running))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_long_prompt_never_hides_workers_stages_or_counts(width: int) -> None:
    lines = shown(Progress(200, 30, 2, 0, running(3)), width)
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("images")
    assert "32/200" in lines[0]
    for i, line in enumerate(lines[1:]):
        assert line.startswith(f"gpu-{i}")
        assert "sample" in line
        assert f"{i}/20" in line


def test_the_first_line_tells_time_what_is_left_and_what_went_wrong() -> None:
    assert "1:15, 3:45 left, 1 failed, 4 cancelled" in shown(Progress(40, 5, 1, 4), 120)[0]
    assert "to go" not in shown(Progress(40, 0, 0, 0), 120)[0], "nothing is known before the first image"


def test_more_jobs_than_lines_are_counted() -> None:
    lines = shown(Progress(40, 0, 0, 0, running(9)), 100, most_running=4)
    assert len(lines) == 6
    assert "and 5 more running" in lines[-1]


def test_bars_are_drawn_on_terminals_only() -> None:
    terminal = Console(file=Terminal(), force_terminal=True, width=100, _environ={"TERM": "xterm"})
    assert isinstance(view_for(terminal), BarsView)
    assert isinstance(view_for(user_console(io.StringIO())), LinesView)
    dumb = Console(file=Terminal(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(view_for(dumb), LinesView)


def test_bars_leave_the_terminal_as_they_found_it() -> None:
    """Failures stay above the bars, the bars go, the cursor comes back."""
    stream = Terminal()
    console = Console(file=stream, force_terminal=True, width=100, height=20, _environ={"TERM": "xterm"})
    with BarsView(console) as view:
        drawing = threading.Thread(target=view.update, args=(Progress(4, 1, 1, 0, running(2)),))
        drawing.start()
        drawing.join()
        view.failure("failed: one")
        view.image("never shown")
    text = stream.getvalue()
    assert "failed: one" in text
    assert "never shown" not in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0, "the cursor was hidden, and is back"


def test_lines_count_up_to_the_number_of_jobs() -> None:
    stream = io.StringIO()
    with LinesView(user_console(stream)) as view:
        view.update(Progress(10, 0, 0, 0))
        view.image("one")
        view.failure("two [not markup] :smile:")
    assert stream.getvalue() == "[ 1/10] one\n[ 2/10] two [not markup] :smile:\n"


def test_the_summary_adds_up() -> None:
    tasks = (task("gpu-0", True), task("gpu-0", False), task("gpu-1", False))
    stream = io.StringIO()
    Console(file=stream, width=120).print(summary_table(Summary(3, 3, 0, 0, 9.0, tasks)))
    rows = [line.split() for line in stream.getvalue().splitlines()]
    assert rows[2] == ["gpu-0", "2", "1", "(50%)", "1", "3.0", "s", "4.0", "MiB", "0", "B", "1"]
    assert rows[3] == ["gpu-1", "1", "0", "(0%)", "1", "1.5", "s", "4.0", "MiB", "0", "B", "1"]
    assert rows[-1] == ["total", "3", "1", "(33%)", "2", "4.5", "s", "8.0", "MiB", "0", "B", "2"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (59.94, "59.9 s"), (60, "1:00"), (3599.6, "1:00:00"), (7509, "2:05:09")]
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_counts_in_words() -> None:
    assert [counted(n, "image") for n in (0, 1, 2)] == ["0 images", "1 image", "2 images"]


def test_brackets_are_shown_literally_in_lines_tables_and_spinners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich takes "[cluster]" for a style, and so hid the sections of files in messages."""
    text = "[cluster] drain_seconds of a[b].jsonl [/]"
    monkeypatch.setenv("TERM", "xterm")

    shown = {}
    for name, show_text in {
        "say": lambda console: say(console, text),
        "plain print": lambda console: console.print(text),
        "facts": lambda console: show(console, facts_table([("name", text)])),
        "rows": lambda console: show(console, rows_table([text], [[text]])),
        "spinner": lambda console: _spin(console, text),
    }.items():
        stream = Terminal()
        show_text(user_console(stream))
        shown[name] = text in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert all(shown.values()), shown


def _spin(console: Console, text: str) -> None:
    with spinner(console, "before") as change:
        change(text)
