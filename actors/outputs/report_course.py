"""`course_of`: a batch over time, in a bounded number of equal parts, from the times of its tasks and failures. Pure.

The time between two runs of the batch, in which nothing of it ran, is left out and named (`Pause`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelpool.actors.outputs.report_figures import ReportOutput, ReportTask

#: parts of the time that a plot shows, and outputs of a part on average: fewer would show chance
MOST_PARTS, LEAST_PARTS, OUTPUTS_OF_PART = 48, 8, 3
#: shortest part: less would show rounding
LEAST_PART_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Pause:
    """Time that is left out: `seconds` long, at a place of the time that is shown."""

    at_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Course:
    """A batch over time, in equal parts.

    began_at       seconds since the epoch
    part_seconds   length of a part
    ended          outputs that ended in each part
    failed         jobs that failed in each part
    busy_seconds   GPU-seconds of all workers in each part
    paid_seconds   the same with the seconds in which files were fetched
    workers        workers that ran its tasks
    timed, untimed  outputs with and without known times
    """

    began_at: float
    part_seconds: float
    ended: tuple[int, ...]
    failed: tuple[int, ...]
    busy_seconds: tuple[float, ...]
    paid_seconds: tuple[float, ...]
    workers: int
    timed: int
    untimed: int
    pauses: tuple[Pause, ...] = ()

    @property
    def seconds(self) -> float:
        """The time that is shown."""
        return self.part_seconds * len(self.ended)

    @property
    def use(self) -> tuple[float, ...]:
        """The share of the workers' time in each part in which they ran tasks."""
        most_seconds = self.part_seconds * max(1, self.workers)
        return tuple(min(1.0, seconds / most_seconds) for seconds in self.busy_seconds)


def course_of(outputs: Iterable[ReportOutput], failed_at: Iterable[float] = ()) -> Course | None:
    """Return a batch over time; None if no time of an output is known: versions before 0.2 did not note it."""
    all_outputs = tuple(outputs)
    ends = {place: end for place, output in enumerate(all_outputs) if (end := _end_of(output)) > 0.0}
    if not ends:
        return None
    tasks = [task for output in all_outputs for task in output.own_tasks if task.ended_at > 0.0]
    failures = sorted(at for at in failed_at if at > 0.0)
    shown = _Shown(_stretches(all_outputs, ends, failures))
    wanted = min(MOST_PARTS, max(LEAST_PARTS, len(ends) // OUTPUTS_OF_PART))
    count = max(1, min(wanted, int(shown.seconds / LEAST_PART_SECONDS)))
    part_seconds = max(shown.seconds, LEAST_PART_SECONDS) / count

    def counted(moments: Iterable[float]) -> tuple[int, ...]:
        found = [0] * count
        for moment in moments:
            found[min(count - 1, int(shown.place(moment) / part_seconds))] += 1
        return tuple(found)

    return Course(
        began_at=shown.began_at,
        part_seconds=part_seconds,
        ended=counted(ends.values()),
        failed=counted(failures),
        busy_seconds=_spread(((task, task.seconds) for task in tasks), shown, count, part_seconds),
        paid_seconds=_spread(((task, task.seconds + task.fetch_seconds) for task in tasks), shown, count, part_seconds),
        workers=len({task.worker for task in tasks}),
        timed=len(ends),
        untimed=len(all_outputs) - len(ends),
        pauses=tuple(shown.pauses),
    )


class _Shown:
    """The time that is shown: stretches without the pauses between them."""

    def __init__(self, stretches: Sequence[tuple[float, float]]) -> None:
        self._begins = [begin for begin, _ in stretches]
        self._ends = [end for _, end in stretches]
        self._before: list[float] = []
        self.pauses: list[Pause] = []
        self.seconds = 0.0
        for place, (begin, end) in enumerate(stretches):
            if place:
                self.pauses.append(Pause(self.seconds, begin - self._ends[place - 1]))
            self._before.append(self.seconds)
            self.seconds += end - begin
        self.began_at = self._begins[0]

    def place(self, moment: float) -> float:
        """Return the seconds that are shown before a moment; a moment in a pause is at its place."""
        stretch = max(0, bisect_right(self._begins, moment) - 1)
        length = self._ends[stretch] - self._begins[stretch]
        return self._before[stretch] + min(max(0.0, moment - self._begins[stretch]), length)


def _stretches(
    outputs: Sequence[ReportOutput], ends: dict[int, float], failures: Sequence[float]
) -> list[tuple[float, float]]:
    """Return the time from the first to the last moment of each run of the batch, and of failures between them, merged
    where they overlap, in order."""
    runs: dict[int, tuple[float, float]] = {}
    for place, end in ends.items():
        output = outputs[place]
        begin = min((_begin_of(task) for task in output.own_tasks if task.ended_at > 0.0), default=end)
        known = runs.get(output.run, (begin, end))
        runs[output.run] = (min(known[0], begin), max(known[1], end))
    merged: list[tuple[float, float]] = []
    for begin, end in sorted([*runs.values(), *((at, at) for at in failures)]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _spread(
    seconds_of: Iterable[tuple[ReportTask, float]], shown: _Shown, count: int, part_seconds: float
) -> tuple[float, ...]:
    """Spread seconds of each task evenly over the time of its run; return the sums of the parts."""
    found = [0.0] * count
    for task, seconds in seconds_of:
        begin, end = shown.place(_begin_of(task)), shown.place(task.ended_at)
        if end <= begin:
            continue
        rate = seconds / (end - begin)
        first, last = min(count - 1, int(begin / part_seconds)), min(count - 1, int(end / part_seconds))
        for part in range(first, last + 1):
            within = min(end, (part + 1) * part_seconds) - max(begin, part * part_seconds)
            found[part] += rate * max(0.0, within)
    return tuple(found)


def _begin_of(task: ReportTask) -> float:
    # the seconds of a task in a batch are its share of the run; an edited manifest may have more than there were
    return max(0.0, task.ended_at - task.seconds * max(1, task.batched))


def _end_of(output: ReportOutput) -> float:
    tasks = output.own_tasks or output.tasks
    return max((task.ended_at for task in tasks), default=0.0)
