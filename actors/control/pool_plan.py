"""Decides the shape of a pool from its configuration and the available GPUs. Pure; the result can be pickled."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from modelpool.actors.config.config import ObservabilitySection, PoolConfig, PoolSection
from modelpool.actors.config.maintenance_section import MaintenanceSection
from modelpool.actors.config.output_address import NO_OUTPUT, OutputDefaults
from modelpool.actors.control.catalog_service import open_catalog
from modelpool.actors.control.computed_by import AS_USUAL, setting_of
from modelpool.actors.control.log_file import LogSettings
from modelpool.actors.control.opened_catalog import ListingCatalog
from modelpool.actors.graph.features.auto_batch import AS_MEASURED, AutoBatch
from modelpool.actors.worker.gpu_worker import Measuring, WorkerEngine, open_engine
from modelpool.actors.worker.process_memory import ProcessMemory
from modelpool.actors.worker.step_checkpoints.checkpoint_folder import CheckpointSettings
from modelpool.actors.worker.wire.message_fields import message_fields
from modelpool.actors.worker.wire.messages import (
    CallId,
    EndsWanted,
    LoadReport,
    LoadRequest,
    PreviewMade,
    RunRequest,
    StartedWorker,
    StateSaved,
    StepDone,
)
from modelpool.pool.devices.kind_names import (
    AUTO,
    NO_GPU,
    NO_SIMULATION,
    RAY_COUNTS,
    DeviceKind,
    choose_kind,
    host_kind,
    one_worker,
)
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.results import Result
from modelpool.pool.values.core.stage_params import PreloadRequest
from modelpool.pool.values.specs.resident import Resident
from modelpool.pool.values.specs.spec import ComponentUse, ExecutionMode, FileOnDisk, RunError, TaskReport, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.node_groups import NodeGroup

if TYPE_CHECKING:
    from modelpool.pool.inference.operations.own_nodes import OpenedNode


class HasNodes(Protocol):
    """An engine or a catalog."""

    own_nodes: Mapping[str, OpenedNode]


Opened = TypeVar("Opened")

#: number of workers for workers = "all" without GPUs
SIMULATED_WORKERS = 2
#: what a worker reads and sends, and those parts of them that compiled classes do not tell: they are in tuples
_MESSAGES = (
    RunRequest,
    LoadRequest,
    PreloadRequest,
    Result,
    TaskReport,
    CallId,
    EndsWanted,
    LoadReport,
    StartedWorker,
    StateSaved,
    StepDone,
    PreviewMade,
    ProcessMemory,
)
_PARTS = (ComponentUse, ExecutionMode, FileOnDisk, Resident, RunError)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """How a pool watches and requests nodes (`ClusterSection` describes the fields)."""

    poll_seconds: float = 2.0
    start_timeout_seconds: float = 600.0
    notice_command: str = ""
    notice_seconds: float = 5.0
    heartbeat_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The arguments of a controller.

    gpus_per_worker  of Ray's GPU resource; 0 for workers that use a CPU instead. Simulated GPUs of a joined cluster
                     occupy its GPUs if it has any (they may be simulated too), so that they spread as real ones would
    open_engine      called in each worker's process
    open_catalog     called in the catalog's process; with sources, with `cache` and `host` of its node
    record           the file for the scheduler's event log; None records nothing
    elastic          whether the pool has a worker for each GPU of the cluster, as nodes join and leave
    cache            the folder of each node for fetched files; None without sources
    pins             models that stay on GPUs from the start, and on how many each
    checkpoints      how sampling runs are saved; None: not at all
    worker_lease_seconds  time without a call from a controller after which a worker ends itself; None: workers end with
                     their controller, which is not replaced
    metrics_seconds  interval at which metrics are passed on to Ray; 0: they are not
    log              the file of the pool's log; None: there is none
    traces           name of the exporter of OpenTelemetry traces; None: there are none
    output           for drivers that connect
    named            models with settings of their own
    most_gpus        workers that may share a run
    overlaps_decode  whether a worker begins the next run while the GPU decodes, where it can
    journal          file of the journal, beside which the controller keeps a history; None for the usual place, False
                     for a pool without one
    maintenance      when and how far the pool may be disrupted on purpose
    computed_by      settings that change pixels, by name, where they differ from the defaults; for recipes
    auto_batch       what decides about the batch size "auto"
    has_run          whether a controller of this pool has run before: no file that has gone since ends the next one
    """

    worker_ids: tuple[WorkerId, ...]
    gpus_per_worker: int
    budget_bytes: int | None
    open_engine: Callable[[], WorkerEngine]
    open_catalog: Callable[..., ListingCatalog]
    scheduler: SchedulerConfig
    record: Path | None = None
    nodes: NodeSettings = NodeSettings()
    elastic: bool = False
    cache: CacheSettings | None = None
    pins: tuple[tuple[str, int], ...] = ()
    checkpoints: CheckpointSettings | None = None
    worker_lease_seconds: float | None = None
    metrics_seconds: float = 0.0
    traces: str | None = None
    output: OutputDefaults = NO_OUTPUT
    log: LogSettings | None = None
    computed_by: Mapping[str, str] = field(default_factory=dict)
    auto_batch: AutoBatch = AS_MEASURED
    overlaps_decode: bool = False
    most_gpus: int = 1
    named: tuple[str, ...] = ()
    journal: Path | Literal[False] | None = False
    maintenance: MaintenanceSection = field(default_factory=MaintenanceSection)
    has_run: bool = False

    def group(self, name: str) -> NodeGroup | None:
        """Return the group with this name; None for "". Raises KeyError if there is none."""
        return {group.name: group for group in self.scheduler.groups}[name] if name else None

    def node_timeout_seconds(self, group: str) -> float | None:
        """Return how long a worker of `group` may wait for a node: at least twice the group's usual start. None,
        without end, for workers without a group, which wait for GPUs that others use."""
        found = self.group(group)
        return None if found is None else max(self.nodes.start_timeout_seconds, 2 * found.start_seconds)


