"""The figures that a first visit to a GPU is for, and in which measurements each is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.measurements import Measurement


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    title    what it tells
    begins   beginnings of the names of its measurements, each of which has to be there
    """

    title: str
    begins: tuple[str, ...]


FIGURES = (
    Figure("Link by number of fill threads and NUMA node", ("link with", "link from NUMA node")),
    Figure("Context and workspaces", ("context of a process", "workspaces of one stream")),
    Figure("Planned against real peak by stage", ("peak reserved memory",)),
    Figure("Seconds until the memory of a killed process is free", ("memory of a killed process",)),
    Figure("Step and launch", ("sampling one step", "launching one step")),
    Figure("Attention by kernel and shape", ("attention,",)),
    Figure("Half resident against resident", ("sampling with half of the weights resident",)),
    Figure("LoRA switch", ("switch to",)),
    Figure("Overlapped decode", ("images per second, decodes overlapping sampling",)),
    Figure("Captures", ("captures",)),
    Figure("8-bit floats against 16-bit ones", ('images per second, products = "auto"',)),
    Figure("Rounds of soak", ("jobs", "growth of memory")),
    Figure("Pinned pages of a file", ("copy from pages of a file",)),
    Figure("Host memory of 1, 2 and 4 workers", ("host memory of the weights",)),
    Figure("Cost of asking for free memory", ("asking for free memory",)),
)


def figures_table(rows: Sequence[Measurement]) -> str:
    """Return a Markdown table of the figures, with what was measured or why it was not."""
    lines = ["| figure | measured |", "|--|--|"]
    for figure in FIGURES:
        found = [row for row in rows if row.name.startswith(figure.begins)]
        said = "; ".join(_said(row) for row in found) or "not measured in this run"
        lines.append(f"| {figure.title} | {said} |".replace("\n", " "))
    return "\n".join(lines) + "\n"


def missing_figures(rows: Sequence[Measurement]) -> list[str]:
    """Return the beginnings of names of which there is no measurement, and no reason for it."""
    names = [row.name for row in rows]
    begins = [begin for figure in FIGURES for begin in figure.begins]
    return [begin for begin in begins if not any(name.startswith(begin) for name in names)]


def _said(row: Measurement) -> str:
    value = "" if row.value is None else f"{row.value:.4g} {row.unit}".rstrip()
    return f"{row.part}, {row.name}: {value or row.note}".replace("|", "/")
