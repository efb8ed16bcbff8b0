"""Timeline of one simulation, as spans and steps for drawing. Pure.

Spans too short to be visible are joined to their neighbours: a long simulation costs no more to draw than a short one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.simulator.cluster import Core, VirtualCluster
from modelpool.scheduler.simulator.records import SimulatedRun

#: maximum gap, as a fraction of the total, between successive spans of one kind that are drawn as one
GAP = 1 / 2500


@dataclass(frozen=True, slots=True)
class TimelineWork:
    """Time of one GPU with one model, or loading if `model` is None."""

    worker_id: WorkerId
    model: str | None
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """The activity of all GPUs in a slice of time, as fractions, and the unfinished jobs at its end."""

    end: float
    running: float
    loading: float
    unfinished: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times count from the first submission. `models` are in order of GPU-seconds, most first."""

    seconds: float
    works: tuple[TimelineWork, ...]
    steps: tuple[TimelineStep, ...]
    models: tuple[str, ...]


def timeline(cluster: VirtualCluster[Core], slices: int = 200) -> Timeline:
    """Return the timeline of a finished cluster."""
    begin = min((one.at for one in cluster.submitted.values()), default=0.0)
    runs = sorted(cluster.runs, key=lambda run: run.started_at)
    resolved = [cluster.submitted[job].at + seconds for job, seconds in cluster.latency_seconds.items()]
    seconds = max([*(run.ended_at for run in runs), *resolved], default=begin) - begin
    busy: defaultdict[str, float] = defaultdict(float)
    for run in runs:
        busy[run.model] += run.run_seconds
    spans = [span for run in runs for span in _spans(run, begin)]
    return Timeline(
        seconds=seconds,
        works=_joined(spans, seconds * GAP),
        steps=_steps(cluster, spans, resolved, begin, seconds, slices),
        models=tuple(sorted(busy, key=lambda name: (-busy[name], name))),
    )


def _spans(run: SimulatedRun, begin: float) -> tuple[TimelineWork, TimelineWork]:
    """A run as loading and running. The mates of a batch cover the same time."""
    started, loaded, ended = run.started_at - begin, run.loaded_at - begin, run.ended_at - begin
    return TimelineWork(run.worker_id, None, started, loaded), TimelineWork(run.worker_id, run.model, loaded, ended)


def _joined(spans: Iterable[TimelineWork], gap: float) -> tuple[TimelineWork, ...]:
    """Join spans of one GPU and kind that follow each other closely."""
    found: list[TimelineWork] = []
    last: dict[tuple[WorkerId, str | None], int] = {}
    for span in spans:
        if span.end <= span.begin:
            continue
        key = (span.worker_id, span.model)
        place = last.get(key)
        if place is not None and span.begin - found[place].end <= gap:
            before = found[place]
            found[place] = TimelineWork(span.worker_id, span.model, before.begin, max(before.end, span.end))
        else:
            last[key] = len(found)
            found.append(span)
    return tuple(found)


def _steps(
    cluster: VirtualCluster[Core],
    spans: Sequence[TimelineWork],
    resolved: Sequence[float],
    begin: float,
    seconds: float,
    slices: int,
) -> tuple[TimelineStep, ...]:
    width = seconds / slices
    if width <= 0:
        return ()
    running, loading = [0.0] * slices, [0.0] * slices
    drawn: dict[WorkerId, float] = {}
    for span in spans:
        # mates of a batch overlap: time that was counted for this GPU is not counted again
        at, end = max(span.begin, drawn.get(span.worker_id, 0.0)), span.end
        drawn[span.worker_id] = max(end, drawn.get(span.worker_id, 0.0))
        sums = loading if span.model is None else running
        for place in range(min(int(at / width), slices - 1), slices):
            until = end if place == slices - 1 else min(end, (place + 1) * width)
            sums[place] += max(until - at, 0.0)
            at = max(until, at)
            if at >= end:
                break
    jobs = [0] * slices
    for one in cluster.submitted.values():
        jobs[min(int((one.at - begin) / width), slices - 1)] += 1
    for moment in resolved:
        jobs[min(int((moment - begin) / width), slices - 1)] -= 1
    steps, unfinished = [], 0
    whole = width * len(cluster.gpus)
    for place in range(slices):
        unfinished += jobs[place]
        steps.append(TimelineStep((place + 1) * width, running[place] / whole, loading[place] / whole, unfinished))
    return tuple(steps)