def worker_kind(plan: PoolPlan, group: str, code: tuple[str, ...] = ()) -> str | None:
    """Return a digest of everything that the process of a worker of `group` depends on; None if there is no such group.

    code  names of the packages that it imports from, if they were sent

    Unequal digests of equal plans do no harm but to start a worker again.
    """
    if group and group not in {known.name for known in plan.scheduler.groups}:
        return None
    depends_on = (
        plan.open_engine,
        plan.gpus_per_worker,
        plan.group(group),
        plan.cache,
        plan.nodes.notice_command,
        plan.nodes.notice_seconds,
        plan.checkpoints,
        plan.worker_lease_seconds,
        plan.overlaps_decode,
        code,
        # a worker that an earlier version has started reads and sends its own forms only
        message_fields(*_MESSAGES, *_PARTS),
    )
    return hashlib.sha256(pickle.dumps(depends_on)).hexdigest()


def most_workers(config: PoolConfig) -> int:
    """Return how many workers without GPUs a Ray that is started for `config` must have room for."""
    return SIMULATED_WORKERS if config.pool.workers == "all" else int(config.pool.workers)


def plan_pool(config: PoolConfig, gpu_count: int, can_grow: bool) -> PoolPlan:
    """Plan a pool for a cluster with `gpu_count` GPUs now; one that `can_grow` may request more than that.

    Each worker detects the kind of its GPU and the default policy itself: this machine may have no GPU. A pool of all
    GPUs of a cluster waits for nodes that join. Raises UserError if there are not enough GPUs, and for the device
    "auto" on a cluster without any: whether to wait for GPUs or to simulate them is the user's decision.
    """
    wanted = config.pool
    if wanted.device == AUTO and can_grow and gpu_count == 0 and not config.scheduler.groups:
        expected = '"cuda" (or another GPU kind) to wait for GPU nodes, or "sim" or "cpu": the cluster has no GPU now'
        raise unusable_field("device", AUTO, expected)
    kind = _kind(config, gpu_count)
    if kind is DeviceKind.SIM and host_kind() is not DeviceKind.SIM:
        raise unusable_field("device", kind.value, NO_SIMULATION)
    on_ray_gpus = kind in RAY_COUNTS or (kind is DeviceKind.SIM and can_grow and gpu_count > 0)
    groups = config.scheduler.groups
    # the core requests the workers of groups
    count = 0 if groups else _workers(wanted.workers, kind, gpu_count, can_grow, on_ray_gpus)
    device = AUTO if wanted.device == AUTO and (kind in RAY_COUNTS or groups) else kind.value
    return PoolPlan(
        worker_ids=tuple(WorkerId(f"gpu-{i}") for i in range(count)),
        gpus_per_worker=1 if on_ray_gpus else 0,
        budget_bytes=wanted.budget_bytes,
        open_engine=_with_nodes(
            config.workflows.nodes,
            open_engine,
            device,
            wanted.budget_bytes,
            wanted.threads,
            vram_policy=wanted.policy,
            reserve_bytes=wanted.reserve_bytes,
            products=wanted.products,
            measuring=Measuring(wanted.attention == "measured", wanted.gang_link_bytes_per_second),
            loras_at_run_time=wanted.loras == "runtime",
            memory_format=wanted.memory_format,
            fast_paths=wanted.fast_paths,
        ),
        open_catalog=_with_nodes(
            config.workflows.nodes,
            open_catalog,
            config.models.folders,
            config.models.loras,
            device,
            config.models.registry,
            config.models.allow_pickle,
            config.models.assemblies,
            config.models.sources,
        ),
        scheduler=replace(config.scheduler, max_unavailable_nodes=config.maintenance.max_unavailable),
        maintenance=config.maintenance,
        record=config.output.record,
        elastic=on_ray_gpus and can_grow and wanted.workers == "all" and not groups,
        nodes=NodeSettings(
            poll_seconds=config.cluster.poll_seconds,
            start_timeout_seconds=config.cluster.start_timeout,
            notice_command=config.cluster.notice_command,
            notice_seconds=config.cluster.notice_seconds,
            heartbeat_seconds=config.cluster.heartbeat_seconds,
        ),
        cache=config.models.cache_settings,
        pins=config.models.pins,
        checkpoints=_checkpoints(wanted, device),
        metrics_seconds=config.observability.export_seconds(own_ray=not can_grow),
        traces=config.observability.traces,
        output=config.output.defaults,
        log=_log(config.observability),
        computed_by=_computed_by(wanted),
        auto_batch=auto_batch_of(config),
        overlaps_decode=wanted.overlap_decode,
        most_gpus=wanted.most_gpus,
        named=tuple(each.name for each in wanted.models),
    )


