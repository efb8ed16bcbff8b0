"""Draws the plots of a batch report as SVG in its page: throughput, GPU use and cost over time, seconds by stage.

Colours are the variables of the page's style, so that plots follow its theme. Each plot says in words what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from modelpool.actors.outputs.report_course import Course, Pause
from modelpool.actors.outputs.report_figures import SECONDS_PER_HOUR, RunTotals

#: of a plot in its own units, which are pixels on a phone
WIDTH, HEIGHT = 340, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 10, 10, 24
#: stages with a bar each: further ones share the last
MOST_STAGES = 8
#: pauses that are marked
MOST_PAUSES = 24
_ROW_PIXELS, _BAR_PIXELS = 34, 13
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
#: steps of an axis of times, in seconds
_TIME_STEPS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30),
    *(60, 120, 300, 600, 1200, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400),
)

PLOT_STYLE = """
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.2rem 2rem; }
.plot figcaption { font-size: .95rem; font-weight: 600; } .plot figcaption .faint { display: block; font-weight: 400; }
.plot svg { display: block; width: 100%; max-width: 34rem; height: auto; margin-top: .3rem; }
.plot text { fill: var(--faint); font-size: 11px; font-variant-numeric: tabular-nums; } .plot .end { text-anchor: end; }
.plot .middle { text-anchor: middle; } .plot .name { fill: var(--ink); }
.plot .grid { stroke: var(--line); } .plot .pause { stroke: var(--faint); stroke-dasharray: 3 3; }
.plot .run { fill: var(--bar); } .plot .load { fill: var(--load); } .plot .failed { fill: var(--bad); }
.plot .area { fill: var(--bar); fill-opacity: .25; } .plot .line { fill: none; stroke: var(--bar); stroke-width: 2; }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; background: var(--bar); }
.key.load { background: var(--load); } .key.failed { background: var(--bad); }
"""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The area of a plot over time: the most of both axes, in their units."""

    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * value / self.most_x

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * min(1.0, value / self.most_y)


def plots(course: Course | None, by_stage: Mapping[str, RunTotals], price_per_hour: float | None) -> Iterator[str]:
    """Yield the plots as elements: those over time without `course`, and the cost without a price, are left out."""
    if course is not None:
        yield _throughput(course)
        yield _use(course)
    if by_stage:
        yield _stages(by_stage)
    if course is not None and price_per_hour is not None:
        yield _cost(course, price_per_hour)


def _throughput(course: Course) -> str:
    minutes, per = (1 / 60.0, "minute") if course.seconds < 2 * SECONDS_PER_HOUR else (1 / SECONDS_PER_HOUR, "hour")
    rates = [count / (course.part_seconds * minutes) for count in course.ended]
    failed = [count / (course.part_seconds * minutes) for count in course.failed]
    mean = sum(course.ended) / (course.seconds * minutes)
    frame = _Frame(course.seconds, _nice_top(max(map(sum, zip(rates, failed, strict=True)))))
    bars = []
    for place, (rate, lost) in enumerate(zip(rates, failed, strict=True)):
        begin, end = frame.x(place * course.part_seconds), frame.x((place + 1) * course.part_seconds)
        if rate:
            bars.append(_rect("run", begin, end, frame.y(rate), frame.y(0)))
        if lost:
            bars.append(_rect("failed", begin, end, frame.y(rate + lost), frame.y(rate)))
    words = f"{_number(mean)} outputs a {per} on average, at most {_number(max(rates))}"
    key = ""
    if any(course.failed):
        words += f"; {sum(course.failed)} failed"
        key = '<span class="key failed"></span> failed'
    return _plot("Throughput", words, [*_axes(frame, course, _number), *bars, *_pauses(frame, course.pauses)], key)


def _use(course: Course) -> str:
    frame = _Frame(course.seconds, 1.0)
    mean = sum(course.use) / len(course.use)
    workers = f"{course.workers} workers" if course.workers != 1 else "1 worker"
    words = f"{mean:.0%} of the time of {workers} on average"
    shape = _steps(frame, course.use, course.part_seconds)
    drawn = [*_axes(frame, course, lambda value: f"{value:.0%}"), *shape, *_pauses(frame, course.pauses)]
    return _plot("GPU use", words, drawn)


def _cost(course: Course, price_per_hour: float) -> str:
    spent, sums = 0.0, []
    for seconds in course.paid_seconds:
        spent += seconds / SECONDS_PER_HOUR * price_per_hour
        sums.append(spent)
    frame = _Frame(course.seconds, _nice_top(spent))
    points = [(0.0, 0.0), *(((place + 1) * course.part_seconds, value) for place, value in enumerate(sums))]
    drawn = [*_axes(frame, course, _number), *_curve(frame, points), *_pauses(frame, course.pauses)]
    words = f"{_number(spent)} for the GPU time of its runs and fetches, at {price_per_hour:g} an hour"
    return _plot("Cost", words, drawn)


