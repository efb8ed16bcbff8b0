"""Plots of simulations: the timeline of each GPU, and a comparison of policies. Needs no display.

Knows values and matplotlib, which is imported when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelpool.actors.cli.terminal.plots import LINE_COLOURS, new_figure, save_figure, without_frame
from modelpool.pool.values.core.errors import counted
from modelpool.scheduler.simulator.comparison import MEASURES, Measure, spreads
from modelpool.scheduler.simulator.metrics import Figures
from modelpool.scheduler.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from modelpool.pool.values.specs.spec import WorkerId

#: of models; further models share the last one
OTHER_COLOUR, LOADING_COLOUR, OURS_COLOUR, PEER_COLOUR = "#bdbdbd", "#222222", "#0072b2", "#a8b8c4"
#: GPU names that are readable next to each other
MOST_NAMES = 40
OURS = "modelpool"
#: policies with a timeline each; of more, only the first gets one
MOST_TIMELINES = 3


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy of a comparison: figures of each seed, and the latencies of the first seed in ascending order.

    `is_ideal` marks policies that no real pool can implement.
    """

    figures: Sequence[Figures]
    latencies: Sequence[float]
    is_ideal: bool = False


def draw_timeline(path: Path, title: str, drawn: Timeline, gpus: Sequence[WorkerId]) -> None:
    """Draw one row per GPU, coloured by model, loading in black; below it the sums, and the waiting jobs.

    Raises OutputFailed if the file cannot be written.
    """
    height = min(max(0.16 * len(gpus), 1.4), 14.0)
    figure = new_figure(13.0, height + 3.6)
    rows, sums = figure.subplots(2, 1, sharex=True, height_ratios=(height, 1.7))
    scale, unit = _time_unit(drawn.seconds)
    colours = dict(zip(drawn.models, LINE_COLOURS, strict=False))
    _draw_rows(rows, drawn, gpus, colours, scale)
    _draw_sums(sums, drawn, scale)
    rows.set_title(title, loc="left", fontsize=11)
    sums.set_xlabel(f"time, {unit}")
    sums.set_xlim(0, drawn.seconds / scale or 1)
    handles, labels = _model_legend(colours, len(drawn.models))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False, fontsize=9)
    save_figure(figure, path)


def draw_comparison(path: Path, title: str, policies: Mapping[str, Compared]) -> None:
    """Draw the latencies of all jobs under each policy, and bars of the measures that policies are compared by.

    Raises OutputFailed if the file cannot be written.
    """
    figure = new_figure(14.0, max(5.0, 2.2 + 0.62 * len(policies)))
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1.0, 1.15))[0]
    _draw_latencies(left.subplots(), policies)
    shown = {measure.name: measure for measure in MEASURES}
    panels = [
        (shown["jobs/min"], 1.0, "jobs per minute"),
        (shown["p99"], 1.0, "p99 latency, seconds"),
        (shown["loading"], *_time_lost(policies)),
        (shown["moved"], *_bytes_moved(policies)),
    ]
    axes = right.subplots(2, 2, sharey=True)
    for place, (measure, scale, label) in enumerate(panels):
        _draw_bars(axes.flat[place], measure, scale, label, policies)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    save_figure(figure, path)


def _time_lost(policies: Mapping[str, Compared]) -> tuple[float, str]:
    """Return the divisor of the seconds lost to loading, and the axis label."""
    most = max((one.loading_seconds for compared in policies.values() for one in compared.figures), default=0.0)
    scale, unit = _time_unit(most)
    return scale, f"GPU-{unit} lost to loading"


def _bytes_moved(policies: Mapping[str, Compared]) -> tuple[float, str]:
    most = max(
        (one.uploaded_bytes + one.streamed_bytes for compared in policies.values() for one in compared.figures),
        default=0,
    )
    scale, unit = (1e12, "TB") if most >= 1e12 else (1e9, "GB")
    return scale, f"weights moved to GPUs, {unit}"


