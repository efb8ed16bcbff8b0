"""`RayFleet`: workers as Ray actors. Converts Ray's errors to those of `actors.control.fleet`.

A worker whose group has no node yet is a pending actor: that is the demand to which Ray's autoscaler reacts, and it
ends with the pool. A lost worker is examined (`actors.ray.ray_losses`) before its loss is reported.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from modelpool.actors.control.cluster_view import ClusterView, launch_failure, start_obstacle
from modelpool.actors.control.fleet import InputsLost, RunCall, SentBatch, SentRun, WorkerLost
from modelpool.actors.control.losses import Loss
from modelpool.actors.ray.actor_options import WorkerNeeds
from modelpool.actors.ray.ray_losses import WORKER_GONE, LossExaminer, NeighbourCall
from modelpool.actors.wire.messages import ResultRef, RunRequest
from modelpool.actors.wire.packing import packed, unpacked
from modelpool.actors.worker.crash_trace import CrashEvidence
from modelpool.actors.worker.process_memory import ProcessMemory
from modelpool.pool.core.stage_params import PreloadRequest
from modelpool.pool.loading.file_parts import FilePart
from modelpool.pool.specs.spec import NO_NODE, NodeId, WorkerId, WorkerSpec
from modelpool.scheduler.tables.messages import LossCause

#: concurrency groups of a worker: one thread runs, others answer and stop, one waits as long as the worker lives
COMPUTE, CONTROL, WATCH = "compute", "control", "watch"

#: interval of the checks whether the autoscaler can provide the node that a pending worker waits for
_PENDING_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class NewWorker:
    """A worker to create.

    trace  the name of the traces that it leaves for the case of its sudden end
    """

    worker_id: WorkerId
    incarnation: int
    group: str
    trace: str


@dataclass(slots=True)
class _Worker:
    """A worker that was created; its node is known once it is up."""

    handle: ActorHandle[Any]
    trace: str
    #: the remote method that runs a task, bound once
    run: Any
    node: NodeId = NO_NODE
    #: the examination of its loss: the run and the watch that both report it share one
    loss: asyncio.Task[Loss] | None = field(default=None, repr=False)


class RayFleet:
    """The workers of one controller."""

    def __init__(
        self,
        create: Callable[[NewWorker], ActorHandle[Any]],
        needs: Callable[[str], WorkerNeeds],
        examiner: LossExaminer,
        recent_view: Callable[[], Awaitable[ClusterView]],
        start_timeout_seconds: Callable[[str], float | None] = lambda group: None,
    ) -> None:
        """`needs` and `start_timeout_seconds` are by group; a timeout of None waits for a node without end."""
        self._create = create
        self._needs = needs
        self._examiner = examiner
        self._recent_view = recent_view
        self._start_timeout_seconds = start_timeout_seconds
        self._workers: dict[tuple[WorkerId, int], _Worker] = {}

    async def start(self, worker_id: WorkerId, incarnation: int, group: str = "") -> WorkerSpec:
        """See `WorkerFleet`. Without a group, waits as long as the cluster has no free resources."""
        trace = f"{worker_id}-{incarnation}-{secrets.token_hex(8)}"
        handle = self._create(NewWorker(worker_id, incarnation, group, trace))
        run = handle.run_packed.options(concurrency_group=COMPUTE, num_returns=2)
        worker = self._workers[worker_id, incarnation] = _Worker(handle, trace, run)
        try:
            await self._placed(handle, group)
            spec: WorkerSpec = await handle.start.options(concurrency_group=COMPUTE).remote()
        except WORKER_GONE as lost:
            raise await self._lost(worker, lost) from lost
        except RayTaskError as raised:
            raise raised.cause from raised
        worker.node = spec.node
        return spec

    async def gone(self, worker_id: WorkerId, incarnation: int) -> Loss:
        """See `WorkerFleet`."""
        worker = self._workers[worker_id, incarnation]
        try:
            await worker.handle.watch.options(concurrency_group=WATCH).remote()
        except WORKER_GONE as lost:
            return await self._loss(worker, lost)
        return Loss("its GPU no longer answers")

    def end(self, worker_id: WorkerId, incarnation: int) -> None:
        """See `WorkerFleet`."""
        worker = self._workers.pop((worker_id, incarnation), None)
        if worker is not None:
            ray.kill(worker.handle)

    def run(self, worker_id: WorkerId, incarnation: int, request: RunRequest, inputs: Sequence[ResultRef]) -> SentRun:
        """See `WorkerFleet`. The inputs are arguments of the call: Ray transfers their bytes to the worker, not
        here.
        """
        worker = self._workers[worker_id, incarnation]
        report, result = worker.run.remote(packed(request), *inputs)
        return SentRun(self._awaited(worker, report), result)

    def run_batch(self, worker_id: WorkerId, incarnation: int, calls: Sequence[RunCall]) -> SentBatch:
        """See `WorkerFleet`. One call: all inputs are its arguments, and each result is a separate value."""
        worker = self._workers[worker_id, incarnation]
        call = worker.handle.run_batch_packed.options(concurrency_group=COMPUTE, num_returns=1 + len(calls))
        refs = [ref for _, inputs in calls for ref in inputs]
        reports, *results = call.remote(packed(tuple(request for request, _ in calls)), *refs)
        return SentBatch(self._awaited(worker, reports), results)

    def stop(self, worker_id: WorkerId, incarnation: int, run: int, keep_state: bool = False) -> None:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is not None:
            worker.handle.stop.options(concurrency_group=CONTROL).remote(run, keep_state)

    def prefetch(self, worker_id: WorkerId, incarnation: int, parts: Sequence[FilePart]) -> None:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is not None:
            worker.handle.prefetch.options(concurrency_group=CONTROL).remote(tuple(parts))

    def preload(self, worker_id: WorkerId, incarnation: int, run: int, preload_request: PreloadRequest) -> None:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is not None:
            worker.handle.preload.options(concurrency_group=CONTROL).remote(run, preload_request)

    async def copy_result(self, ref: ResultRef) -> ResultRef:
        """See `WorkerFleet`. A packed result is here already: Ray sent it with the answer of the call."""
        try:
            value = await cast(ray.ObjectRef[Any], ref)
        except (ObjectLostError, *WORKER_GONE) as lost:
            raise InputsLost(str(lost).splitlines()[0]) from lost
        if isinstance(value, bytes):
            return ref
        copy: ResultRef = await asyncio.get_running_loop().run_in_executor(None, ray.put, value)
        return copy

    async def memory_reports(self) -> dict[WorkerId, ProcessMemory]:
        """See `WorkerFleet`."""
        handles = {worker_id: worker.handle for (worker_id, _), worker in self._workers.items()}
        calls = [handle.memory_report.options(concurrency_group=CONTROL).remote() for handle in handles.values()]
        reports = await asyncio.gather(*calls, return_exceptions=True)
        return {w: report for w, report in zip(handles, reports, strict=True) if isinstance(report, ProcessMemory)}

    async def _placed(self, handle: ActorHandle[Any], group: str) -> None:
        """Wait until the process of a new worker answers. Raises WorkerLost if no node for it comes up in time, or if
        the autoscaler cannot provide one."""
        limit = self._start_timeout_seconds(group)
        up = handle.ping.options(concurrency_group=CONTROL).remote()
        if limit is None:
            await up
            return None
        needs, began, requested_at = self._needs(group), time.monotonic(), time.time()
        answer = asyncio.ensure_future(_answer(up))
        try:
            while True:
                await asyncio.wait((answer,), timeout=min(_PENDING_SECONDS, limit))
                if answer.done():
                    return await answer
                if refusal := await self._refusal(needs, group, requested_at):
                    raise WorkerLost(f"no node of group {group} can be provided: {refusal}", LossCause.NO_NODE)
                if time.monotonic() - began >= limit and not await self._examiner.has_node(handle):
                    raise WorkerLost(await self._timed_out(needs, group, limit), LossCause.NO_NODE)
        finally:
            answer.cancel()

    async def _refusal(self, needs: WorkerNeeds, group: str, since: float) -> str:
        """Return why the autoscaler cannot provide a node that was requested at `since`; "" if it may."""
        try:
            view = await self._recent_view()
        except Exception:
            return ""  # a cluster that does not answer for a moment is no reason to give up a start
        return launch_failure(view, group, needs.bundle, dict(needs.labels), since)

    async def _timed_out(self, needs: WorkerNeeds, group: str, limit: float) -> str:
        """Return why a worker of `group` did not start within `limit` seconds."""
        try:
            obstacle = start_obstacle(await self._recent_view(), needs.bundle, dict(needs.labels), group)
        except Exception as failed:
            obstacle = f"nothing ({type(failed).__name__}: {failed})"
        reports = obstacle or "a node for it is free, but its process has not started"
        return f"no node of group {group} came up within {limit:.0f} s; Ray reports: {reports}"

    async def _lost(self, worker: _Worker, error: RayError) -> WorkerLost:
        loss = await self._loss(worker, error)
        return WorkerLost(loss.reason, loss.cause)

    async def _loss(self, worker: _Worker, error: RayError) -> Loss:
        """Return why a worker was lost. Everyone who notices the loss waits for the same examination."""
        if worker.loss is None:
            worker.loss = asyncio.ensure_future(
                self._examiner.loss_cause(error, worker.node, worker.trace, self._neighbour(worker))
            )
        return await asyncio.shield(worker.loss)

    def _neighbour(self, worker: _Worker) -> NeighbourCall | None:
        """Return a call that reads traces through another worker of the same node."""
        near = (
            other.handle
            for other in self._workers.values()
            if other is not worker and other.loss is None and other.node == worker.node and worker.node
        )
        handle = next(near, None)
        if handle is None:
            return None

        async def ask(trace: str) -> CrashEvidence:
            evidence: CrashEvidence = await handle.take_evidence.options(concurrency_group=CONTROL).remote(trace)
            return evidence

        return ask

    async def _awaited(self, worker: _Worker, reports: Any) -> Any:
        """Wait for the report of a call; convert Ray's errors to those of `actors.control.fleet`."""
        try:
            return unpacked(await reports)
        except WORKER_GONE as lost:
            raise await self._lost(worker, lost) from lost
        except ObjectLostError as lost:
            raise InputsLost(str(lost).splitlines()[0]) from lost
        except RayTaskError as raised:
            if isinstance(raised.cause, ObjectLostError):
                raise InputsLost(str(raised.cause).splitlines()[0]) from raised
            raise raised.cause from raised


async def _answer(reference: Any) -> None:
    """Wait for a call that returns nothing of interest."""
    await reference
