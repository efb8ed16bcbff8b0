"""`RayFleet`: workers as Ray actors. Converts Ray's errors to errors of `actors.control.fleet`.
Workers belong to the controller and end with it, or outlive it (`actors.ray.survivors`): then the next controller
continues with them, and each call has the epoch of its controller.

A worker of a group without a node is a pending actor: that is the demand to which Ray's autoscaler reacts, and it
ends with the pool. A lost worker is examined (`actors.ray.ray_losses`) before its loss is reported. Calls that need
Ray's control service run in threads, since they block while it does not answer: the creation of an actor (measured:
until Ray aborts the process), and `ray.nodes`. Calls of actors that are up do not.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from modelpool.actors.control.cluster_view import ClusterView, launch_failure, start_obstacle
from modelpool.actors.control.fleet import InputsLost, RunCall, SentRuns, WorkerLost
from modelpool.actors.control.losses import Loss
from modelpool.actors.control.succession import WorkerOrigin, successor
from modelpool.actors.ray.abandoned_demand import DemandWatch, end_watch
from modelpool.actors.ray.actor_options import COMPUTE, CONTROL, DECODES, PASSES, WATCH, WorkerNeeds
from modelpool.actors.ray.owned_values import OwnedValues
from modelpool.actors.ray.ray_losses import WORKER_GONE, LossExaminer, NeighbourCall
from modelpool.actors.ray.ray_nodes import ActorReport
from modelpool.actors.ray.survivors import Succession, Survivor, left_workers, take_over
from modelpool.actors.ray.worker_ends import WorkerEnds
from modelpool.actors.worker.process_memory import ProcessMemory
from modelpool.actors.worker.wire.messages import (
    CallId,
    EndsWanted,
    LoadReport,
    LoadRequest,
    ResultRef,
    RunMode,
    StartedWorker,
)
from modelpool.actors.worker.wire.packing import packed, result_of, unpacked
from modelpool.actors.worker.worker_lease import OlderEpoch
from modelpool.actors.worker.worker_process import WorkerProcess
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.previews import PreviewWish
from modelpool.pool.values.core.stage_params import PreloadRequest, Result
from modelpool.pool.values.specs.spec import NO_NODE, NodeId, TaskId, TaskReport, WorkerId, WorkerSpec
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.model.messages import LossCause

logger = logging.getLogger(__name__)

#: interval of the checks whether the autoscaler can provide the node that a pending worker waits for
_PENDING_SECONDS = 2.0
#: limit of the creation of an actor, which takes milliseconds if the control service answers
CREATE_SECONDS = 30.0
#: creations of workers at the same time
_THREADS = 4
#: a start may take this many times as long as the longest one so far
START_FACTOR = 20.0
#: least limit of a start
LEAST_START_SECONDS = 120.0
#: limit for the run of an earlier controller to stop, which it does at its next step. Loading the weights again takes
#: about as long
ADOPT_SECONDS = 60.0
#: calls in the time of a lease, so that a few may fail
CALLS_PER_LEASE = 6.0


@dataclass(slots=True)
class _Worker:
    """A worker that was created; its node is known once it is up."""

    handle: ActorHandle[Any]
    trace: str
    #: the remote method that runs tasks, bound once for each number of tasks: at most `send_ahead.MOST_IN_CALL`, or the
    #: most members of a batch
    run: dict[int, Any] = field(default_factory=dict, repr=False)
    node: NodeId = NO_NODE
    #: its process, once it has answered
    process: WorkerProcess | None = None
    #: whether it was found not to answer
    is_silent: bool = False
    #: the examination of its loss: the run and the watch that both report it share one
    loss: asyncio.Task[Loss] | None = field(default=None, repr=False)


class RayFleet:
    """The workers of one controller."""

    def __init__(
        self,
        create: Callable[[WorkerOrigin], ActorHandle[Any]],
        needs: Callable[[str], WorkerNeeds],
        examiner: LossExaminer,
        recent_view: Callable[[], Awaitable[ClusterView]],
        node_timeout_seconds: Callable[[str], float | None] = lambda group: None,
        start_timeout_seconds: float = 600.0,
        succession: Succession | None = None,
        record_of: Callable[[str], Awaitable[ActorReport | None]] | None = None,
    ) -> None:
        """`needs` and `node_timeout_seconds`, the limit of the wait for a node, are by group; None waits without end.
        `start_timeout_seconds` is the limit of a start on its node before any worker has started. With `succession`,
        which needs Ray's record of an actor by its id (`record_of`), workers outlive the controller.
        """
        self._create = create
        self._needs = needs
        self._examiner = examiner
        self._recent_view = recent_view
        self._node_timeout_seconds = node_timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._longest_start_seconds: float | None = None
        #: results of runs, which drivers may be the last to use
        self._owned = OwnedValues()
        self._creations = ThreadPoolExecutor(_THREADS, "ray creations")
        self._ends = WorkerEnds(succession)
        #: background tasks; kept here because the event loop only has weak references
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers: dict[tuple[WorkerId, int], _Worker] = {}
        self._succession = succession
        self._record_of = record_of
        self._epoch = 0 if succession is None else succession.epoch
        #: workers of earlier controllers that are not used yet
        self._survivors: list[Survivor] = []
        self._lease_keeper: asyncio.Task[None] | None = None
        #: ends the workers that wait for a node if this controller is lost
        self._demand = None if succession is None else DemandWatch(succession, self._creations, self._note_epoch)

    async def take_over(self) -> int:
        """See `WorkerFleet`."""
        succession = self._succession
        if succession is None:
            return 0
        assert self._record_of is not None, "a succession needs Ray's records"
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._creations, end_watch, succession.namespace, succession.pool)
        left = await loop.run_in_executor(self._creations, left_workers, succession.namespace, succession.pool)
        try:
            self._survivors, others = await take_over(
                left, partial(_change_controller, succession), succession.kind_of, self._record_of
            )
        except OlderEpoch:
            succession.on_replaced()
            raise
        for handle in others:
            self._ends.end(handle)
        self._lease_keeper = asyncio.ensure_future(self._keep_leases(succession.lease_seconds / CALLS_PER_LEASE))
        return len(self._survivors)

    async def start(self, worker_id: WorkerId, incarnation: int, group: str = "") -> StartedWorker:
        """See `WorkerFleet`. Without a group, waits as long as the cluster has no free resources."""
        adopted = await self._adopted(worker_id, incarnation, group)
        if adopted is not None:
            return adopted
        trace = f"{worker_id}-{incarnation}-{secrets.token_hex(8)}"
        kind = "" if self._succession is None else self._succession.kind_of(group) or ""
        handle = await self._created(WorkerOrigin(worker_id, incarnation, group, trace, self._epoch, kind))
        worker = self._workers[worker_id, incarnation] = _Worker(handle, trace)
        try:
            worker.process = await self._placed(handle, group)
            worker.node = worker.process.node
            spec = await self._opened(handle)
        except WORKER_GONE as lost:
            raise await self._lost(worker, lost) from lost
        except RayTaskError as raised:
            self._note_epoch(raised)
            raise raised.cause from raised
        self._examiner.prepare(spec.node)
        return StartedWorker(spec)

    async def _adopted(self, worker_id: WorkerId, incarnation: int, group: str) -> StartedWorker | None:
        """Continue with a worker of an earlier controller; None if there is none. One that does not become idle is
        ended."""
        place = successor([survivor.origin for survivor in self._survivors], worker_id, group)
        if place is None:
            return None
        survivor = self._survivors.pop(place)
        worker = self._workers[worker_id, incarnation] = _Worker(survivor.handle, survivor.origin.trace)
        worker.process, worker.node = survivor.process, survivor.process.node
        adoption = survivor.handle.adopt.options(concurrency_group=COMPUTE)
        try:
            started: StartedWorker = await asyncio.wait_for(
                _answer(adoption.remote(worker_id, incarnation, self._epoch)), ADOPT_SECONDS
            )
        except (TimeoutError, RayError) as failed:
            self._note_epoch(failed)
            logger.info("worker %s cannot be taken over: %s", survivor.origin.worker_id, failed or "it is busy")
            self.end(worker_id, incarnation)
            return None
        self._examiner.prepare(worker.node)
        return started

    async def _created(self, new: WorkerOrigin) -> ActorHandle[Any]:
        """Create the actor. Raises WorkerLost if Ray does not do so in time; an actor that it creates later, or for a
        start that was withdrawn, is ended."""
        creation = self._creations.submit(self._create, new)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(creation), CREATE_SECONDS)
        except TimeoutError:
            creation.add_done_callback(self._ends.end_created)
            reason = f"Ray did not create its process within {CREATE_SECONDS:.0f} s: its control service may be gone"
            raise WorkerLost(reason, LossCause.NO_NODE) from None
        except asyncio.CancelledError:
            creation.add_done_callback(self._ends.end_created)
            raise

    async def _opened(self, handle: ActorHandle[Any]) -> WorkerSpec:
        """Open the engine of a worker after its process answered. Raises WorkerLost if that takes too long."""
        began, limit = time.monotonic(), start_limit_seconds(self._longest_start_seconds, self._start_timeout_seconds)
        try:
            spec: WorkerSpec = await asyncio.wait_for(
                _answer(handle.start.options(concurrency_group=COMPUTE).remote(self._epoch)), limit
            )
        except TimeoutError:
            raise WorkerLost(f"its start on its GPU did not end within {limit:.0f} s") from None
        self._longest_start_seconds = max(self._longest_start_seconds or 0.0, time.monotonic() - began)
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
        if worker is None:
            return
        ending = self._ends.end(worker.handle)
        if worker.is_silent and worker.process is not None:
            self._spawn(self._kill_process(ending, worker.process, _neighbour_of(worker, self._workers.values())))

    async def _kill_process(
        self, ending: Future[bool], process: WorkerProcess, neighbour: NeighbourCall | None
    ) -> None:
        """Kill the process of a worker that takes no messages, once it is certain that it may end."""
        try:
            may_end = await asyncio.wrap_future(ending)
        except RayError as failed:
            logger.info("Ray does not end a worker: %s", failed)
            may_end = True
        if may_end:
            await self._examiner.kill(process, neighbour)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_leases(self, interval_seconds: float) -> None:
        """Renew the leases of all workers: a call does."""
        while True:
            await asyncio.sleep(interval_seconds)
            for worker in self._workers.values():
                if worker.process is not None:
                    ping = worker.handle.ping.options(concurrency_group=CONTROL)
                    self._spawn(self._renewed(ping.remote(self._epoch)))
            if self._demand is not None:
                self._spawn(self._demand.renew())

    async def _renewed(self, answer: Any) -> None:
        try:
            await answer
        except RayError as failed:  # whoever waits for its end reports a loss
            self._note_epoch(failed)

    def _note_epoch(self, failed: BaseException) -> None:
        """Notice that a worker serves a newer controller."""
        if self._succession is not None and isinstance(failed, RayTaskError) and isinstance(failed.cause, OlderEpoch):
            self._succession.on_replaced()

    async def close(self) -> None:
        """See `WorkerFleet`."""
        if self._lease_keeper is not None:
            self._lease_keeper.cancel()
        for survivor in self._survivors:
            self._ends.end(survivor.handle)
        self._survivors.clear()
        if self._demand is not None:  # others end with this process
            if self._demand.actor is not None:
                self._ends.submit(self._demand.end)
            await self._ends.settled()

    def ping(self, worker_id: WorkerId, incarnation: int) -> Awaitable[bool] | None:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is None or worker.process is None:
            return None
        return _answer(worker.handle.beat.options(concurrency_group=CONTROL).remote(self._epoch))

    async def why_silent(self, worker_id: WorkerId, incarnation: int, silent_seconds: float) -> Loss:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is None or worker.process is None:
            return Loss(f"it did not answer for {silent_seconds:.0f} s")
        worker.is_silent = True
        return await self._examiner.silence_cause(
            worker.process, silent_seconds, _neighbour_of(worker, self._workers.values())
        )

    def run(self, worker_id: WorkerId, incarnation: int, call: CallId, runs: Sequence[RunCall]) -> SentRuns:
        """See `WorkerFleet`. One remote call: all inputs are its arguments, and each result is a separate value. Ray
        transfers their bytes to the worker, not here.
        """
        worker = self._workers[worker_id, incarnation]
        method = worker.run.get(len(runs))
        if method is None:
            method = worker.handle.run_packed.options(concurrency_group=COMPUTE, num_returns=1 + len(runs))
            worker.run[len(runs)] = method
        refs = [ref for _, inputs in runs for ref in inputs]
        reports, *results = method.remote(packed((call, tuple(request for request, _ in runs))), *refs)
        self._owned.watch(results)
        return SentRuns(self._reports(worker, call, reports, results), results)

    async def _reports(
        self, worker: _Worker, call: CallId, reports: Any, results: list[ResultRef]
    ) -> Sequence[TaskReport | None]:
        """Wait for the reports of a call. If its last run decodes while the next ones begin, another remote call waits
        for its end."""
        found: Sequence[TaskReport | None] = await self._awaited(worker, reports)
        if call.mode is RunMode.IN_ORDER and len(found) < len(results):
            last = self._ends_of(worker, EndsWanted(call, len(found), waits=True))
            found = [*found, *await last.reports]
            results[-1:] = last.results
        return found

    def join(self, worker_id: WorkerId, incarnation: int, call: CallId, run: RunCall) -> Awaitable[bool]:
        """See `WorkerFleet`."""
        worker, (request, inputs) = self._workers[worker_id, incarnation], run
        method = worker.handle.join_packed.options(concurrency_group=PASSES)
        return self._awaited(worker, method.remote(packed((call, request)), *inputs))

    def ends(self, worker_id: WorkerId, incarnation: int, wanted: EndsWanted) -> SentRuns:
        """See `WorkerFleet`."""
        return self._ends_of(self._workers[worker_id, incarnation], wanted)

    def _ends_of(self, worker: _Worker, wanted: EndsWanted) -> SentRuns:
        group = PASSES if wanted.call.mode is RunMode.PASS else DECODES if wanted.waits else CONTROL
        method = worker.handle.ends_packed.options(concurrency_group=group, num_returns=1 + wanted.most)
        reports, *results = method.remote(packed(wanted))
        self._owned.watch(results)
        return SentRuns(self._awaited(worker, reports), results)

    async def revoke(self, worker_id: WorkerId, incarnation: int, run: int) -> bool:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is None:
            return False
        try:
            is_revoked: bool = await worker.handle.revoke.options(concurrency_group=CONTROL).remote(run, self._epoch)
        except RayError as failed:  # whoever waits for its end reports a loss
            self._note_epoch(failed)
            return False
        return is_revoked

    def stop(self, worker_id: WorkerId, incarnation: int, run: int, keep_state: bool = False) -> None:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is not None:
            worker.handle.stop.options(concurrency_group=CONTROL).remote(run, keep_state, self._epoch)

    def want_previews(self, worker_id: WorkerId, incarnation: int, run: int, wish: PreviewWish | None) -> None:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is not None:
            worker.handle.want_previews.options(concurrency_group=CONTROL).remote(run, wish, self._epoch)

    async def gang_address(self, worker_id: WorkerId, incarnation: int) -> str:
        """See `WorkerFleet`."""
        worker = self._workers[worker_id, incarnation]
        try:
            address: str = await worker.handle.gang_address.options(concurrency_group=CONTROL).remote()
        except WORKER_GONE as lost:
            raise await self._lost(worker, lost) from lost
        return address

    def prefetch(self, worker_id: WorkerId, incarnation: int, parts: Sequence[FilePart]) -> None:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is not None:
            worker.handle.prefetch.options(concurrency_group=CONTROL).remote(tuple(parts), self._epoch)

    def preload(self, worker_id: WorkerId, incarnation: int, run: int, preload_request: PreloadRequest) -> None:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is not None:
            worker.handle.preload.options(concurrency_group=CONTROL).remote(run, preload_request, self._epoch)

    def forget_checkpoints(self, worker_id: WorkerId, incarnation: int, task_id: TaskId) -> None:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is not None:
            worker.handle.forget_checkpoints.options(concurrency_group=CONTROL).remote(task_id, self._epoch)

    async def load(self, worker_id: WorkerId, incarnation: int, request: LoadRequest) -> LoadReport:
        """See `WorkerFleet`."""
        worker = self._workers[worker_id, incarnation]
        try:
            report: LoadReport = await worker.handle.load.options(concurrency_group=COMPUTE).remote(request)
        except WORKER_GONE as lost:
            raise await self._lost(worker, lost) from lost
        except RayTaskError as raised:
            self._note_epoch(raised)
            raise raised.cause from raised
        return report

    async def grow(self, worker_id: WorkerId, incarnation: int) -> Residency:
        """See `WorkerFleet`."""
        worker = self._workers[worker_id, incarnation]
        try:
            residency: Residency = await worker.handle.grow.options(concurrency_group=COMPUTE).remote(self._epoch)
        except WORKER_GONE as lost:
            raise await self._lost(worker, lost) from lost
        except RayTaskError as raised:
            self._note_epoch(raised)
            raise raised.cause from raised
        return residency

    def drop_weights(self, worker_id: WorkerId, incarnation: int) -> None:
        """See `WorkerFleet`."""
        worker = self._workers.get((worker_id, incarnation))
        if worker is not None:
            worker.handle.drop_weights.options(concurrency_group=COMPUTE).remote(self._epoch)

    async def copy_result(self, ref: ResultRef) -> ResultRef:
        """See `WorkerFleet`. A packed result is here already: Ray sent it with the answer of the call."""
        try:
            value = await cast(ray.ObjectRef[Any], ref)
        except (ObjectLostError, *WORKER_GONE) as lost:
            raise InputsLost(str(lost).splitlines()[0]) from lost
        if isinstance(value, bytes):
            return ref
        return await self.hold(value)

    async def read_result(self, ref: ResultRef) -> Result:
        """See `WorkerFleet`."""
        try:
            return cast(Result, result_of(await cast(ray.ObjectRef[Any], ref)))
        except (ObjectLostError, *WORKER_GONE) as lost:
            raise InputsLost(str(lost).splitlines()[0]) from lost

    async def hold(self, result: Result) -> ResultRef:
        """See `WorkerFleet`."""
        ref: ResultRef = await asyncio.get_running_loop().run_in_executor(None, ray.put, result)
        self._owned.watch((ref,))
        return ref

    async def memory_reports(self) -> dict[WorkerId, ProcessMemory]:
        """See `WorkerFleet`."""
        handles = {worker_id: worker.handle for (worker_id, _), worker in self._workers.items()}
        calls = [handle.memory_report.options(concurrency_group=CONTROL).remote() for handle in handles.values()]
        reports = await asyncio.gather(*calls, return_exceptions=True)
        return {w: report for w, report in zip(handles, reports, strict=True) if isinstance(report, ProcessMemory)}

    async def _placed(self, handle: ActorHandle[Any], group: str) -> WorkerProcess:
        """Wait until the process of a new worker answers; return it. Raises WorkerLost if no node for it comes up in
        time, if the autoscaler cannot provide one, or if the process does not answer on its node."""
        limit = self._node_timeout_seconds(group)
        answer = asyncio.ensure_future(_answer(handle.ping.options(concurrency_group=CONTROL).remote(self._epoch)))
        needs = await asyncio.get_running_loop().run_in_executor(self._creations, self._needs, group)
        began, waited_at, requested_at = time.monotonic(), time.monotonic(), time.time()
        pause_seconds = _PENDING_SECONDS if limit is None else min(_PENDING_SECONDS, limit)
        try:
            while True:
                await asyncio.wait((answer,), timeout=pause_seconds)
                if answer.done():
                    process: WorkerProcess = await answer
                    return process
                view = await self._view_or_none()
                bundle, labels = needs.bundle, dict(needs.labels)
                now = time.monotonic()
                if view is None or view.waits_for(bundle, labels):
                    waited_at = now
                    if self._demand is not None:
                        await self._demand.start(CREATE_SECONDS)
                if limit is None:
                    if now - waited_at >= self._start_timeout_seconds:
                        text = f"its process has not answered within {self._start_timeout_seconds:.0f} s of its start"
                        raise WorkerLost(text)
                    continue
                if view is not None and (refusal := launch_failure(view, group, bundle, labels, requested_at)):
                    raise WorkerLost(f"no node of group {group} can be provided: {refusal}", LossCause.NO_NODE)
                # a worker that no longer waits for a node is starting there: it gets the same time again
                waits = view is not None and waited_at == now
                if now - began >= 2 * limit or (now - began >= limit and waits):
                    raise WorkerLost(_timed_out(view, needs, group, limit), LossCause.NO_NODE)
        finally:
            answer.cancel()

    async def _view_or_none(self) -> ClusterView | None:
        """Return a recent view; None if the cluster does not answer, which is no reason to give up a start."""
        try:
            return await self._recent_view()
        except Exception as failed:
            logger.info("the nodes of the cluster cannot be read: %s", failed)
            return None

    async def _lost(self, worker: _Worker, error: RayError) -> WorkerLost:
        loss = await self._loss(worker, error)
        return WorkerLost(loss.reason, loss.cause)

    async def _loss(self, worker: _Worker, error: RayError) -> Loss:
        """Return why a worker was lost. Everyone who notices the loss waits for the same examination."""
        if worker.loss is None:
            worker.loss = asyncio.ensure_future(
                self._examiner.loss_cause(
                    error, worker.node, worker.trace, _neighbour_of(worker, self._workers.values())
                )
            )
        return await asyncio.shield(worker.loss)

    async def _awaited(self, worker: _Worker, reports: Any) -> Any:
        """Wait for the report of a call; convert Ray's errors to errors of `actors.control.fleet`."""
        try:
            return unpacked(await reports)
        except WORKER_GONE as lost:
            raise await self._lost(worker, lost) from lost
        except ObjectLostError as lost:
            raise InputsLost(str(lost).splitlines()[0]) from lost
        except RayTaskError as raised:
            if isinstance(raised.cause, ObjectLostError):
                raise InputsLost(str(raised.cause).splitlines()[0]) from raised
            self._note_epoch(raised)
            raise raised.cause from raised


