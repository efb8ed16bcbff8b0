"""The figures that a first visit to a GPU is for, in which measurements each is found, and what it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gpu.measurements import SKIPPED, Measurement

#: characters of the reason why one measurement is missing
_REASON_LENGTH = 100


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    title    what it tells
    begins   beginnings of the names of its measurements, each of which has to be there
    parts    the parts that measure it, by the first word of their names
    target   what it should be, in words; "" if it is only to be known
    """

    title: str
    begins: tuple[str, ...]
    parts: tuple[str, ...]
    target: str = ""


FIGURES = (
    Figure(
        "Link by number of fill threads and NUMA node",
        ("link with", "link from NUMA node"),
        ("device",),
        "the loader at least 0.85 of the link",
    ),
    Figure("Context and workspaces", ("context of a process", "workspaces of one stream"), ("device",),
           "workspaces never above what plans leave out"),
    Figure("Planned against real peak by stage", ("peak reserved memory",), ("sampling", "overlap"),
           "never above the plan"),
    Figure("Seconds until the memory of a killed process is free", ("memory of a killed process",), ("device",)),
    Figure("Step and launch", ("sampling one step", "launching one step", "engine relative to diffusers eager"),
           ("sampling",), "at most 1.0 of diffusers eager"),
    Figure("Attention by kernel and shape", ("attention,",), ("attention",)),
    Figure("Half resident against resident", ("sampling with half of the weights resident",), ("more",),
           "at most 1.1 of resident"),
    Figure("LoRA switch", ("switch to",), ("sampling",), "under one step"),
    Figure("Overlapped decode", ("images per second, decodes overlapping sampling",), ("overlap",), "never slower"),
    Figure("Captures", ("captures",), ("captures", "more"), "at least one, without a refusal"),
    Figure("8-bit floats against 16-bit ones", ('images per second, products = "auto"',), ("sampling",),
           "never slower"),
    Figure("Rounds of soak", ("jobs", "growth of"), ("soak",), "no job fails, growth of at most 8 MiB"),
    Figure("Pinned pages of a file", ("copy from pages of a file",), ("transfers",)),
    Figure("Host memory of 1, 2 and 4 workers", ("host memory of the weights",), ("memory",),
           "at most 1.05 of the file"),
    Figure("Cost of asking for free memory", ("asking for free memory",), ("device",)),
)  # fmt: skip

#: of compiled blocks, and of a machine with several GPUs
OTHER_FIGURES = (
    Figure(
        "Compiled step",
        ("engine compiled relative to diffusers compiled",),
        ("compiled",),
        "at most 1.02 of diffusers compiled",
    ),
    Figure("Forming a gang", ("forming a gang of",), ("gangs",), "at most what the scheduler assumes"),
    Figure("Exchange between GPUs, and copies", ("exchange between", "copy from GPU"), ("gangs",)),
    Figure("Memory of communicators", ("memory of communicators",), ("gangs",), "never above what plans leave out"),
    Figure("A step on 2, 4 and 8 GPUs", ("step of flux_dev on", "step of wan_t2v on"), ("gangs",)),
    Figure("Guidance on two GPUs", ("guidance on two GPUs",), ("gangs",), "the latent of one GPU"),
)


def figures_table(
    rows: Sequence[Measurement], command_of: Mapping[str, str] | None = None, ran: Sequence[str] = ()
) -> str:
    """Return a Markdown table of the figures, with what was measured or why it was not. `command_of` has the command of
    each part, `ran` are the parts that ran."""
    lines = ["| figure | target | met | measured |", "|--|--|--|--|"]
    for figure in (*FIGURES, *OTHER_FIGURES):
        found = [row for row in rows if row.name.startswith(figure.begins)]
        said = [_said(row) for row in found if row.value is not None]
        said += [f"not measured: {why}" for why in _why_missing(figure, rows, command_of or {}, ran)]
        cells = figure.title, figure.target, _met(found), "; ".join(said)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |".replace("\n", " "))
    return "\n".join(lines) + "\n"


def missing_figures(rows: Sequence[Measurement]) -> list[str]:
    """Return the beginnings of names of which there is no measurement, and no reason for it."""
    names = [row.name for row in rows]
    begins = [begin for figure in (*FIGURES, *OTHER_FIGURES) for begin in figure.begins]
    return [begin for begin in begins if not any(name.startswith(begin) for name in names)]


def _why_missing(
    figure: Figure, rows: Sequence[Measurement], command_of: Mapping[str, str], ran: Sequence[str]
) -> list[str]:
    """The reasons why measurements of a figure are missing, each once; none if all of them have values."""
    reasons: dict[str, None] = {}
    own = [row for row in rows if row.part.partition(" ")[0] in figure.parts]
    for begin in figure.begins:
        found = [row for row in rows if row.name.startswith(begin)]
        for row in found:
            if row.value is None:
                reasons[f"{row.name}: {row.note.removeprefix(SKIPPED)[:_REASON_LENGTH]}"] = None
        if found:
            continue
        whole = [row for row in own if row.name == "the whole part"]
        for row in whole:
            reasons[f"{row.part}: {row.note.removeprefix(SKIPPED)[:_REASON_LENGTH]}"] = None
        if not whole and any(part.partition(" ")[0] in figure.parts for part in ran):
            failed = [row for row in own if row.value is None and row.is_met is False]
            late = [row for row in own if row.note.startswith(f"{SKIPPED}out of time")]
            why = [f"{row.name}: {row.note[:_REASON_LENGTH]}" for row in (*failed, *late)]
            reasons["; ".join(why) or f"{begin}: no measurement has this name"] = None
        elif not whole:
            commands = dict.fromkeys(
                command for part, command in command_of.items() if part.partition(" ")[0] in figure.parts
            )
            reasons[f"part of command {' and '.join(commands) or 'another'}"] = None
    return list(reasons)


def _met(rows: Sequence[Measurement]) -> str:
    judged = [row.is_met for row in rows if row.is_met is not None]
    return "" if not judged else "yes" if all(judged) else "NO"


def _said(row: Measurement) -> str:
    against = "" if row.baseline is None else f" ({row.baseline:.4g})"
    return f"{row.part}, {row.name}: {row.value:.4g}{against} {row.unit}".rstrip()
