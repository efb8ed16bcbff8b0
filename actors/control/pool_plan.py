"""Decides the shape of a pool from its configuration and the available GPUs. Pure; the result can be pickled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from modelpool.actors.control.catalog_service import ListingCatalog, open_catalog
from modelpool.actors.settings.config import PoolConfig
from modelpool.actors.worker.gpu_worker import WorkerEngine, open_engine
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.devices.kind_names import AUTO, RAY_COUNTS, DeviceKind, choose_kind
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.fetch.cache_settings import CacheSettings
from modelpool.pool.specs.spec import WorkerId
from modelpool.scheduler.tables.config import SchedulerConfig

#: number of workers for workers = "all" without GPUs
SIMULATED_WORKERS = 2


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The arguments of a controller.

    gpus_per_worker  of Ray's GPU resource; 0 for workers that use a CPU instead
    open_engine      called in each worker's process
    open_catalog     called in the controller's process; with sources, with `cache` and `host` of its node
    record           the file for the scheduler's event log; None records nothing
    cache            the folder of each node for fetched files; None without sources
    """

    worker_ids: tuple[WorkerId, ...]
    gpus_per_worker: int
    budget_bytes: int | None
    open_engine: Callable[[], WorkerEngine]
    open_catalog: Callable[..., ListingCatalog]
    scheduler: SchedulerConfig
    record: Path | None = None
    cache: CacheSettings | None = None


def most_workers(config: PoolConfig) -> int:
    """Return how many workers without GPUs a Ray that is started for `config` must have room for."""
    return SIMULATED_WORKERS if config.pool.workers == "all" else int(config.pool.workers)


def plan_pool(config: PoolConfig, gpu_count: int, can_grow: bool) -> PoolPlan:
    """Plan a pool for a cluster with `gpu_count` GPUs now; one that `can_grow` may request more than that.

    Each worker detects the kind of its GPU and the default policy itself: this machine may have no GPU. Raises
    UserError if there are not enough GPUs.
    """
    wanted = config.pool
    kind = _kind(config, gpu_count)
    count = _workers(wanted.workers, kind, gpu_count, can_grow)
    device = AUTO if wanted.device == AUTO and kind in RAY_COUNTS else kind.value
    return PoolPlan(
        worker_ids=tuple(WorkerId(f"gpu-{i}") for i in range(count)),
        gpus_per_worker=1 if kind in RAY_COUNTS else 0,
        budget_bytes=wanted.budget_bytes,
        open_engine=partial(
            open_engine,
            device,
            wanted.budget_bytes,
            wanted.threads,
            vram_policy=wanted.policy,
            reserve_bytes=wanted.reserve_bytes,
        ),
        open_catalog=partial(
            open_catalog,
            config.models.folders,
            config.models.loras,
            device,
            config.models.registry,
            config.models.allow_pickle,
            config.models.assemblies,
            config.models.sources,
        ),
        scheduler=config.scheduler,
        record=config.output.record,
        cache=config.models.cache_settings,
    )


def _kind(config: PoolConfig, gpu_count: int) -> DeviceKind:
    """Return the device kind, as far as it is known here."""
    requested = None if config.pool.device == AUTO else DeviceKind(config.pool.device)
    return choose_kind(requested, (), gpu_count > 0, config.pool.policy is VramPolicy.DISABLED)


def _workers(wanted: int | str, kind: DeviceKind, gpu_count: int, can_grow: bool) -> int:
    """Return the number of workers. Raises UserError for more than can be isolated from each other."""
    if kind in RAY_COUNTS:
        count = wanted if isinstance(wanted, int) else gpu_count
        if count == 0:
            raise unusable_field("device", kind.value, "sim or cpu on a machine without GPUs in Ray")
        if count > gpu_count and not can_grow:
            raise unusable_field("workers", count, f"at most {gpu_count}, one for each GPU in Ray")
        return count
    if kind.computes_on_host:
        return wanted if isinstance(wanted, int) else SIMULATED_WORKERS
    if wanted not in (1, "all"):
        raise unusable_field("workers", wanted, f"1: Ray cannot assign a separate {kind.facts.title} to each worker")
    return 1
