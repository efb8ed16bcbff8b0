"""Turns plain classes into Ray actors, and sets their resources.

Imports Ray at once: import this module after a session is open. Rules
1. Ray restarts and retries nothing (`max_restarts=0`, `max_task_retries=0`): the scheduler core decides that.
2. The controller belongs to the driver that started it. Workers belong to the controller and end with it, unless
   another one may be started in its place: then they are detached, and end by their lease.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from modelpool.actors.config.config import ControllerPlace, ModelsSection
from modelpool.actors.control.catalog_process import CatalogProcess
from modelpool.actors.control.catalog_service import CatalogQueries
from modelpool.actors.control.checkpoint_archive import CheckpointArchive
from modelpool.actors.control.cluster_facts import ClusterFacts, names_of
from modelpool.actors.control.cluster_view import ClusterView
from modelpool.actors.control.controller import Controller, NamedModels, PoolIdentity, Records, WatchedCluster
from modelpool.actors.control.history.pool_history import PoolHistory, history_path
from modelpool.actors.control.log_file import open_log_file
from modelpool.actors.control.metrics.trace_export import open_traces
from modelpool.actors.control.opened_catalog import ListingCatalog
from modelpool.actors.control.pool_log import PoolLog
from modelpool.actors.control.pool_plan import PoolPlan, worker_kind
from modelpool.actors.control.recorder import Recorder
from modelpool.actors.control.succession import WorkerOrigin
from modelpool.actors.ray.actor_options import WorkerNeeds, worker_needs, worker_threads
from modelpool.actors.ray.fork_server import PY_EXECUTABLE, python_command
from modelpool.actors.ray.node_affinity import on_node
from modelpool.actors.ray.ray_fleet import RayFleet
from modelpool.actors.ray.ray_losses import LossExaminer, open_trace
from modelpool.actors.ray.ray_metrics import RayMetrics
from modelpool.actors.ray.ray_nodes import RayNodes, accelerator_types, read_cluster, this_node
from modelpool.actors.ray.remote_catalog import RemoteCatalog, catalog_nodes, search_again
from modelpool.actors.ray.state_folder import journal_path, own_checkpoints, pool_log_path, trace_folder
from modelpool.actors.ray.survivors import Succession, detached_options, next_epoch
from modelpool.actors.worker.gpu_worker import GpuWorker
from modelpool.actors.worker.node_notices import NoticePoller, notice_lock
from modelpool.actors.worker.step_checkpoints.checkpoint_disk import CheckpointDisk
from modelpool.actors.worker.step_checkpoints.checkpoint_folder import CheckpointSettings
from modelpool.actors.worker.wire.messages import (
    DriverEvents,
    EndsWanted,
    JobEnded,
    PreviewMade,
    ResultRef,
    RunEnds,
    StartedWorker,
    StateSaved,
    StepDone,
)
from modelpool.actors.worker.wire.packed_calls import PackedEvents, packed_events, travelling
from modelpool.actors.worker.wire.packing import packed, packed_result, result_of, unpacked
from modelpool.actors.worker.worker_lease import LeaseWatch, WorkerLease
from modelpool.actors.worker.worker_process import WorkerProcess
from modelpool.actors.worker.worker_setup import NO_CHECKPOINTS, Checkpointing, WorkerCallbacks, WorkerNode
from modelpool.pool.values.core.errors import OutputFailed, UserError
from modelpool.pool.values.core.stage_params import Result, RunState
from modelpool.pool.values.specs.spec import JudgedFile, NodeId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import CORE_GC_OBJECTS

logger = logging.getLogger(__name__)

#: rule 1; and no record of each call in Ray's task list, which costs a fifth of a call: the event log has one
PLAIN: Mapping[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "enable_task_events": False}

#: how long the core keeps Python's interpreter of the controller while threads of Ray, which pass on calls and answers,
#: wait for it. They would wait for Python's own 5 ms several times in one call
SWITCH_SECONDS = 0.001
#: longest wait for a small result that should be here
SMALL_RESULT_SECONDS = 1.0

#: the most of the controller's time that the export of metrics may take
EXPORT_SHARE = 0.005

_PR_SET_PDEATHSIG = 1
#: escape sequences in Ray's messages
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class SystemClock:
    """Real time."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class ControllerActor(Controller):
    """A controller with Ray's fleet. All methods are coroutines: a plain one would block the whole actor."""

    def __init__(
        self,
        plan: PoolPlan,
        name: str,
        models: ModelsSection,
        nodes: tuple[NodeId, ...] | None,
        namespace: str = "",
        epoch: int = 0,
    ) -> None:
        """`nodes` have the files of `models`, best first; () if this node has them, None on a single machine."""
        catalog = _catalog(plan, models, nodes)
        gc.set_threshold(CORE_GC_OBJECTS)
        sys.setswitchinterval(SWITCH_SECONDS)
        me = ray.get_runtime_context().current_actor
        succession = _succession(plan, namespace, name, epoch, me)
        ray_nodes, state = RayNodes(), SchedulerState(plan.scheduler)
        cordons = state.worker_table.cordons
        super().__init__(
            state=state,
            fleet=RayFleet(
                create=lambda new: _create_worker(
                    plan, new, me, succession, f"{namespace}/{name}", tuple(cordons.drained())
                ),
                needs=partial(_needs, plan),
                examiner=LossExaminer(ray_nodes),
                recent_view=partial(ray_nodes.recent, plan.nodes.poll_seconds),
                node_timeout_seconds=plan.node_timeout_seconds,
                start_timeout_seconds=plan.nodes.start_timeout_seconds,
                succession=succession,
                record_of=ray_nodes.actor,
            ),
            clock=SystemClock(),
            catalog=catalog,
            worker_ids=plan.worker_ids,
            pool=PoolIdentity(
                name,
                epoch,
                this_node(),
                plan.budget_bytes,
                plan.output,
                plan.auto_batch,
                plan.most_gpus,
                plan.has_run,
            ),
            cluster=WatchedCluster(
                ray_nodes,
                plan.nodes.poll_seconds,
                plan.elastic,
                ClusterFacts(None if nodes is None else ray_nodes, plan.gpus_per_worker > 0),
                plan.maintenance.obstacle,
            ),
            records=Records(
                Recorder(plan.record, plan.scheduler),
                None if plan.traces is None else open_traces(plan.traces, name),
                None if plan.log is None else PoolLog(),
                _archive(plan.checkpoints),
                _history(plan.journal, name),
            ),
            models=NamedModels(tuple(plan.pins), tuple(plan.named)),
            heartbeat_seconds=plan.nodes.heartbeat_seconds,
        )
        self._log_file = (
            None
            if plan.log is None
            else open_log_file(pool_log_path(plan.log.path, name), plan.log.is_json, is_required=not plan.has_run)
        )
        self._ray_metrics = RayMetrics(name)
        self._metrics_seconds = plan.metrics_seconds

    async def open(self) -> None:
        """As `Controller.open`; also starts the export of metrics."""
        await super().open()
        if self._metrics_seconds:
            self._upkeep.append(asyncio.ensure_future(self._keep_exporting(self._metrics_seconds)))

    async def close(self) -> None:
        """As `Controller.close`; also closes the log."""
        await super().close()
        if self._log_file is not None:
            self._log_file.close()

    async def _keep_exporting(self, interval_seconds: float) -> None:
        """Pass the metrics on to Ray, at longer intervals if they take much time: a queue may be very long."""
        while True:
            began = time.thread_time()
            try:
                self._ray_metrics.export(await self.metrics())
            except Exception:  # Ray's part of it: the pool works without
                logger.exception("metrics are no longer passed on to Ray")
                return
            spent_seconds = time.thread_time() - began
            await asyncio.sleep(max(interval_seconds, spent_seconds / EXPORT_SHARE))

    async def process_environment(self) -> dict[str, Any]:
        """Return the runtime environment in which other processes have this one's code, and start as it did."""
        own = ray.get_runtime_context().runtime_env
        return {name: own[name] for name in ("py_modules", PY_EXECUTABLE) if own.get(name)}

    async def steps_done_packed(self, steps: bytes) -> None:
        """As `steps_done`, packed."""
        await self.steps_done(unpacked(steps))

    async def events_packed(self, asked: bytes) -> PackedEvents:
        """As `events`, packed, with small results; see `PACKED_CALLS`."""
        events: DriverEvents = await self.events(*unpacked(asked))
        results = [job.result for job in events.ended]
        if places := travelling(events.ended):
            values = await asyncio.gather(*(_small_result(events.ended[place]) for place in places))
            for place, value in zip(places, values, strict=True):
                results[place] = value
        return packed_events(events, results)

    async def submit_packed(self, submission: bytes) -> bytes:
        """As `submit`, packed."""
        return packed(await self.submit(unpacked(submission)))

    async def check_each_packed(self, submission: bytes) -> bytes:
        """As `check_each`, packed."""
        return packed(await self.check_each(unpacked(submission)))

    async def save_state(self, saved: StateSaved, state: bytes | RunState) -> None:
        """As `state_saved`, for the state itself: it is stored here, since an object that the worker stored would be
        lost with the worker."""
        held = await self._fleet.hold(cast(Result, state))  # bytes, if it is packed
        await self.state_saved(saved, held, result_of(state))


