"""`FittedTable`: a table that fits the width of its console by giving up unimportant columns first.

Rich shortens the widest columns, and so the important ones, down to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class FittedColumn:
    """A column.

    cells         one for each row
    gives_way     place in the order in which columns are shortened, then left out; 0 for one that always stays whole
    least_cells   width to which it is shortened
    stays         whether it is never left out
    wraps         whether what does not fit continues on the next line; else it ends in an ellipsis
    redrawn       draws the cells in a width; None: `cells` are shortened
    """

    heading: str
    cells: Sequence[Text]
    gives_way: int = 0
    least_cells: int = 1
    stays: bool = False
    wraps: bool = False
    right: bool = False
    redrawn: Callable[[int], Sequence[Text]] | None = None

    @property
    def natural_cells(self) -> int:
        """The width in which nothing is shortened."""
        return max([len(self.heading), *(cell.cell_len for cell in self.cells)])


def fitted_widths(columns: Sequence[FittedColumn], gap_cells: int, width_cells: int) -> list[int]:
    """Return the width of each column in a table of `width_cells`; 0 for one that is left out."""
    widths = [column.natural_cells for column in columns]
    order = sorted((place for place, each in enumerate(columns) if each.gives_way), key=lambda n: columns[n].gives_way)

    def excess_cells() -> int:
        kept = [width for width in widths if width]
        return sum(kept) + gap_cells * (len(kept) - 1) - width_cells

    def shorten(stays: bool) -> None:
        for place in order:
            if columns[place].stays == stays and (over := excess_cells()) > 0:
                least = min(widths[place], columns[place].least_cells)
                widths[place] = max(least, widths[place] - over)

    shorten(stays=False)
    for place in order:
        if excess_cells() > 0 and not columns[place].stays:
            widths[place] = 0
    shorten(stays=True)
    for place in reversed(order):  # leaving out a column may make more room than was missing
        if widths[place] and (over := excess_cells()) < 0:
            widths[place] = min(columns[place].natural_cells, widths[place] - over)
    return widths


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table of these columns. `has_rule`: a line below the headings."""

    columns: Sequence[FittedColumn]
    has_rule: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it."""
        gap = 3 if self.has_rule else 2
        widths = fitted_widths(self.columns, gap, options.max_width)
        shown = [(column, width) for column, width in zip(self.columns, widths, strict=True) if width]
        if self.has_rule:
            table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
        else:
            table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        for column, width in shown:
            table.add_column(
                column.heading,
                justify="right" if column.right else "left",
                # a column that stays is wrapped where even the others were not enough
                no_wrap=not column.wraps and not column.stays,
                overflow="fold" if column.wraps or column.stays else "ellipsis",
                width=width if column.gives_way else None,
                min_width=None if column.gives_way else width,
            )
        drawn = [column.redrawn(width) if column.redrawn else column.cells for column, width in shown]
        for row in zip(*drawn, strict=True):
            table.add_row(*row)
        yield table
