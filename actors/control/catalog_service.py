"""The catalog service: answers questions about models from one thread, without blocking the event loop.

A pool has it in a process of its own (`catalog_process`): dry runs would take the interpreter from the controller. The
catalog imports torch and diffusers and reads files; all of it, including opening, happens in the thread. Answers
about the content of files are cached; names are looked up again for each question.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar, TypeVarTuple

from modelpool.actors.control.catalog_questions import CatalogQuestion
from modelpool.actors.control.opened_catalog import ListingCatalog, OpenedCatalog
from modelpool.pool.devices.kind_names import AUTO
from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.specs.spec import RunCost, TaskSpec

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: successful runs that are collected before the catalog is updated. Updating it for each run would cost the event loop
#: more than most of its other work for a task
LEARN_BATCH = 256


def open_catalog(
    model_folders: Sequence[Path],
    lora_folders: Sequence[Path],
    device: str,
    registry_folder: Path | None = None,
    allow_pickle: bool = False,
    assemblies: Sequence[Assembly] = (),
    sources: Sequence[str] = (),
    cache: CacheSettings | None = None,
    host: str = "",
) -> ListingCatalog:
    """Open the real catalog of these folders, models of separate files, models added to the registry, and files of
    sources, with descriptions kept in `cache`; `host` is the address at which other nodes get its files.

    Sizes are estimated for the weakest local GPU of one kind, or for the assumptions about such GPUs. `device` is the
    name of the kind, or "auto"; `allow_pickle` permits PyTorch pickles. Imports torch; allocates no GPU memory.
    """
    from modelpool.pool.catalog.catalog import Catalog as PoolCatalog
    from modelpool.pool.catalog.registry.remote_models import open_remote
    from modelpool.pool.devices.detection import capabilities_here

    found = capabilities_here(device)
    remote = open_remote(sources, cache, host)
    return PoolCatalog(
        model_folders, lora_folders, found, registry_folder, True, allow_pickle, assemblies, remote, device != AUTO
    )


class CatalogQueries(Protocol):
    """Answers questions about models: `CatalogProcess` on this node, `actors.ray.remote_catalog` on another one, and
    `CatalogService` in the same process."""

    async def ask(self, question: CatalogQuestion[*Ts, T], *arguments: *Ts) -> T:
        """Return the answer to a question of `catalog_questions`. Raises what it raises."""

    @property
    def files_address(self) -> str:
        """The address at which other nodes get files that this node fetched to hash them; "" without sources."""

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """Note a successful run of `task`, without waiting; later graphs use the measurement."""

    def close(self) -> None:
        """Stop answering. Idempotent."""


class CatalogService:
    """Calls one catalog from one thread."""

    def __init__(
        self,
        open_catalog: Callable[[], ListingCatalog],
        executor: Executor | None = None,
        computed_by: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`executor` must have one thread; tests pass one that runs calls at once. `computed_by` is for recipes."""
        self._computed_by = dict(computed_by)
        self._open_catalog = open_catalog
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="catalog")
        self._opened: OpenedCatalog | None = None
        #: filled on the event loop, emptied by the catalog's thread
        self._measured: deque[tuple[TaskSpec, RunCost]] = deque()

    @property
    def files_address(self) -> str:
        """See `CatalogQueries`."""
        return "" if self._opened is None else self._opened.files_address

    async def ask(self, question: CatalogQuestion[*Ts, T], *arguments: *Ts) -> T:
        """See `CatalogQueries`."""

        def answer() -> T:
            opened = self._open()
            opened.forget_names()
            self._flush_measured()
            try:
                return question.answer(opened, *arguments)
            except StopIteration as error:  # a future cannot hold it: the caller would wait forever
                raise RuntimeError(f"internal error: {error!r}") from error

        return await asyncio.get_running_loop().run_in_executor(self._executor, answer)

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """See `CatalogQueries`."""
        self._measured.append((task, cost))
        if len(self._measured) % LEARN_BATCH == 0:
            with contextlib.suppress(RuntimeError):  # closed: no more graphs are built
                self._executor.submit(self._flush_measured)

    async def open(self) -> None:
        """Open the catalog now instead of with the first question."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._open)

    def close(self) -> None:
        """See `CatalogQueries`."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _open(self) -> OpenedCatalog:
        if self._opened is None:
            self._opened = OpenedCatalog(self._open_catalog(), self._computed_by)
        return self._opened

    def _flush_measured(self) -> None:
        """Pass the collected measurements to the catalog, in order. Runs in the catalog's thread."""
        while self._measured:
            task, cost = self._measured.popleft()
            if self._opened is not None:
                self._opened.files.learn(task, cost)