class GpuWorkerActor(GpuWorker):
    """A worker that reports its steps to a controller, leaves traces of its sudden end, passes on notices of its node's
    end, and does not outlive the node's raylet, nor its lease."""

    def __init__(self, new: WorkerOrigin, plan: PoolPlan, controller: ActorHandle[Any], pool: str) -> None:
        """`pool` is its name with its namespace."""
        _die_with_raylet()
        trace = open_trace(new.trace)
        self._origin = new
        #: replaced by `follow`
        self._controller = controller

        def on_steps(steps: Sequence[StepDone]) -> None:
            self._controller.steps_done_packed.remote(packed(steps))

        def on_preview(made: PreviewMade) -> None:
            self._controller.preview_made.remote(made)

        def on_state(saved: StateSaved, state: RunState) -> None:
            self._controller.save_state.remote(saved, packed_result(state, saved.state_bytes))

        def on_judged(files: tuple[JudgedFile, ...], epoch: int) -> None:
            self._controller.files_judged.remote(self._worker_id, self._incarnation, files, epoch)

        def on_notice(deadline: float | None, reason: str) -> None:
            self._controller.node_notice.remote(node, deadline, reason)

        def end_unneeded() -> None:
            if trace is not None:
                trace.close()
            os._exit(0)

        node = this_node()
        controller.worker_placed.remote(new.worker_id, new.incarnation, node)
        lease = WorkerLease(new.epoch, plan.worker_lease_seconds)
        super().__init__(
            new.worker_id,
            new.incarnation,
            plan.open_engine,
            WorkerCallbacks(on_steps, on_state, on_preview, on_judged),
            node=WorkerNode(node, plan.cache, "" if plan.cache is None else ray.util.get_node_ip_address()),
            checkpointing=NO_CHECKPOINTS if plan.checkpoints is None else _checkpointing(plan.checkpoints),
            lease=lease,
            overlaps_decode=plan.overlaps_decode,
        )
        LeaseWatch(lease, end_unneeded).start()
        self._notices = NoticePoller(
            plan.nodes.notice_command,
            plan.nodes.notice_seconds,
            notice_lock(trace_folder(), pool, node) if trace else None,
            on_notice,
            trace.refresh if trace else lambda: None,
        )
        self._notices.start()

    def follow(self, epoch: int, controller: ActorHandle[Any]) -> tuple[WorkerOrigin, WorkerProcess]:
        """As `change_controller`; returns what this worker was created for, too."""
        process = self.change_controller(epoch)
        self._controller = controller
        self._notices.tell_again()
        return self._origin, process

    def adopt(self, worker_id: WorkerId, incarnation: int, epoch: int = 0) -> StartedWorker:
        """See `GpuWorker.adopt`."""
        self._controller.worker_placed.remote(worker_id, incarnation, this_node())
        return super().adopt(worker_id, incarnation, epoch)

    def gang_address(self, host: str = "") -> str:
        """See `GpuWorker.gang_address`; without `host` the address of this node."""
        return super().gang_address(host or ray.util.get_node_ip_address())

    def beat(self, epoch: int = 0) -> bool:
        """See `WorkerGrowth.beat`."""
        return self.growth.beat(epoch)

    def grow(self, epoch: int = 0) -> Residency:
        """See `WorkerGrowth.grow`."""
        return self.growth.grow(epoch)

    def call_here(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a function of `actors.ray.ray_losses` about another worker of this machine, which is gone or silent."""
        return function(argument)

    def run_packed(self, asked: bytes, *inputs: Result | bytes) -> tuple[bytes | Result | None, ...]:
        """As `run`, packed; see `RayFleet.run`."""
        call, requests = unpacked(asked)
        return _packed_ends(self.run(call, requests, *map(result_of, inputs)), len(requests))

    def join_packed(self, asked: bytes, *inputs: Result | bytes) -> bytes:
        """As `join`, packed; see `RayFleet.join`."""
        call, request = unpacked(asked)
        return packed(self.join(call, request, *map(result_of, inputs)))

    def ends_packed(self, asked: bytes) -> tuple[bytes | Result | None, ...]:
        """As `ends`, packed; see `RayFleet.ends`."""
        wanted: EndsWanted = unpacked(asked)
        return _packed_ends(self.ends(wanted), wanted.most)


async def _small_result(job: JobEnded) -> ResultRef | None:
    """Return the packed result of a job, which Ray has sent here with the answer of its run; the reference if it has
    not, or does not give it at once: the other ends do not wait for it."""
    try:
        async with asyncio.timeout(SMALL_RESULT_SECONDS):
            value = await cast("ray.ObjectRef[Any]", job.result)
    except (RayError, TimeoutError):  # the reader of the reference gets the error
        return job.result
    return value if isinstance(value, bytes) else job.result


def _packed_ends(ends: RunEnds, count: int) -> tuple[bytes | Result | None, ...]:
    """Return the packed reports, then `count` results, each packed if it is small: those after the ends are None."""
    results = [
        None if report is None else packed_result(result, report.result_bytes)
        for report, result in zip(ends.reports, ends.results, strict=True)
    ]
    return packed(ends.reports), *results, *[None] * (count - len(results))


def _archive(settings: CheckpointSettings | None) -> CheckpointArchive | None:
    """Return the archive of a controller: in the configured folder, or where the workers of its node save theirs."""
    if settings is None:
        return None
    own = own_checkpoints()
    folder = own if settings.folder is None else settings.folder.expanduser()
    return CheckpointArchive(_disk(settings, folder), is_shared=folder == own)


def _history(journal: Path | Literal[False] | None, name: str) -> PoolHistory | None:
    """Return the history beside a journal; None for a pool without one."""
    if journal is False:
        return None
    try:
        return PoolHistory(history_path(journal_path(journal, name)))
    except OutputFailed as failed:  # the job service says so, too, and the pool does not start
        logger.warning("the pool keeps no history: %s", failed)
        return None


def _disk(settings: CheckpointSettings, folder: Path) -> CheckpointDisk:
    return CheckpointDisk(settings.folder_at(folder))


def _checkpointing(settings: CheckpointSettings) -> Checkpointing:
    return Checkpointing(settings.seconds, _disk(settings, own_checkpoints()))


def start_controller(
    plan: PoolPlan,
    namespace: str,
    name: str,
    place: ControllerPlace = "driver",
    models: ModelsSection | None = None,
    environment: Mapping[str, Any] | None = None,
) -> tuple[ActorHandle[Any], int]:
    """Start a controller and wait until it answers; its workers are still starting. Returns it and its epoch.

    place        its node: the head of the cluster, or this process's
    models       the files that the catalog needs; it runs on a node that has them. None on a single machine
    environment  the runtime environment of the pool's actors, in addition to the job's

    Raises UserError if the name is taken, if no node has the model files, and if the controller cannot write its event
    log.
    """
    driver, view = this_node(), read_cluster()
    epoch = 0 if plan.worker_lease_seconds is None else next_epoch(namespace, name)
    node = controller_node(view, place, driver)
    nodes = view.alive
    elsewhere = None if models is None else catalog_nodes(models, node, driver, nodes, environment)
    options = {"namespace": namespace, "name": name, **on_node(node), **PLAIN}
    if environment is not None:
        options["runtime_env"] = dict(environment)
    try:
        controller: ActorHandle[Any] = (
            ray.remote(ControllerActor)
            .options(**options)
            .remote(plan, name, models or ModelsSection(), elsewhere, namespace, epoch)
        )
    except ValueError as taken:
        raise UserError(f"this Ray cluster already has a pool called {name!r}; choose another name") from taken
    try:
        ray.get(controller.open.remote())
    except RayTaskError as raised:
        if isinstance(raised.cause, OutputFailed) and node != driver:
            raise OutputFailed(f"{raised.cause}, on node {names_of(nodes).get(node, node)}") from None
        raise raised.cause from None
    except RayActorError as lost:
        raise UserError(
            f"the controller of the pool could not start on node {names_of(nodes).get(node, node)}: "
            f"{' '.join(_COLOURS.sub('', str(lost)).split())}"
        ) from lost
    return controller, epoch


def controller_node(view: ClusterView, place: ControllerPlace, driver: NodeId) -> NodeId:
    """Return the node for a controller. Raises UserError if that node cannot run one."""
    node = view.head if place == "head" else view.node(driver)
    if node is None and place == "head":
        raise UserError(
            'controller = "head": the head node of this Ray cluster is not alive or runs no raylet; use "driver"'
        )
    if node is not None and node.drain_deadline is not None:
        other = "driver" if place == "head" else "head"
        raise UserError(
            f'controller = "{place}": node {names_of(view.alive)[node.node_id]} is being drained, and nothing starts '
            f'there any more; use "{other}"'
        )
    return driver if node is None else node.node_id


def find_controller(namespace: str, name: str) -> ActorHandle[Any]:
    """Return the controller that another driver started. Raises UserError if there is none."""
    try:
        return ray.get_actor(name, namespace)
    except ValueError as missing:
        raise UserError(
            f"no pool called {name!r} is running in namespace {namespace!r} of this Ray cluster"
        ) from missing


def _succession(
    plan: PoolPlan, namespace: str, name: str, epoch: int, controller: ActorHandle[Any]
) -> Succession | None:
    """Return how the workers of a pool outlive this controller; None if they do not."""
    if plan.worker_lease_seconds is None:
        return None
    code = tuple(ray.get_runtime_context().runtime_env.get("py_modules") or ())
    return Succession(
        namespace=namespace,
        pool=name,
        epoch=epoch,
        lease_seconds=plan.worker_lease_seconds,
        controller=controller,
        kind_of=lambda group: worker_kind(plan, group, code),
        on_replaced=lambda: os._exit(1),  # another controller has everything that this one had
    )


def _create_worker(
    plan: PoolPlan,
    new: WorkerOrigin,
    controller: ActorHandle[Any],
    succession: Succession | None,
    pool: str,
    drained: tuple[NodeId, ...] = (),
) -> ActorHandle[Any]:
    """Start a worker, on none of the nodes that an operator has `drained`."""
    detached = {} if succession is None else detached_options(succession.namespace, succession.pool, new)
    actor_class = ray.remote(
        **_needs(plan, new.group).options_beside(drained),
        **PLAIN,
        **detached,
        concurrency_groups=worker_threads(plan.overlaps_decode),
    )(GpuWorkerActor)
    worker: ActorHandle[Any] = actor_class.remote(new, plan, controller, pool)
    return worker


def _needs(plan: PoolPlan, group: str) -> WorkerNeeds:
    """Return the resources of a worker of `group`."""
    return worker_needs(plan.gpus_per_worker, _cpu_slots(plan), plan.group(group), accelerator_types())


def _cpu_slots(plan: PoolPlan) -> int:
    """Return Ray's CPU slots for one worker. Without a GPU: one on a cluster, so that Ray spreads the workers; none
    on a single node, where a second pool would otherwise wait for slots forever.
    """
    if plan.gpus_per_worker:
        return 0
    return 1 if len(read_cluster().alive) > 1 else 0


def _catalog(plan: PoolPlan, models: ModelsSection, nodes: Sequence[NodeId] | None) -> CatalogQueries:
    """Start the catalog: on the first of `nodes`, or in a process next to this one, which starts meanwhile."""
    opener = plan.open_catalog if plan.cache is None else partial(_open_catalog_here, plan)
    if nodes:
        return RemoteCatalog(opener, nodes, partial(search_again, models, this_node()), plan.computed_by)
    if plan.cache is not None:  # Ray is not in that process
        opener = partial(plan.open_catalog, cache=plan.cache, host=ray.util.get_node_ip_address())
    python = python_command(os.environ)
    # cloudpickle: of a function of a user's program, too
    return CatalogProcess(ray.cloudpickle.dumps(opener), python, plan.computed_by)


def _open_catalog_here(plan: PoolPlan) -> ListingCatalog:
    """Open the catalog in the process that answers its questions, with the cache of that node."""
    return plan.open_catalog(cache=plan.cache, host=ray.util.get_node_ip_address())


def _die_with_raylet() -> None:
    """Have the kernel end this process with its raylet, which does not always manage to do it itself."""
    parent = Path(f"/proc/{os.getppid()}/comm")
    if parent.exists() and parent.read_text().strip() == "raylet":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