def _stages(by_stage: Mapping[str, RunTotals]) -> str:
    rows = sorted(by_stage.items(), key=lambda item: -item[1].seconds)
    if len(rows) > MOST_STAGES:
        rest = RunTotals()
        for _, totals in rows[MOST_STAGES - 1 :]:
            rest.seconds += totals.seconds
            rest.load_seconds += totals.load_seconds
        rows = [*rows[: MOST_STAGES - 1], (f"{len(rows) - MOST_STAGES + 1} more", rest)]
    longest = max(totals.seconds for _, totals in rows) or 1.0
    whole = sum(totals.seconds for _, totals in rows) or 1.0
    height = _ROW_PIXELS * len(rows) + 4
    drawn = []
    for place, (name, totals) in enumerate(rows):
        top = place * _ROW_PIXELS
        load = WIDTH * min(totals.load_seconds, totals.seconds) / longest
        drawn.append(_text(0, top + 12, name, "name"))
        drawn.append(_text(WIDTH, top + 12, f"{measured(totals.seconds)}, {totals.seconds / whole:.0%}", "end"))
        drawn.append(_rect("load", 0, load, top + 17, top + 17 + _BAR_PIXELS))
        drawn.append(_rect("run", load, WIDTH * totals.seconds / longest, top + 17, top + 17 + _BAR_PIXELS))
    each = ", ".join(f"{name} {measured(totals.seconds)}" for name, totals in rows)
    key = '<span class="key load"></span> loads <span class="key"></span> runs'
    return _plot("Seconds by stage", each, drawn, key, height)


def _plot(title: str, words: str, drawn: Sequence[str], key: str = "", height: int = HEIGHT) -> str:
    label = escape(f"{title}: {words}", quote=True)
    caption = f'{escape(title)}<span class="faint">{escape(words)} {key}</span>'
    return (
        f'<figure class="plot"><figcaption>{caption}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(drawn)}</svg></figure>'
    )


def _axes(frame: _Frame, course: Course, words: Callable[[float], str]) -> Iterator[str]:
    for value in (0.0, frame.most_y / 2, frame.most_y):
        y = frame.y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 5, y + 4, words(value), "end")
    step = next((step for step in _TIME_STEPS if course.seconds / step <= 5), None)
    if step is None:
        step = math.ceil(course.seconds / 5 / 86400.0) * 86400.0
    divisor, unit = next(((d, u) for d, u in _UNITS if step >= d), _UNITS[-1])
    for number in range(int(course.seconds / step) + 1):
        x = frame.x(number * step)
        edge = "middle" if x < WIDTH - 30 else "end"
        label = f"{number * step / divisor:g} {unit}" if number else "0"
        yield _text(min(x, WIDTH), HEIGHT - 8, label, edge)


def _steps(frame: _Frame, values: Sequence[float], part_seconds: float) -> Iterator[str]:
    points = []
    for place, value in enumerate(values):
        points += [(place * part_seconds, value), ((place + 1) * part_seconds, value)]
    return _curve(frame, points)


def _curve(frame: _Frame, points: Sequence[tuple[float, float]]) -> Iterator[str]:
    line = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    first, last, base = frame.x(points[0][0]), frame.x(points[-1][0]), frame.y(0)
    yield f'<polygon class="area" points="{first:.1f},{base:.1f} {line} {last:.1f},{base:.1f}"/>'
    yield f'<polyline class="line" points="{line}"/>'


def _pauses(frame: _Frame, pauses: Sequence[Pause]) -> Iterator[str]:
    for pause in pauses[:MOST_PAUSES]:
        x = frame.x(pause.at_seconds)
        title = escape(f"a pause of {measured(pause.seconds)} is left out here")
        edges = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"'
        yield f'<line class="pause" {edges}><title>{title}</title></line>'


def _rect(name: str, begin: float, end: float, top: float, bottom: float) -> str:
    gap = 0.5 if end - begin > 3 else 0.0
    size = f'width="{max(0.0, end - begin - gap):.1f}" height="{max(0.0, bottom - top):.1f}"'
    return f'<rect class="{name}" x="{begin:.1f}" y="{top:.1f}" {size}/>'


def _text(x: float, y: float, text: str, name: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _nice_top(value: float) -> float:
    """Return the least of 1, 2, 3, 4, 6, 8 and 10 times a power of ten that is not below `value`; 1 for 0."""
    if value <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 3, 4, 6, 8, 10) if factor * power >= value * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def measured(seconds: float) -> str:
    """Return a time with three digits, in its unit."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    divisor, unit = next((d, u) for d, u in _UNITS if seconds >= 2 * d)
    return f"{seconds / divisor:.3g} {unit}"
