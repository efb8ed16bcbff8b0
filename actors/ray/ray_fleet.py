"""`RayFleet`: workers as Ray actors. Converts Ray's errors to those of `actors.control.fleet`.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from modelpool.actors.control.fleet import InputsLost, RunCall, SentBatch, SentRun, WorkerLost
from modelpool.actors.wire.messages import ResultRef, RunRequest
from modelpool.actors.wire.packing import packed, unpacked
from modelpool.actors.worker.process_memory import ProcessMemory
from modelpool.pool.core.stage_params import PreloadRequest
from modelpool.pool.loading.file_parts import FilePart
from modelpool.pool.specs.spec import WorkerId, WorkerSpec

#: concurrency groups of a worker: one thread runs, others answer and stop, one waits as long as the worker lives
COMPUTE, CONTROL, WATCH = "compute", "control", "watch"

_REASON_CHARACTERS = 600
#: escape sequences in Ray's messages
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

#: Ray's errors for a worker that is gone; the last two (its memory monitor, a lost node) are not RayActorErrors
WORKER_GONE = (RayActorError, OutOfMemoryError, NodeDiedError)


class RayFleet:
    """The workers of one controller."""

    def __init__(self, create: Callable[[WorkerId, int], ActorHandle[Any]]) -> None:
        self._create = create
        self._handles: dict[tuple[WorkerId, int], ActorHandle[Any]] = {}
        #: the remote method that runs a task, bound once per worker
        self._runs: dict[tuple[WorkerId, int], Any] = {}

    async def start(self, worker_id: WorkerId, incarnation: int) -> WorkerSpec:
        """See `WorkerFleet`. Waits as long as the cluster has no free resources."""
        handle = self._handles[worker_id, incarnation] = self._create(worker_id, incarnation)
        self._runs[worker_id, incarnation] = handle.run_packed.options(concurrency_group=COMPUTE, num_returns=2)
        try:
            spec: WorkerSpec = await handle.start.options(concurrency_group=COMPUTE).remote()
        except RayActorError as lost:
            raise WorkerLost(_reason(lost)) from lost
        except RayTaskError as raised:
            raise raised.cause from raised
        return spec

    async def gone(self, worker_id: WorkerId, incarnation: int) -> str:
        """See `WorkerFleet`."""
        handle = self._handles[worker_id, incarnation]
        try:
            await handle.watch.options(concurrency_group=WATCH).remote()
        except WORKER_GONE as lost:
            return _reason(lost)
        return "it was closed"

    def end(self, worker_id: WorkerId, incarnation: int) -> None:
        """See `WorkerFleet`."""
        self._runs.pop((worker_id, incarnation), None)
        handle = self._handles.pop((worker_id, incarnation), None)
        if handle is not None:
            ray.kill(handle)

    def run(self, worker_id: WorkerId, incarnation: int, request: RunRequest, inputs: Sequence[ResultRef]) -> SentRun:
        """See `WorkerFleet`. The inputs are arguments of the call: Ray transfers their bytes to the worker, not
        here.
        """
        report, result = self._runs[worker_id, incarnation].remote(packed(request), *inputs)
        return SentRun(_awaited(report), result)

    def run_batch(self, worker_id: WorkerId, incarnation: int, calls: Sequence[RunCall]) -> SentBatch:
        """See `WorkerFleet`. One call: all inputs are its arguments, and each result is a separate value."""
        handle = self._handles[worker_id, incarnation]
        call = handle.run_batch_packed.options(concurrency_group=COMPUTE, num_returns=1 + len(calls))
        refs = [ref for _, inputs in calls for ref in inputs]
        reports, *results = call.remote(packed(tuple(request for request, _ in calls)), *refs)
        return SentBatch(_awaited(reports), results)

    def stop(self, worker_id: WorkerId, incarnation: int, run: int) -> None:
        """See `WorkerFleet`."""
        handle = self._handles.get((worker_id, incarnation))
        if handle is not None:
            handle.stop.options(concurrency_group=CONTROL).remote(run)

    def prefetch(self, worker_id: WorkerId, incarnation: int, parts: Sequence[FilePart]) -> None:
        """See `WorkerFleet`."""
        handle = self._handles.get((worker_id, incarnation))
        if handle is not None:
            handle.prefetch.options(concurrency_group=CONTROL).remote(tuple(parts))

    def preload(self, worker_id: WorkerId, incarnation: int, run: int, preload_request: PreloadRequest) -> None:
        """See `WorkerFleet`."""
        handle = self._handles.get((worker_id, incarnation))
        if handle is not None:
            handle.preload.options(concurrency_group=CONTROL).remote(run, preload_request)

    async def memory_reports(self) -> dict[WorkerId, ProcessMemory]:
        """See `WorkerFleet`."""
        handles = {worker_id: handle for (worker_id, _), handle in self._handles.items()}
        calls = [handle.memory_report.options(concurrency_group=CONTROL).remote() for handle in handles.values()]
        reports = await asyncio.gather(*calls, return_exceptions=True)
        return {w: report for w, report in zip(handles, reports, strict=True) if isinstance(report, ProcessMemory)}


async def _awaited(reports: Any) -> Any:
    """Wait for the report of a call; convert Ray's errors to those of `actors.control.fleet`."""
    try:
        parts = unpacked(await reports)
    except WORKER_GONE as lost:
        raise WorkerLost(_reason(lost)) from lost
    except ObjectLostError as lost:
        raise InputsLost(str(lost).splitlines()[0]) from lost
    except RayTaskError as raised:
        if isinstance(raised.cause, ObjectLostError):
            raise InputsLost(str(raised.cause).splitlines()[0]) from raised
        raise raised.cause from raised
    return parts


def _reason(lost: RayError) -> str:
    """Shorten Ray's many lines to one, without ids and colours. The end of a long one is kept as well as its beginning:
    an error at the start of the process is the last line of its traceback.
    """
    lines = (line.strip() for line in _COLOURS.sub("", str(lost)).splitlines())
    ids = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")
    parts = " ".join(line for line in lines if line and not line.startswith(ids))
    if len(parts) <= _REASON_CHARACTERS:
        return parts
    return f"{parts[: _REASON_CHARACTERS // 3]} ... {parts[-2 * _REASON_CHARACTERS // 3 :]}"
