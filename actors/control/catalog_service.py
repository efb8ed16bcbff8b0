"""The catalog service: answers questions about models from one thread, without blocking the event loop.

A pool has it in a process of its own (`catalog_process`): dry runs would take the interpreter from the controller. The
catalog imports torch and diffusers and reads files; all of it, including opening, happens in the thread. Answers
about the content of files are cached; names are looked up again for each question.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar

from modelpool.actors.control.computed_by import computed_by_of
from modelpool.actors.control.graph_shapes import BuiltRequest
from modelpool.actors.graph.build_graph import build_graph, build_stage_graph
from modelpool.actors.graph.common.graph_catalog import (
    ControlNetCatalog,
    EmbeddingCatalog,
    GraphCatalog,
    ImagePromptCatalog,
    UpscalerCatalog,
)
from modelpool.actors.graph.common.stage_request import StageLike
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.memory_fit import check_fits
from modelpool.actors.graph.task_files import task_files
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.models.loading.file_fingerprint import fingerprint
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.installed_versions import installed_versions
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.prompt_tokens import TokenizedPrompt
from modelpool.pool.values.core.sampling_facts import ModelDefaults
from modelpool.pool.values.core.stage_params import EncodeParams, LoraRef, ModelRef, ModelStageParams
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    ExecutionMode,
    JobId,
    Role,
    RunCost,
    TaskId,
    TaskSpec,
)

if TYPE_CHECKING:
    from modelpool.pool.catalog.registry.listings import FileNames, LoraListing, ModelListing

T = TypeVar("T")
K = TypeVar("K")

#: cached answers about combinations of models and LoRAs; each LoRA strength adds new ones
CACHE_ENTRIES = 4096
#: successful runs that are collected before the catalog is updated. Updating it for each run would cost the event loop
#: more than most of its other work for a task
LEARN_BATCH = 256
#: after this time, an answer holds no further requests: other callers get their turn
TURN_SECONDS = 0.05


class ListingCatalog(GraphCatalog, Protocol):
    """The catalog, as a pool needs it."""

    def models(self) -> tuple[ModelListing, ...]:
        """Every checkpoint."""

    def loras(self) -> tuple[LoraListing, ...]:
        """Every LoRA."""

    def file_names(self) -> FileNames:
        """The names of other files that requests name."""

    def tiny_decoders(self) -> tuple[tuple[str, str], ...]:
        """The files of tiny decoders with their names."""

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """Learn from the measured cost of a successful run."""


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
    sources, whose descriptions are kept in `cache`; `host` is the address at which other nodes get its files.

    Sizes are estimated for the weakest local GPU of one kind, or for the assumptions about such GPUs. `device` is the
    name of the kind, or "auto"; `allow_pickle` permits PyTorch pickles. Imports torch; allocates no GPU memory.
    """
    from modelpool.pool.catalog.catalog import Catalog as PoolCatalog
    from modelpool.pool.catalog.registry.remote_models import open_remote
    from modelpool.pool.devices.detection import capabilities_here

    found = capabilities_here(device)
    remote = open_remote(sources, cache, host)
    return PoolCatalog(model_folders, lora_folders, found, registry_folder, True, allow_pickle, assemblies, remote)


@dataclass(frozen=True, slots=True)
class PinnableModel:
    """The components of one model, and the fingerprints of their files as in `JobGraph`."""

    model: ModelRef
    components: tuple[tuple[Role, ComponentSpec], ...]
    fingerprints: Mapping[ComponentKey, str]

    @property
    def keys(self) -> tuple[ComponentKey, ...]:
        """The components, each once."""
        return tuple(dict.fromkeys(spec.key for _, spec in self.components))

    @property
    def parts(self) -> dict[ComponentKey, FilePart]:
        """The file of each component."""
        model = self.model
        return {
            spec.key: FilePart(model.path, role, model.assembly, model.files, model.sha256)
            for role, spec in self.components
        }


