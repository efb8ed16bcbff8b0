"""Plots of a command: as text that fits the terminal, and as files. Knows values; the command knows what they mean.

matplotlib is imported when a file is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from modelpool.pool.values.core.errors import OutputFailed, unusable_field

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

#: colours that are distinguishable, also with colour blindness
LINE_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6bb1", "#66a61e", "#a6761d",
)  # fmt: skip
DOTS_PER_INCH = 130
ENDINGS = (".png", ".pdf", ".svg")
#: the value of --plot without a file
IN_TERMINAL = "-"
#: endings of files that --plot takes for its own, if only to refuse them: other words are the next argument
_FILE_ENDINGS = (*ENDINGS, ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".eps", ".ps", ".html", ".txt")
#: marks of the lines of a text plot, and of their highlighted points
_MARKS, _HIGHLIGHTS = "oxv*sdznuw", "OXV#SDZNUW"
#: rows and columns of a text plot's area
_ROWS, _LEAST_COLUMNS, _MOST_COLUMNS = 14, 20, 100
_PLAIN_COLUMNS = 80
_FIGURE_INCHES = (9.0, 4.2)


@dataclass(frozen=True, slots=True)
class PlotLine:
    """Points of one kind, by ascending x; `highlight` is the x of the point to look at."""

    name: str
    points: tuple[tuple[float, float], ...]
    highlight: float | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """A value of y, or of x, that is of interest in itself."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot. `x_words` and `y_words` write a value for people; the values of x may be whole numbers, or bytes."""

    title: str
    x_label: str
    lines: tuple[PlotLine, ...]
    x_words: Callable[[float], str]
    y_words: Callable[[float], str]
    y_limits: tuple[Limit, ...] = ()
    x_limits: tuple[Limit, ...] = ()
    is_whole: bool = False
    is_bytes: bool = False

    @property
    def most(self) -> tuple[float, float]:
        """The largest x and y that are shown."""
        xs = [x for line in self.lines for x, _ in line.points] + [limit.value for limit in self.x_limits]
        ys = [y for line in self.lines for _, y in line.points]
        # a limit far above all points would press them to the ground
        ys += [limit.value for limit in self.y_limits if limit.value <= 2 * max(ys)]
        return max(xs, default=0.0) or 1.0, max(ys, default=0.0) or 1.0

    @property
    def least_x(self) -> float:
        """The smallest x that is shown."""
        return min((x for line in self.lines for x, _ in line.points), default=0.0)


class PlotCommand(TyperCommand):
    """A command with `--plot [FILE]`: without a file, the plot is text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, in which a --plot without a file gets IN_TERMINAL as its value."""
        return super().parse_args(ctx, with_plot_value(args))


def with_plot_value(words: Sequence[str]) -> list[str]:
    """Return the words of a command in which each --plot has a value: the next word if it ends as the name of a file
    does, else IN_TERMINAL."""
    found: list[str] = []
    for place, word in enumerate(words):
        if word == "--":
            return [*found, *words[place:]]
        found.append(word)
        if word == "--plot":
            after = words[place + 1] if place + 1 < len(words) else ""
            if after != IN_TERMINAL and Path(after).suffix.lower() not in _FILE_ENDINGS:
                found[-1] = f"--plot={IN_TERMINAL}"
    return found


def plot_file(value: str | None, as_json: bool = False) -> Path | None:
    """Return the file of --plot; None without one. Raises UserError if no plot can be written there, or text on a
    stdout that is JSON; call it before anything takes time."""
    if value is None:
        return None
    if value == IN_TERMINAL:
        if as_json:
            raise unusable_field("--plot", "no file", "a file with --json, which takes the output for itself")
        return None
    path = Path(value)
    require_drawable(path)
    return path


def require_drawable(path: Path) -> None:
    """Raise UserError if no plot can be written; called before anything is simulated."""
    if path.suffix.lower() not in ENDINGS:
        raise unusable_field("--plot", str(path), f"a file that ends in {', '.join(ENDINGS)}")
    if path.is_dir():
        raise unusable_field("--plot", str(path), "a file; this is a folder")
    if not path.absolute().parent.is_dir():
        raise unusable_field("--plot", str(path), "a file in an existing folder")