async def _change_controller(succession: Succession, handle: ActorHandle[Any]) -> tuple[WorkerOrigin, WorkerProcess]:
    """Have a worker serve this controller."""
    call = handle.follow.options(concurrency_group=CONTROL)
    answer: tuple[WorkerOrigin, WorkerProcess] = await call.remote(succession.epoch, succession.controller)
    return answer


def _timed_out(view: ClusterView | None, needs: WorkerNeeds, group: str, limit: float) -> str:
    """Return why a worker of `group` did not start within `limit` seconds."""
    obstacle = "nothing" if view is None else start_obstacle(view, needs.bundle, dict(needs.labels), group)
    reports = obstacle or "a node for it is free, but its process has not started"
    return f"no node of group {group} came up within {limit:.0f} s; Ray reports: {reports}"


def start_limit_seconds(longest_seconds: float | None, most_seconds: float) -> float:
    """Return the limit of a start, from the longest one so far; `most_seconds` before any. Starts of a pool are alike,
    but a busy machine and a cold disk multiply them."""
    if longest_seconds is None:
        return most_seconds
    return min(most_seconds, max(LEAST_START_SECONDS, START_FACTOR * longest_seconds))


async def _answer(reference: Any) -> Any:
    """Wait for a call."""
    return await reference


def _neighbour_of(worker: _Worker, workers: Iterable[_Worker]) -> NeighbourCall | None:
    """Return a call through another worker of the same node."""
    near = (
        other.handle
        for other in workers
        if other is not worker and not (other.loss or other.is_silent) and other.node == worker.node and worker.node
    )
    handle = next(near, None)
    if handle is None:
        return None

    async def ask(function: Callable[[Any], Any], argument: Any) -> Any:
        return await handle.call_here.options(concurrency_group=CONTROL).remote(function, argument)

    return ask
