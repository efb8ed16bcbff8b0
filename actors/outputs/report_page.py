"""Writes the figures of a batch report as one HTML page without any other file: images are small copies inside it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TypeAlias

from PIL import Image

from modelpool.actors.outputs.preview_image import first_image
from modelpool.actors.outputs.report_course import Course, course_of
from modelpool.actors.outputs.report_figures import PoolRecord, ReportFigures, ReportOutput, RunTotals
from modelpool.actors.outputs.report_plots import PLOT_STYLE, measured, plots
from modelpool.pool.values.core.errors import counted, format_bytes

#: outputs that are shown; the page says how many are left out
MOST_SHOWN = 400
#: lines of each list of problems and decisions
MOST_LINES = 200
_THUMBNAIL_PIXELS = 192
_JPEG_QUALITY = 82

LocalFile: TypeAlias = Callable[[str], AbstractContextManager[Path]]

_STYLE = """
:root { color-scheme: light dark; --ink: #202124; --faint: #5f6368; --paper: #fff; --line: #dadce0; --bar: #3a5a8c;
  --load: #c77d2e; --bad: #b3261e; --sunken: #f3f4f6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --faint: #9aa0a6; --paper: #18191b; --line: #3c4043; --bar: #8ab4f8; --load: #f0a850;
    --bad: #ff8a80; --sunken: #26282b; }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .5rem; overflow-wrap: anywhere; }
dl.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .8rem 1.2rem; }
dt, .faint { color: var(--faint); font-size: .85rem; } dd { margin: 0; font-size: 1.2rem; } .bad { color: var(--bad); }
.wide { overflow-x: auto; } .wide:focus-visible { outline: 2px solid var(--bar); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
dl.list { margin: 0; } dl.list div { padding: .35rem 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
dl.list dd { font-size: 1rem; }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(44%, 11rem), 1fr)); gap: 1rem; }
figure { margin: 0; } .sheet figure { content-visibility: auto; contain-intrinsic-size: auto 17rem; min-width: 0; }
.sheet img { width: 100%; height: 11rem; object-fit: contain; background: var(--sunken); border-radius: 4px; }
.sheet figcaption { font-size: .82rem; overflow-wrap: anywhere; } details { font-size: .82rem; color: var(--faint); }
.more { font-size: 1rem; } summary { cursor: pointer; padding: .3rem 0; }
details ul { padding-left: 1rem; margin: .2rem 0; overflow-wrap: anywhere; }
.bar { display: flex; height: .7rem; width: 14rem; }
.bar i { background: var(--bar); } .bar i.load { background: var(--load); }
"""
#: lines of a list that are shown before the reader asks for more
_OPEN_LINES = 5

_HEADINGS = ("runs", "hits", "seconds", "of them loads", "uploaded", "streamed", "LoRA switches")


def report_page(
    title: str,
    figures: ReportFigures,
    local_file: LocalFile,
    price_per_hour: float | None = None,
) -> str:
    """Return the page.

    local_file      of the place of the outputs (`OutputPlace.local_file`)
    price_per_hour  of a GPU; None shows no cost
    """
    outputs = [output for group in figures.groups.values() for output in group]
    course = course_of(outputs, figures.failed_at)
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            _summary(figures, price_per_hour),
            *_problems(figures, outputs),
            *_plots(figures, course, price_per_hour),
            *(_record(figures.record) if figures.record is not None else ()),
            *_timings(figures, price_per_hour),
            *_sheets(figures, local_file),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{PLOT_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _summary(figures: ReportFigures, price_per_hour: float | None) -> str:
    totals = figures.totals
    facts = [
        ("outputs", str(figures.outputs)),
        ("failed jobs", str(len(figures.all_failed))),
        ("models and LoRAs", str(len(figures.groups))),
        ("GPU time", f"{totals.seconds:.1f} s"),
        ("of it loads", _share(totals.load_seconds, totals.seconds)),
        ("runs with all weights resident", _share(totals.hits, totals.runs)),
        ("weights moved", format_bytes(totals.uploaded_bytes + totals.streamed_bytes)),
    ]
    if price_per_hour is not None:
        facts.append(("cost", f"{figures.cost(price_per_hour):.4g}"))
        if figures.outputs:
            facts.append(("cost of an output", f"{figures.cost(price_per_hour) / figures.outputs:.4g}"))
    is_bad = {"failed jobs"} if figures.all_failed else ()
    marks = (' class="bad"' if name in is_bad else "" for name, _ in facts)
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd{mark}>{escape(value)}</dd></div>"
        for mark, (name, value) in zip(marks, facts, strict=True)
    )
    return f'<dl class="figures">{cells}</dl>'


def _plots(figures: ReportFigures, course: Course | None, price_per_hour: float | None) -> Iterator[str]:
    """Yield the plots, and what they do not show."""
    by_stage: dict[str, RunTotals] = {}
    for (_, stage), totals in figures.by_stage.items():
        by_stage.setdefault(stage, RunTotals()).add_totals(totals)
    if course is None and not by_stage:
        return
    yield "<h2>Plots</h2>"
    if course is None:
        yield '<p class="faint">The folder does not say when its outputs were generated: no plots over time.</p>'
    else:
        yield f'<p class="faint">{escape(_course_words(course))}</p>'
    yield '<div class="plots">'
    yield from plots(course, by_stage, price_per_hour)
    yield "</div>"


def _course_words(course: Course) -> str:
    began = datetime.fromtimestamp(course.began_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    words = f"From {began} on, over {measured(course.seconds)}"
    if course.pauses:
        left_out = measured(sum(pause.seconds for pause in course.pauses))
        words += f"; {counted(len(course.pauses), 'pause')} of together {left_out} left out"
    if course.untimed:
        words += f"; without {counted(course.untimed, 'output')} of unknown time"
    return f"{words}."


def _sheets(figures: ReportFigures, local_file: LocalFile) -> Iterator[str]:
    yield "<h2>Outputs</h2>"
    shown = shown_of_groups([len(outputs) for outputs in figures.groups.values()], MOST_SHOWN)
    if figures.outputs > MOST_SHOWN:
        yield f'<p class="faint">{sum(shown)} of {figures.outputs} outputs: the first ones of each group.</p>'
    for count, (name, outputs) in zip(shown, figures.groups.items(), strict=True):
        if not count:
            continue
        of_all = f"{count} of {len(outputs)}" if count < len(outputs) else f"{count}"
        yield f'<h3>{escape(name)} <span class="faint">{of_all}</span></h3><div class="sheet">'
        yield from (_figure(output, local_file) for output in outputs[:count])
        yield "</div>"


def shown_of_groups(sizes: Sequence[int], most: int) -> list[int]:
    """Return how many of each group are shown, `most` in all: small groups whole, large ones equally many. Of more
    groups than `most`, the smallest show none."""
    found, left = [0] * len(sizes), most
    for waiting, place in enumerate(sorted(range(len(sizes)), key=lambda place: (sizes[place], -place))):
        share = left // (len(sizes) - waiting)
        found[place] = min(sizes[place], share)
        left -= found[place]
    return found


def _figure(output: ReportOutput, local_file: LocalFile) -> str:
    recipe = output.recipe
    picture = _thumbnail(output.file, local_file)
    label = escape(recipe.prompt or "(empty prompt)")
    shown = f'<img src="{picture}" alt="{label}" loading="lazy">' if picture else '<p class="faint">no preview</p>'
    lines = "".join(f"<li>{escape(line)}</li>" for line in _task_lines(output))
    why = f"<details><summary>why and how long</summary><ul>{lines}</ul></details>" if lines else ""
    facts = escape(f"seed {recipe.seed}, {counted(recipe.steps, 'step')}, {output.seconds:.2f} s")
    name = f"<b>{escape(output.labels.id)}</b><br>" if output.labels.id else ""
    caption = f'{name}{label}<br><span class="faint">{facts}<br>{escape(output.file)}</span>'
    return f"<figure>{shown}<figcaption>{caption}</figcaption>{why}</figure>"


def _task_lines(output: ReportOutput) -> Iterator[str]:
    if output.job_id:
        yield f"job {output.job_id}"
    if output.labels.line is not None:
        yield f"line {output.labels.line} of the job file"
    if output.labels.metadata is not None:
        yield f"metadata: {json.dumps(output.labels.metadata, ensure_ascii=False)}"
    for task in output.tasks:
        if task.shared:
            yield f"{task.stage}: shared with an earlier job"
            continue
        where = f"{task.worker} on {task.node}" if task.node else task.worker
        parts = [f"{task.stage}: {where}, {task.seconds:.2f} s, of them {task.load_seconds:.2f} s load"]
        parts += [task.why] if task.why else []
        parts += [f"divided: {task.divided}"] if task.divided else []
        parts += [f"resumed {task.resumed}"] if task.resumed else []
        yield "; ".join(parts)


def _thumbnail(file: str, local_file: LocalFile) -> str | None:
    """Return a small copy as a data URL; None if the file cannot be read."""
    try:
        with local_file(file) as path:
            image = first_image(path)
    except Exception:  # decoders raise arbitrary exceptions for damaged files, and a file may be gone by now
        return None
    if image.mode != "RGB":
        image = image.convert("RGB")
    image.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=_JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _timings(figures: ReportFigures, price_per_hour: float | None) -> Iterator[str]:
    longest = max((totals.seconds for totals in figures.by_stage.values()), default=0.0)
    yield "<h2>Timings and loads</h2>"
    rows = []
    for (name, stage), totals in sorted(figures.by_stage.items(), key=lambda item: -item[1].seconds):
        rows.append([escape(name), escape(stage), *_cells(totals), _bar(totals, longest)])
    if len(rows) > MOST_LINES:
        yield f'<p class="faint">The {MOST_LINES} longest of {len(rows)}.</p>'
    headings = ("model and LoRAs", "stage", *_HEADINGS, "")
    yield _table("Timings and loads", headings, rows[:MOST_LINES], right=range(2, 9))
    yield "<h3>Workers</h3>"
    cost = () if price_per_hour is None else ("cost",)
    rows = []
    for (worker, device), totals in figures.by_worker.items():
        row = [escape(worker or "unknown"), escape(device), *_cells(totals)]
        if price_per_hour is not None:
            row.append(f"{(totals.seconds + totals.fetch_seconds) / 3600 * price_per_hour:.4g}")
        rows.append(row)
    yield _table("Workers", ("worker", "device", *_HEADINGS, *cost), rows[:MOST_LINES], right=range(2, 10))


def _cells(totals: RunTotals) -> list[str]:
    return [
        str(totals.runs),
        _share(totals.hits, totals.runs),
        f"{totals.seconds:.2f}",
        f"{totals.load_seconds:.2f}",
        format_bytes(totals.uploaded_bytes),
        format_bytes(totals.streamed_bytes),
        str(totals.patch_switches),
    ]


def _bar(totals: RunTotals, longest: float) -> str:
    """Draw the seconds of loads and runs."""
    if longest <= 0.0:
        return ""
    load, rest = 100 * totals.load_seconds / longest, 100 * (totals.seconds - totals.load_seconds) / longest
    parts = f'<i class="load" style="width:{load:.2f}%"></i><i style="width:{max(0.0, rest):.2f}%"></i>'
    return f'<div class="bar">{parts}</div>'


def _problems(figures: ReportFigures, outputs: Sequence[ReportOutput]) -> Iterator[str]:
    tasks = [(output, task) for output in outputs for task in output.own_tasks]
    lost = [(f"{output.file}, {task.stage}", reason) for output, task in tasks for reason in task.lost]
    memory = [(f"{output.file}, {task.stage}", ", ".join(task.rungs)) for output, task in tasks if task.rungs]
    warnings = [(output.file, warning) for output in outputs for warning in output.recipe.warnings]
    failed = figures.all_failed
    yield "<h2>Failures</h2>"
    if not (failed or figures.damaged or lost or memory or warnings or figures.unreadable):
        yield "<p>None.</p>"
    yield from _list("Jobs that failed", failed)
    yield from _list("Files that are missing or damaged", figures.damaged)
    yield from _list("Runs that were lost, and repeated", lost)
    yield from _list("Runs that ran out of memory, and what was done", memory)
    yield from _list("Warnings", warnings)
    if figures.unreadable:
        having = counted(figures.unreadable, "entry has", "entries have")
        yield f"<p>{having} tasks that cannot be read; their figures are missing.</p>"


def _record(record: PoolRecord) -> Iterator[str]:
    yield "<h2>The pool</h2>"
    yield (
        f"<p>The event log covers {record.seconds:.1f} s: {counted(len(record.failed), 'job')} failed, "
        f"{record.cancelled} {'was' if record.cancelled == 1 else 'were'} cancelled, "
        f"{counted(len(record.losses), 'worker was', 'workers were')} lost.</p>"
    )
    yield from _list("Workers that were lost", record.losses)
    yield from _list("Decisions of autoscaling", [("", words) for words in record.scaling])


def _list(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if not rows:
        return
    yield f'<h3>{escape(title)} <span class="faint">{len(rows)}</span></h3>'
    yield _named_texts(rows[:_OPEN_LINES])
    more = rows[_OPEN_LINES:MOST_LINES]
    if more:
        yield f'<details class="more"><summary>{len(more)} more</summary>{_named_texts(more)}</details>'
    if len(rows) > MOST_LINES:
        yield f'<p class="faint">The first {MOST_LINES}.</p>'


def _named_texts(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in rows)
    return f'<dl class="list">{cells}</dl>'


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Build a table, which scrolls where it is too wide, also by keyboard; cells are HTML."""
    numbers = set(right)

    def cells(tag: str, row: Sequence[str]) -> str:
        marks = (' class="number"' if place in numbers else "" for place in range(len(row)))
        return "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    head = f"<thead><tr>{cells('th', headings)}</tr></thead>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    label = escape(title, quote=True)
    table = f"<table>{head}<tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0" role="region" aria-label="{label}">{table}</div>'


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"