def _with_nodes(
    names: tuple[str, ...], opens: Callable[..., Opened], *args: Any, **kwargs: Any
) -> Callable[..., Opened]:
    """Return what opens an engine or a catalog that has these nodes of users; without any, as before there were some:
    equal settings are workers of one kind."""
    opened = partial(opens, *args, **kwargs)
    return partial(open_with_nodes, opened, names) if names else opened


def open_with_nodes(opens: Callable[..., Opened], names: tuple[str, ...], **kwargs: Any) -> Opened:
    """Open an engine or a catalog with these nodes of users, in its own process. Raises UserError."""
    from modelpool.pool.inference.operations.own_nodes import open_nodes

    nodes = open_nodes(names)  # first: an engine takes longer
    opened = opens(**kwargs)
    cast(HasNodes, opened).own_nodes = nodes
    return opened


def _log(wanted: ObservabilitySection) -> LogSettings | None:
    """Return the log that is configured; None if there is none."""
    return LogSettings(wanted.log, wanted.log_format == "json") if isinstance(wanted.log, Path) else None


def auto_batch_of(config: PoolConfig) -> AutoBatch:
    """Return what decides about the batch size "auto": the size, the memory of the smallest GPU of the pool, and the
    number of workers, as far as the configuration says them."""
    wanted, groups = config.pool, config.scheduler.groups
    least_bytes = min((group.gpu_bytes for group in groups if group.gpu_bytes), default=None)
    size = wanted.batch if isinstance(wanted.batch, int) else 0
    workers = 1 if groups or wanted.workers == "all" else int(wanted.workers)
    return AutoBatch(size, least_bytes if wanted.budget_bytes is None else wanted.budget_bytes, workers)


def _computed_by(pool: PoolSection) -> dict[str, str]:
    """Return the settings that change pixels, on whatever device, and differ from the defaults."""
    fields = PoolSection.model_fields
    usual = {name: value for name in ("products", "compile") if (value := getattr(pool, name)) != fields[name].default}
    own = {setting_of("compile", each.name): each.compile for each in pool.models if each.compile is not None}
    own = {name: value for name, value in own.items() if value != pool.compile}
    return usual | {name: AS_USUAL if value == fields["compile"].default else value for name, value in own.items()}


def _checkpoints(pool: PoolSection, device: str) -> CheckpointSettings | None:
    """Return how runs on `device` are saved; None if they are not."""
    if not pool.checkpoint_seconds:
        return None
    computed_by = {**_computed_by(pool), "device": device, "threads": str(pool.threads)}
    return CheckpointSettings(pool.checkpoint_seconds, pool.checkpoint_bound_bytes, pool.archive, computed_by)


def _kind(config: PoolConfig, gpu_count: int) -> DeviceKind:
    """Return the device kind, as far as it is known here."""
    requested = None if config.pool.device == AUTO else DeviceKind(config.pool.device)
    return choose_kind(requested, (), gpu_count > 0, config.pool.policy is VramPolicy.DISABLED)


def _workers(wanted: int | str, kind: DeviceKind, gpu_count: int, can_grow: bool, on_ray_gpus: bool) -> int:
    """Return the number of workers. Raises UserError for more than can be isolated from each other."""
    if on_ray_gpus:
        count = wanted if isinstance(wanted, int) else gpu_count
        if count == 0 and not can_grow:
            raise unusable_field("device", kind.value, NO_GPU)
        if count > gpu_count and not can_grow:
            raise unusable_field("workers", count, f"at most {gpu_count}, one for each GPU in Ray")
        return count
    if kind.computes_on_host:
        return wanted if isinstance(wanted, int) else SIMULATED_WORKERS
    if wanted not in (1, "all"):
        raise unusable_field("workers", wanted, one_worker(kind))
    return 1
