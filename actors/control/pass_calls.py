"""The calls to workers that run passes: runs that begin one, runs that join it at a step, and their ends.

Each run ends by itself. A run that comes too late to join begins a pass of its own, after what the worker was sent
before.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from modelpool.actors.control.background import Background
from modelpool.actors.control.fleet import RunCall, WorkerFleet, WorkerLost
from modelpool.actors.control.live_workers import LiveWorker, LiveWorkers, loss_of
from modelpool.actors.worker.wire.messages import CallId, EndsWanted, ResultRef, RunMode
from modelpool.pool.values.specs.spec import TaskReport
from modelpool.scheduler.model.messages import RunTask


@dataclass(frozen=True, slots=True)
class PassRun:
    """One run: its command, and the parts that were sent."""

    command: RunTask
    call: RunCall

    @property
    def number(self) -> int:
        """The number of the run."""
        return self.call[0].run


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass that runs, or will: its runs that have not ended, by their numbers."""

    call: CallId
    worker: LiveWorker
    previous: asyncio.Task[None] | None
    runs: dict[int, PassRun] = field(default_factory=dict)
    is_over: bool = False


class PassCalls:
    """Sends runs to passes. One worker runs one pass at a time."""

    def __init__(
        self,
        workers: LiveWorkers,
        fleet: WorkerFleet,
        background: Background,
        next_number: Callable[[], int],
        end: Callable[[TaskReport, ResultRef, LiveWorker, int], None],
        fail: Callable[[PassRun, LiveWorker, Exception], None],
    ) -> None:
        """`end` and `fail` report the end of a run, if it was not reported yet: with its report, or with what its call
        raised."""
        self._workers = workers
        self._fleet = fleet
        self._background = background
        self._next_number = next_number
        self._end = end
        self._fail = fail
        #: the last pass of each worker
        self._passes: dict[LiveWorker, _Pass] = {}

    def open(self, worker: LiveWorker, runs: Sequence[PassRun]) -> None:
        """Send runs to a worker as a new pass."""
        self._passes = {one: found for one, found in self._passes.items() if self._workers.has(one)}
        call = CallId(self._next_number(), RunMode.PASS, runs[0].call[0].epoch)
        opened = _Pass(call, worker, worker.last_wait, {run.number: run for run in runs})
        self._passes[worker] = opened
        sent = self._fleet.run(*worker.key, call, [run.call for run in runs])
        worker.last_wait = self._background.spawn(self._follow(opened, asyncio.ensure_future(sent.reports)))

    def enter(self, worker: LiveWorker, run: PassRun) -> None:
        """Let a run join the pass of a worker; it begins a new one if that is over."""
        found = self._passes.get(worker)
        if found is None or found.is_over:
            self.open(worker, (run,))
            return
        found.runs[run.number] = run
        accepted = asyncio.ensure_future(self._fleet.join(*worker.key, found.call, run.call))
        self._background.spawn(self._join(found, run, accepted))

    async def _join(self, joined: _Pass, run: PassRun, accepted: asyncio.Future[bool]) -> None:
        worker = joined.worker
        try:
            is_in = await accepted
        except WorkerLost as raised:
            self._workers.lose(*worker.key, loss_of(raised))
            return
        except Exception as raised:
            if joined.runs.pop(run.number, None) is not None:
                self._fail(run, worker, raised)
            return
        if not is_in and joined.runs.pop(run.number, None) is not None and self._workers.has(worker):
            joined.is_over = True
            self.enter(worker, run)

    async def _follow(self, followed: _Pass, begun: asyncio.Future[Sequence[TaskReport | None]]) -> None:
        """Report the ends of the runs of a pass, as they come, after the ends of what the worker was sent before."""
        worker = followed.worker
        try:
            await self._report_ends(followed, begun)
        except WorkerLost as raised:
            self._workers.lose(*worker.key, loss_of(raised))
        except Exception as raised:  # the call itself failed, as an input is gone
            followed.is_over = True
            for run in followed.runs.values():
                self._fail(run, worker, raised)
            followed.runs.clear()
        finally:
            followed.is_over = True
            begun.cancel()

    async def _report_ends(self, followed: _Pass, begun: asyncio.Future[Sequence[TaskReport | None]]) -> None:
        worker = followed.worker
        for told in itertools.count():
            over = self._fleet.ends(*worker.key, EndsWanted(followed.call, told, waits=True))
            ends = asyncio.ensure_future(over.reports)
            if not begun.done():
                await asyncio.wait((ends, begun), return_when=asyncio.FIRST_COMPLETED)
            if begun.done() and not ends.done() and begun.exception() is not None:
                ends.cancel()
                begun.result()  # it has not begun, and nobody will tell of an end
            reports = await ends
            if followed.previous is not None and not followed.previous.done():
                await asyncio.wait((followed.previous,))
            if not reports:
                await begun  # what has ended it
                return
            (report,) = reports
            assert report is not None, "each run of a pass has a report"
            place = next((n for n, run in followed.runs.items() if run.command.task_id == report.task_id), None)
            if place is not None:
                del followed.runs[place]
                self._end(report, over.results[0], worker, place)