class CatalogQueries(Protocol):
    """Answers questions about models: `CatalogProcess` on this node, `actors.ray.remote_catalog` on another one, and
    `CatalogService` in the same process."""

    async def build_some(
        self, wanted: Sequence[tuple[JobId, GenerateRequest]], capacity_bytes: int | None, until_error: bool = False
    ) -> list[BuiltRequest | UserError]:
        """See `CatalogService`."""

    async def build_stage(
        self, stage: StageLike, job_id: JobId, given: frozenset[TaskId], capacity_bytes: int | None
    ) -> JobGraph:
        """See `CatalogService`."""

    async def weights(self, name: str) -> PinnableModel:
        """See `CatalogService`."""

    async def models(self) -> tuple[ModelListing, ...]:
        """See `CatalogService`."""

    async def loras(self) -> tuple[LoraListing, ...]:
        """See `CatalogService`."""

    async def file_names(self) -> FileNames:
        """See `CatalogService`."""

    async def tiny_decoders(self) -> tuple[tuple[str, str], ...]:
        """See `CatalogService`."""

    @property
    def files_address(self) -> str:
        """See `CatalogService`."""

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """See `CatalogService`."""

    def close(self) -> None:
        """See `CatalogService`."""


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
        self._plain: ListingCatalog | None = None
        self._catalog: CachedCatalog | None = None
        self._versions: dict[str, str] = {}
        #: filled on the event loop, emptied by the catalog's thread
        self._measured: deque[tuple[TaskSpec, RunCost]] = deque()
        self._fingerprints: LruCache[tuple[ComponentKey, FilePart], str] = LruCache(CACHE_ENTRIES)

    async def build_some(
        self, wanted: Sequence[tuple[JobId, GenerateRequest]], capacity_bytes: int | None, until_error: bool = False
    ) -> list[BuiltRequest | UserError]:
        """Convert requests to task graphs, or return their errors: those of the first, of further ones as long as the
        answer takes less than `TURN_SECONDS`, and `until_error` of none after one with an error."""

        def build(catalog: GraphCatalog) -> list[BuiltRequest | UserError]:
            built: list[BuiltRequest | UserError] = []
            over_at = time.monotonic() + TURN_SECONDS
            for job_id, request in wanted:
                try:
                    built.append(self._build_request(catalog, capacity_bytes, request, job_id))
                except UserError as problem:
                    built.append(problem)
                    if until_error:
                        break
                if time.monotonic() >= over_at:
                    break
            return built

        return await self._run(build)

    async def build_stage(
        self, stage: StageLike, job_id: JobId, given: frozenset[TaskId], capacity_bytes: int | None
    ) -> JobGraph:
        """Convert one stage and everything it needs except the `given` results. Raises UserError."""

        def graph(catalog: GraphCatalog) -> JobGraph:
            job = build_stage_graph(stage, job_id, catalog, given)
            if capacity_bytes is not None:
                check_fits(job.job, capacity_bytes)
            return self._with_fingerprints(job)

        return await self._run(graph)

    @property
    def files_address(self) -> str:
        """The address at which other nodes get files that this node fetched to hash them; "" without sources."""
        return str(getattr(self._plain, "files_address", ""))  # catalogs without sources need not have one

    async def weights(self, name: str) -> PinnableModel:
        """Return the weights of a model. Raises UserError if there is none of this name, or if it cannot be read."""

        def find(catalog: GraphCatalog) -> PinnableModel:
            model = catalog.find_model(name)
            found = PinnableModel(model, tuple(catalog.components(model).items()), {})
            return replace(found, fingerprints=self._fingerprints_of(found.parts))

        return await self._run(find)

    async def models(self) -> tuple[ModelListing, ...]:
        """Every checkpoint."""
        return await self._run(lambda catalog: catalog.models())

    async def loras(self) -> tuple[LoraListing, ...]:
        """Every LoRA."""
        return await self._run(lambda catalog: catalog.loras())

    async def file_names(self) -> FileNames:
        """The names of ControlNets, upscalers, image prompt adapters and embeddings."""
        return await self._run(lambda catalog: catalog.file_names())

    async def tiny_decoders(self) -> tuple[tuple[str, str], ...]:
        """The files of tiny decoders, for previews, each with the name of the decoder."""
        return await self._run(lambda catalog: catalog.tiny_decoders())

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """Note a successful run of `task`, without waiting; later graphs use the measurement."""
        self._measured.append((task, cost))
        if len(self._measured) % LEARN_BATCH == 0:
            self._start_flush()

    async def learn_all(self, measured: Sequence[tuple[TaskSpec, RunCost]]) -> None:
        """As `learn`, for several runs that a caller has collected."""
        self._measured.extend(measured)
        self._start_flush()

    async def open(self) -> None:
        """Open the catalog now instead of with the first question."""
        await self._run(lambda catalog: None)

    def close(self) -> None:
        """Stop answering."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _build_request(
        self, catalog: GraphCatalog, capacity_bytes: int | None, request: GenerateRequest, job_id: JobId
    ) -> BuiltRequest:
        recipe, job = build_graph(request, job_id, catalog)
        if capacity_bytes is not None:
            check_fits(job.job, capacity_bytes)
        found = replace(recipe, versions=self._versions, computed_by=computed_by_of(self._computed_by, recipe.model))
        return BuiltRequest(found, self._with_fingerprints(job))

    def _with_fingerprints(self, graph: JobGraph) -> JobGraph:
        """Add the fingerprints of all files, so that workers on other machines notice if theirs differ."""
        parts: dict[ComponentKey, FilePart] = {}
        for task in graph.job.tasks:
            parts.update(task_files(task, graph.works[task.task_id]))
        return replace(graph, fingerprints=self._fingerprints_of(parts))

    def _fingerprints_of(self, parts: Mapping[ComponentKey, FilePart]) -> dict[ComponentKey, str]:
        """Return the fingerprint of each file. Files that cannot be read here are left out: they are not checked. Those
        of sources are verified when they are fetched."""
        found: dict[ComponentKey, str] = {}
        for key, part in parts.items():
            if not part.files:
                with contextlib.suppress(UserError):
                    found[key] = self._fingerprints.get((key, part), partial(fingerprint, part))
        return found

    async def _run(self, question: Callable[[CachedCatalog], T]) -> T:
        def answer() -> T:
            if self._catalog is None:
                self._plain = self._open_catalog()
                self._catalog = CachedCatalog(self._plain)
                self._versions = installed_versions()
            self._catalog.forget_names()
            self._flush_measured()
            try:
                return question(self._catalog)
            except StopIteration as error:  # a future cannot hold it: the caller would wait forever
                raise RuntimeError(f"internal error: {error!r}") from error

        return await asyncio.get_running_loop().run_in_executor(self._executor, answer)

    def _start_flush(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed: no more graphs are built
            self._executor.submit(self._flush_measured)

    def _flush_measured(self) -> None:
        """Pass the collected measurements to the catalog, in order. Runs in the catalog's thread."""
        while self._measured:
            task, cost = self._measured.popleft()
            if self._plain is not None:
                self._plain.learn(task, cost)