def time_words(seconds: float) -> str:
    """Format a value of an axis of seconds: '0.0421 s', '42.1 s', '3:07'."""
    from modelpool.actors.cli.terminal.screen import duration

    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def show_plots(console: Console, title: str, plots: Sequence[Plot], file: Path | None) -> None:
    """Draw plots to a file and say so, or print them as wide as the console; without a terminal, in 80 columns."""
    from modelpool.actors.cli.terminal.screen import say

    drawable = [plot for plot in plots if any(line.points for line in plot.lines)]
    if not drawable:
        say(console, "nothing to plot")
    elif file is not None:
        draw_plots(file, title, drawable)
        say(console, f"wrote {file}")
    else:
        columns = console.width if console.is_terminal else _PLAIN_COLUMNS
        for plot in drawable:
            console.print()
            console.print(text_plot(plot, columns), soft_wrap=True)


# ---- text -----------------------------------------------------------------------------------------------------------


def text_plot(plot: Plot, columns: int) -> str:
    """Draw a plot with ASCII characters in lines of up to `columns`; "" without points."""
    if not any(line.points for line in plot.lines):
        return ""
    most_x, most_y = plot.most
    labels = [plot.y_words(most_y * share) for share in (1.0, 0.5, 0.0)]
    margin = max(map(len, labels))
    width = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, columns - margin - 3))
    area = _Area(plot.least_x, most_x, most_y, width)
    for limit in plot.y_limits:
        if limit.value <= most_y:
            area.draw_row(limit.value)
    for limit in plot.x_limits:
        area.draw_column(limit.value)
    for place, line in enumerate(plot.lines):
        area.draw_line(line, _MARKS[place % len(_MARKS)], _HIGHLIGHTS[place % len(_HIGHLIGHTS)])
    beside = {0: labels[0], _ROWS // 2: labels[1], _ROWS - 1: labels[2]}
    drawn = [f"{beside.get(row, ''):>{margin}} |{text}" for row, text in enumerate(area.rows())]
    drawn.append(f"{'':>{margin}} +{'-' * width}")
    drawn.append(f"{'':>{margin}}  {_below(plot, width)}")
    return "\n".join(line.rstrip() for line in [plot.title, *drawn, *_legend(plot, columns)])


class _Area:
    """The characters between the axes of a text plot."""

    def __init__(self, least_x: float, most_x: float, most_y: float, width: int) -> None:
        self._least_x, self._most_x, self._most_y, self._width = least_x, most_x, most_y, width
        self._cells = [[" "] * width for _ in range(_ROWS)]

    def rows(self) -> list[str]:
        return ["".join(cells) for cells in self._cells]

    def draw_row(self, y: float) -> None:
        row = self._row(y)
        for column in range(0, self._width, 2):
            self._cells[row][column] = "-"

    def draw_column(self, x: float) -> None:
        column = self._column(x)
        for row in range(_ROWS):
            self._cells[row][column] = ":"

    def draw_line(self, line: PlotLine, mark: str, highlight: str) -> None:
        """Draw dots between points, then the points; the highlighted one is seen among equal places."""
        for (x, y), (next_x, next_y) in zip(line.points, line.points[1:], strict=False):
            first, last = self._column(x), self._column(next_x)
            for column in range(first + 1, last):
                share = (column - first) / (last - first)
                self._set(column, self._row(y + (next_y - y) * share), ".", " -:")
        for x, y in line.points:
            self._set(self._column(x), self._row(y), mark, " -:.")
        for x, y in line.points:
            if x == line.highlight:
                self._cells[self._row(y)][self._column(x)] = highlight

    def _set(self, column: int, row: int, mark: str, over: str) -> None:
        if self._cells[row][column] in over:
            self._cells[row][column] = mark

    def _column(self, x: float) -> int:
        span = self._most_x - self._least_x
        share = (x - self._least_x) / span if span else 0.0
        return min(self._width - 1, max(0, round(share * (self._width - 1))))

    def _row(self, y: float) -> int:
        return min(_ROWS - 1, max(0, _ROWS - 1 - round(y / self._most_y * (_ROWS - 1))))


def _below(plot: Plot, width: int) -> str:
    """Write the ends of the x axis and its name."""
    first, last = plot.x_words(plot.least_x), plot.x_words(plot.most[0])
    between = width - len(first) - len(last)
    name = plot.x_label if len(plot.x_label) + 2 <= between else ""
    return first + (name.center(between) if name else " " * max(1, between)) + last


def _legend(plot: Plot, columns: int) -> list[str]:
    from modelpool.actors.cli.terminal.screen import visible

    entries = []
    for place, line in enumerate(plot.lines):
        mark, highlight = _MARKS[place % len(_MARKS)], _HIGHLIGHTS[place % len(_HIGHLIGHTS)]
        chosen = "" if line.highlight is None else f" ({highlight}: {plot.x_words(line.highlight)})"
        entries.append(f"{mark} {visible(line.name, kept='')}{chosen}")
    entries += [f"- {limit.name} {plot.y_words(limit.value)}" for limit in plot.y_limits]
    entries += [f": {limit.name} {plot.x_words(limit.value)}" for limit in plot.x_limits]
    lines = [""]
    for entry in entries:
        joined = f"{lines[-1]}   {entry}" if lines[-1] else f"  {entry}"
        if lines[-1] and len(joined) > columns:
            lines.append(f"  {entry}"[: max(columns, _LEAST_COLUMNS)])
        else:
            lines[-1] = joined[: max(columns, _LEAST_COLUMNS)]
    return lines


# ---- files ----------------------------------------------------------------------------------------------------------


def draw_plots(path: Path, title: str, plots: Sequence[Plot]) -> None:
    """Draw plots one below the other. Raises OutputFailed if the file cannot be written."""
    width, height = _FIGURE_INCHES
    figure = new_figure(width, height * len(plots))
    for axes, plot in zip(figure.subplots(len(plots), 1, squeeze=False)[:, 0], plots, strict=True):
        _draw(axes, plot)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    save_figure(figure, path)


def _draw(axes: Axes, plot: Plot) -> None:
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    for place, line in enumerate(plot.lines):
        colour = LINE_COLOURS[place % len(LINE_COLOURS)]
        xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
        axes.plot(xs, ys, color=colour, marker="o", markersize=4, linewidth=1.6, label=line.name)
        for x, y in line.points:
            if x == line.highlight:
                label = f"{line.name}: {plot.x_words(x)}"
                axes.plot([x], [y], color=colour, marker="o", markersize=11, fillstyle="none", label=label)
    most_x, most_y = plot.most
    for place, limit in enumerate([*plot.y_limits, *plot.x_limits]):
        is_of_y = place < len(plot.y_limits)
        draw = axes.axhline if is_of_y else axes.axvline
        words = plot.y_words if is_of_y else plot.x_words
        if limit.value <= (most_y if is_of_y else most_x):
            style = ("--", ":", "-.")[place % 3]
            draw(limit.value, color="#555555", linestyle=style, linewidth=1, label=f"{limit.name} {words(limit.value)}")
    axes.set_ylim(bottom=0)
    span = most_x - plot.least_x
    if plot.is_bytes and span:  # round numbers of bytes are powers of two
        axes.xaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(span / 6))))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=plot.is_whole))
    axes.xaxis.set_major_formatter(lambda value, _: plot.x_words(value))
    axes.yaxis.set_major_formatter(lambda value, _: plot.y_words(value))
    axes.set_title(plot.title, loc="left", fontsize=10)
    axes.set_xlabel(plot.x_label)
    axes.grid(visible=True, color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    without_frame(axes)


def new_figure(width: float, height: float) -> Figure:
    """Return a figure on the canvas for files, without pyplot, which needs displays and keeps figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure. Raises OutputFailed."""
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise OutputFailed(f"--plot: {path} cannot be written: {error.strerror}") from None


def without_frame(axes: Axes) -> None:
    """Remove the frame except the lower side."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
