"""`RayFleet`: workers as Ray actors. Turns Ray's ways of failing into the words of `actors.control.fleet`.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from modelpool.actors.control.fleet import Asked, InputsLost, JointRun, Run, WorkerLost
from modelpool.actors.wire.messages import ResultRef, RunRequest
from modelpool.actors.wire.packing import packed, unpacked
from modelpool.actors.worker.host_memory import HostMemory
from modelpool.pool.core.stage_params import Coming
from modelpool.pool.loading.file_parts import FilePart
from modelpool.pool.specs.spec import WorkerId, WorkerSpec

#: concurrency groups of a worker: one thread runs, others answer and stop, one waits for as long as the worker lives
COMPUTE, CONTROL, WATCH = "compute", "control", "watch"

_REASON_CHARACTERS = 400

#: Ray's words for a worker that is gone; the last two (its memory monitor, a lost node) are no RayActorErrors
WORKER_GONE = (RayActorError, OutOfMemoryError, NodeDiedError)


class RayFleet:
    """The workers that one controller has."""

    def __init__(self, create: Callable[[WorkerId, int], ActorHandle[Any]]) -> None:
        self._create = create
        self._handles: dict[tuple[WorkerId, int], ActorHandle[Any]] = {}
        #: the call that runs a task, made once a worker
        self._runs: dict[tuple[WorkerId, int], Any] = {}

    async def start(self, worker_id: WorkerId, incarnation: int) -> WorkerSpec:
        """See `Fleet`. Waits for as long as the cluster has no room."""
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
        """See `Fleet`."""
        handle = self._handles[worker_id, incarnation]
        try:
            await handle.watch.options(concurrency_group=WATCH).remote()
        except WORKER_GONE as lost:
            return _reason(lost)
        return "it was closed"

    def end(self, worker_id: WorkerId, incarnation: int) -> None:
        """See `Fleet`."""
        self._runs.pop((worker_id, incarnation), None)
        handle = self._handles.pop((worker_id, incarnation), None)
        if handle is not None:
            ray.kill(handle)

    def run(self, worker_id: WorkerId, incarnation: int, request: RunRequest, inputs: Sequence[ResultRef]) -> Run:
        """See `Fleet`. The inputs are arguments of the call: Ray brings their bytes to the worker, not here."""
        report, result = self._runs[worker_id, incarnation].remote(packed(request), *inputs)
        return Run(_told(report), result)

    def run_together(self, worker_id: WorkerId, incarnation: int, asked: Sequence[Asked]) -> JointRun:
        """See `Fleet`. One call: all inputs are its arguments, and each result is a value of its own."""
        handle = self._handles[worker_id, incarnation]
        call = handle.run_together_packed.options(concurrency_group=COMPUTE, num_returns=1 + len(asked))
        refs = [ref for _, inputs in asked for ref in inputs]
        reports, *results = call.remote(packed(tuple(request for request, _ in asked)), *refs)
        return JointRun(_told(reports), results)

    def stop(self, worker_id: WorkerId, incarnation: int, run: int) -> None:
        """See `Fleet`."""
        handle = self._handles.get((worker_id, incarnation))
        if handle is not None:
            handle.stop.options(concurrency_group=CONTROL).remote(run)

    def read_ahead(self, worker_id: WorkerId, incarnation: int, parts: Sequence[FilePart]) -> None:
        """See `Fleet`."""
        handle = self._handles.get((worker_id, incarnation))
        if handle is not None:
            handle.read_ahead.options(concurrency_group=CONTROL).remote(tuple(parts))

    def upload_ahead(self, worker_id: WorkerId, incarnation: int, run: int, coming: Coming) -> None:
        """See `Fleet`."""
        handle = self._handles.get((worker_id, incarnation))
        if handle is not None:
            handle.upload_ahead.options(concurrency_group=CONTROL).remote(run, coming)

    async def memory_reports(self) -> dict[WorkerId, HostMemory]:
        """See `Fleet`."""
        handles = {worker_id: handle for (worker_id, _), handle in self._handles.items()}
        calls = [handle.memory_report.options(concurrency_group=CONTROL).remote() for handle in handles.values()]
        reports = await asyncio.gather(*calls, return_exceptions=True)
        return {w: report for w, report in zip(handles, reports, strict=True) if isinstance(report, HostMemory)}


async def _told(reports: Any) -> Any:
    """What a worker told of the end of its call, in words of `actors.control.fleet` where that failed."""
    try:
        told = unpacked(await reports)
    except WORKER_GONE as lost:
        raise WorkerLost(_reason(lost)) from lost
    except ObjectLostError as lost:
        raise InputsLost(str(lost).splitlines()[0]) from lost
    except RayTaskError as raised:
        if isinstance(raised.cause, ObjectLostError):
            raise InputsLost(str(raised.cause).splitlines()[0]) from raised
        raise raised.cause from raised
    return told


def _reason(lost: RayError) -> str:
    """Ray's many lines as one, without the ids."""
    lines = (line.strip() for line in str(lost).splitlines())
    ids = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")
    told = " ".join(line for line in lines if line and not line.startswith(ids))
    return told if len(told) <= _REASON_CHARACTERS else f"{told[:_REASON_CHARACTERS]} ..."