class CachedCatalog:
    """A catalog that caches its answers. All of them except names depend only on the content of files."""

    def __init__(self, catalog: ListingCatalog) -> None:
        self._catalog = catalog
        self._models: LruCache[str, ModelRef] = LruCache(CACHE_ENTRIES)
        self._decoders: LruCache[tuple[ModelRef, str], ModelRef] = LruCache(CACHE_ENTRIES)
        self._loras: LruCache[tuple[str, float], LoraRef] = LruCache(CACHE_ENTRIES)
        self._components: LruCache[ModelRef, Mapping[Role, ComponentSpec]] = LruCache(CACHE_ENTRIES)
        self._lora_specs: LruCache[LoraRef, ComponentSpec] = LruCache(CACHE_ENTRIES)
        self._model_defaults: LruCache[ModelRef, ModelDefaults] = LruCache(CACHE_ENTRIES)
        self._uses: LruCache[tuple[ModelRef, Role, tuple[LoraRef, ...], int], ComponentUse] = LruCache(CACHE_ENTRIES)
        self._touches: LruCache[tuple[ModelRef, Role, LoraRef], bool] = LruCache(CACHE_ENTRIES)

    def forget_names(self) -> None:
        """Forget cached names, as files may have been added or removed."""
        self._models.clear()
        self._decoders.clear()
        self._loras.clear()

    def models(self) -> tuple[ModelListing, ...]:
        return self._catalog.models()

    def loras(self) -> tuple[LoraListing, ...]:
        return self._catalog.loras()

    def file_names(self) -> FileNames:
        return self._catalog.file_names()

    def tiny_decoders(self) -> tuple[tuple[str, str], ...]:
        return self._catalog.tiny_decoders()

    def find_model(self, name: str) -> ModelRef:
        return self._models.get(name, lambda: self._catalog.find_model(name))

    def find_decoder(self, model: ModelRef, name: str = "") -> ModelRef:
        # by model and not by content: stage B is searched in the model's folder first
        return self._decoders.get((model, name), lambda: self._catalog.find_decoder(model, name))

    def find_lora(self, name: str, strength: float) -> LoraRef:
        return self._loras.get((name, strength), lambda: self._catalog.find_lora(name, strength))

    def components(self, model: ModelRef) -> Mapping[Role, ComponentSpec]:
        return self._components.get(model, lambda: self._catalog.components(model))

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        return self._model_defaults.get(model, lambda: self._catalog.model_defaults(model))

    @property
    def embeddings(self) -> EmbeddingCatalog:
        return self._catalog.embeddings

    @property
    def controls(self) -> ControlNetCatalog:
        return self._catalog.controls

    @property
    def upscalers(self) -> UpscalerCatalog:
        return self._catalog.upscalers

    @property
    def image_prompts(self) -> ImagePromptCatalog:
        return self._catalog.image_prompts

    def use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int = 1) -> ComponentUse:
        """Return the cached answer of `Catalog.use`."""
        key = (model, role, loras, passes)
        return self._uses.get(key, lambda: self._catalog.use(model, role, loras, passes))

    def lora_spec(self, lora: LoraRef) -> ComponentSpec:
        return self._lora_specs.get(lora, lambda: self._catalog.lora_spec(lora))

    def touches(self, model: ModelRef, role: Role, lora: LoraRef) -> bool:
        return self._touches.get((model, role, lora), lambda: self._catalog.touches(model, role, lora))

    def lora_warning(self, model: ModelRef, lora: LoraRef) -> str | None:
        return self._catalog.lora_warning(model, lora)

    def tokenize(self, work: EncodeParams) -> TokenizedPrompt:
        return self._catalog.tokenize(work)

    def execution_modes(
        self, model: ModelRef, work: ModelStageParams, context_tokens: Sequence[int] = ()
    ) -> tuple[ExecutionMode, ...]:
        return self._catalog.execution_modes(model, work, context_tokens)

    def run_seconds(self, model: ModelRef, work: ModelStageParams) -> float:
        return self._catalog.run_seconds(model, work)