def _draw_rows(axes: Axes, drawn: Timeline, gpus: Sequence[WorkerId], colours: Mapping[str, str], scale: float) -> None:
    places = {gpu: row for row, gpu in enumerate(gpus)}
    spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for work in drawn.works:
        colour = LOADING_COLOUR if work.model is None else colours.get(work.model, OTHER_COLOUR)
        width = (work.end - work.begin) / scale
        spans.setdefault((places[work.worker_id], colour), []).append((work.begin / scale, width))
    for (row, colour), of_row in spans.items():
        axes.broken_barh(of_row, (row - 0.42, 0.84), facecolors=colour, linewidth=0)
    axes.set_ylim(len(gpus) - 0.4, -0.6)
    step = -(-len(gpus) // MOST_NAMES)
    axes.set_yticks(range(0, len(gpus), step), list(gpus)[::step], fontsize=8 if len(gpus) > 16 else 9)
    axes.tick_params(axis="y", length=0)
    without_frame(axes)


def _draw_sums(axes: Axes, drawn: Timeline, scale: float) -> None:
    from matplotlib.ticker import MaxNLocator

    ends = [0.0, *(step.end / scale for step in drawn.steps)]
    running = [step.running for step in drawn.steps]
    both = [step.running + step.loading for step in drawn.steps]
    axes.stairs(both, ends, fill=True, color=LOADING_COLOUR, label="loading")
    axes.stairs(running, ends, fill=True, color="#7fb07f", label="running")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("of all GPUs")
    without_frame(axes)
    twin = axes.twinx()
    twin.stairs([step.unfinished for step in drawn.steps], ends, color="#d55e00", linewidth=1.5, baseline=None)
    twin.set_ylim(bottom=0)
    twin.yaxis.set_major_locator(MaxNLocator(integer=True))
    twin.set_ylabel("unfinished jobs", color="#d55e00")
    twin.tick_params(axis="y", colors="#d55e00")
    without_frame(twin)


def _model_legend(colours: Mapping[str, str], models: int) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    entries = dict(colours)
    if models > len(colours):
        entries[counted(models - len(colours), "more model")] = OTHER_COLOUR
    entries |= {"loading": LOADING_COLOUR, "running (below)": "#7fb07f"}
    return [Patch(facecolor=colour) for colour in entries.values()], list(entries)


def _draw_latencies(axes: Axes, policies: Mapping[str, Compared]) -> None:
    peers = [name for name, one in policies.items() if name != OURS and not one.is_ideal]
    styles = dict(zip(peers, _styles(), strict=False))
    ideals = [name for name, one in policies.items() if one.is_ideal]
    styles |= dict(zip(ideals, [("#555555", "--"), ("#555555", ":"), ("#999999", "-.")], strict=False))
    for name, one in policies.items():
        count = len(one.latencies)
        if count == 0:
            continue
        colour, dashes = (OURS_COLOUR, "-") if name == OURS else styles[name]
        seen = [max(seconds, 1e-3) for seconds in one.latencies]
        axes.step(
            [seen[0], *seen],
            [place / count for place in range(count + 1)],
            where="post",
            label=f"{name} (ideal)" if one.is_ideal else name,
            color=colour,
            linestyle=dashes,
            linewidth=2.6 if name == OURS else 1.3,
            zorder=3 if name == OURS else 2,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(_some_minor_ticks)
    axes.set_xlabel("seconds from submission to image (first seed)")
    axes.set_ylabel("of all jobs")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(0, 1.01)
    axes.grid(visible=True, which="major", color="#e6e6e6")
    axes.set_axisbelow(True)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    without_frame(axes)


def _some_minor_ticks(value: float, _: float) -> str:
    """Label 2, 3 and 5 between powers of ten; more would not fit."""
    return f"{value:g}" if f"{value:.0e}"[0] in "235" else ""


def _styles() -> Iterable[tuple[str, str]]:
    """Yield a colour and a line style for each policy other than ours."""
    colours = [colour for colour in LINE_COLOURS if colour not in (OURS_COLOUR, "#f0e442")]
    return [(colour, dashes) for dashes in ("-", "--", ":") for colour in colours]


def _draw_bars(axes: Axes, measure: Measure, scale: float, label: str, policies: Mapping[str, Compared]) -> None:
    """Draw one bar per policy: ours in its own colour, ideal ones hollow."""
    from matplotlib.ticker import MaxNLocator

    found = spreads(measure, {name: one.figures for name, one in policies.items()})
    names = list(found)
    values = [one.median / scale for one in found.values()]
    below = [(one.median - one.least) / scale for one in found.values()]
    above = [(one.most - one.median) / scale for one in found.values()]
    edges = [OURS_COLOUR if name == OURS else PEER_COLOUR for name in names]
    fills = ["#ffffff" if policies[name].is_ideal else edge for name, edge in zip(names, edges, strict=True)]
    axes.barh(range(len(names)), values, color=fills, edgecolor=edges, height=0.72)
    if any([*below, *above]):
        axes.errorbar(
            values, range(len(names)), xerr=[below, above], fmt="none", ecolor="#444444", elinewidth=1, capsize=2
        )
    for place, (value, more) in enumerate(zip(values, above, strict=True)):
        axes.annotate(
            f"{value:.3g}", (value + more, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, max([v + m for v, m in zip(values, above, strict=True)], default=0.0) * 1.18 or 1.0)
    better = "more" if measure.more_is_better else "less"
    axes.set_title(f"{label} ({better} is better)", fontsize=9, loc="left")
    axes.tick_params(axis="x", labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    without_frame(axes)


def _time_unit(seconds: float) -> tuple[float, str]:
    """Return the divisor for seconds, and the name of the unit."""
    if seconds > 3 * 3600:
        return 3600.0, "hours"
    return (60.0, "minutes") if seconds > 300 else (1.0, "seconds")
