"""Answers questions about models without holding up the event loop: one thread owns the catalog.

The catalog imports torch and diffusers and reads files; all of that happens in the thread, the opening too. What was
answered about a file's content is remembered; which names there are is looked up again for each question.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from modelpool.actors.graph.build_graph import Catalog, Controls, CutJob, cut_order, cut_request
from modelpool.actors.graph.fits import check_fits
from modelpool.actors.graph.graph_catalog import Embeddings
from modelpool.actors.graph.orders import Order
from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.assembly import Assembly
from modelpool.pool.core.errors import UserError
from modelpool.pool.core.lru_cache import Recent
from modelpool.pool.core.sampling_facts import MadeFor
from modelpool.pool.core.stage_params import LoraRef, ModelRef, Work
from modelpool.pool.specs.spec import ComponentSpec, ComponentUse, Division, JobId, Role, RunCost, TaskId, TaskSpec

if TYPE_CHECKING:
    from modelpool.pool.registry.listings import LoraListing, ModelListing

T = TypeVar("T")
K = TypeVar("K")

#: answers about combinations of models and LoRAs that are kept; each LoRA strength makes new ones
REMEMBERED = 4096
#: runs that ended well and that the catalog was not told of yet, at most. To tell of each by itself would cost the
#: event loop more than most of what it does for a task
UNTOLD = 256
#: distributions whose version can change an image
IMAGE_VERSIONS = ("modelpool", "torch", "diffusers", "transformers")


class ListingCatalog(Catalog, Protocol):
    """All that the pool asks its catalog."""

    def models(self) -> tuple[ModelListing, ...]:
        """Every checkpoint."""

    def loras(self) -> tuple[LoraListing, ...]:
        """Every LoRA."""

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """What a run that ended well took."""


def open_catalog(
    model_folders: Sequence[Path],
    lora_folders: Sequence[Path],
    device: str,
    registry_folder: Path | None = None,
    allow_pickle: bool = False,
    assemblies: Sequence[Assembly] = (),
) -> ListingCatalog:
    """The real catalog, of these folders and models of separate files and of what was added to the registry, which
    reckons sizes for the weakest GPU of one kind that is found here, or for what is assumed of such GPUs. `device` is
    the kind's name, or "auto"; `allow_pickle` has PyTorch's pickles read. Imports torch; takes no memory of a GPU."""
    from modelpool.pool.catalog.catalog import Catalog as PoolCatalog
    from modelpool.pool.devices.detection import capabilities_here

    found = capabilities_here(device)
    return PoolCatalog(model_folders, lora_folders, found, registry_folder, True, allow_pickle, assemblies)


@dataclass(frozen=True, slots=True)
class CutImage:
    """A request, cut."""

    recipe: Recipe
    cut: CutJob


class CatalogDesk:
    """Asks one catalog from one thread."""

    def __init__(self, open_catalog: Callable[[], ListingCatalog], executor: Executor | None = None) -> None:
        """`executor` must have one thread; tests bring one that runs at once."""
        self._open_catalog = open_catalog
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="catalog")
        self._plain: ListingCatalog | None = None
        self._catalog: _RememberingCatalog | None = None
        self._versions: dict[str, str] = {}
        #: filled on the event loop, emptied by the catalog's thread
        self._learnt: deque[tuple[TaskSpec, RunCost]] = deque()

    async def cut_images(
        self, wanted: Sequence[tuple[JobId, GenerateRequest]], first_index: int, capacity_bytes: int | None
    ) -> list[CutImage]:
        """Cut each request. Raises UserError, naming the request unless it is the only one."""

        def cut_all(catalog: Catalog) -> list[CutImage]:
            images = []
            for offset, (job_id, request) in enumerate(wanted):
                try:
                    images.append(self._cut_image(catalog, job_id, request, capacity_bytes))
                except UserError as problem:
                    if first_index == 0 and len(wanted) == 1:
                        raise
                    raise type(problem)(f"request {first_index + offset}: {problem}") from None
            return images

        return await self._ask(cut_all)

    async def recipes(
        self, requests: Sequence[GenerateRequest], capacity_bytes: int | None
    ) -> tuple[Recipe | UserError, ...]:
        """The recipe of each request, or what is wrong with it."""

        def cut_each(catalog: Catalog) -> tuple[Recipe | UserError, ...]:
            return tuple(recipe_of(catalog, request) for request in requests)

        def recipe_of(catalog: Catalog, request: GenerateRequest) -> Recipe | UserError:
            try:
                return self._cut_image(catalog, JobId("asked"), request, capacity_bytes).recipe
            except UserError as problem:
                return problem

        return await self._ask(cut_each)

    async def cut_stage(
        self, order: Order, job_id: JobId, given: frozenset[TaskId], capacity_bytes: int | None
    ) -> CutJob:
        """Cut one stage and what it needs beside the `given` results. Raises UserError."""

        def cut(catalog: Catalog) -> CutJob:
            job = cut_order(order, job_id, catalog, given)
            if capacity_bytes is not None:
                check_fits(job.job, capacity_bytes)
            return job

        return await self._ask(cut)

    async def models(self) -> tuple[ModelListing, ...]:
        """Every checkpoint."""
        return await self._ask(lambda catalog: catalog.models())

    async def loras(self) -> tuple[LoraListing, ...]:
        """Every LoRA."""
        return await self._ask(lambda catalog: catalog.loras())

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """A run of `task` ended well. Waits for nothing; later cuts take it in."""
        self._learnt.append((task, cost))
        if len(self._learnt) % UNTOLD == 0:
            with contextlib.suppress(RuntimeError):  # closed: nobody cuts any more
                self._executor.submit(self._tell_catalog)

    async def open(self) -> None:
        """Open the catalog now instead of at the first question."""
        await self._ask(lambda catalog: None)

    def close(self) -> None:
        """Answer nothing any more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _cut_image(
        self, catalog: Catalog, job_id: JobId, request: GenerateRequest, capacity_bytes: int | None
    ) -> CutImage:
        recipe, job = cut_request(request, job_id, catalog)
        if capacity_bytes is not None:
            check_fits(job.job, capacity_bytes)
        return CutImage(replace(recipe, versions=self._versions), job)

    async def _ask(self, question: Callable[[_RememberingCatalog], T]) -> T:
        def answer() -> T:
            if self._catalog is None:
                self._plain = self._open_catalog()
                self._catalog = _RememberingCatalog(self._plain)
                self._versions = _installed_versions()
            self._catalog.forget_names()
            self._tell_catalog()
            try:
                return question(self._catalog)
            except StopIteration as error:  # no future takes that: who asked would wait for ever
                raise RuntimeError(f"our mistake: {error!r}") from error

        return await asyncio.get_running_loop().run_in_executor(self._executor, answer)

    def _tell_catalog(self) -> None:
        """In the catalog's thread: what was learnt since, in order."""
        while self._learnt:
            task, cost = self._learnt.popleft()
            if self._plain is not None:
                self._plain.learn(task, cost)


class _RememberingCatalog:
    """A catalog that is asked the same thing once. Every answer but those to names is of a file's content."""

    def __init__(self, catalog: ListingCatalog) -> None:
        self._catalog = catalog
        self._models: dict[str, ModelRef] = {}
        self._decoders: dict[tuple[ModelRef, str], ModelRef] = {}
        self._loras: dict[tuple[str, float], LoraRef] = {}
        self._components: dict[ModelRef, Mapping[Role, ComponentSpec]] = {}
        self._lora_specs: Recent[LoraRef, ComponentSpec] = Recent(REMEMBERED)
        self._made_for: dict[ModelRef, MadeFor] = {}
        self._uses: Recent[tuple[ModelRef, Role, tuple[LoraRef, ...], int], ComponentUse] = Recent(REMEMBERED)
        self._touches: Recent[tuple[ModelRef, Role, LoraRef], bool] = Recent(REMEMBERED)

    def forget_names(self) -> None:
        """Files may have come or gone."""
        self._models.clear()
        self._decoders.clear()
        self._loras.clear()

    def models(self) -> tuple[ModelListing, ...]:
        return self._catalog.models()

    def loras(self) -> tuple[LoraListing, ...]:
        return self._catalog.loras()

    def find_model(self, name: str) -> ModelRef:
        return _once(self._models, name, lambda: self._catalog.find_model(name))

    def find_decoder(self, model: ModelRef, name: str = "") -> ModelRef:
        # by the model and not by its content: stage B is looked for in its folder first
        return _once(self._decoders, (model, name), lambda: self._catalog.find_decoder(model, name))

    def find_lora(self, name: str, strength: float) -> LoraRef:
        return _once(self._loras, (name, strength), lambda: self._catalog.find_lora(name, strength))

    def components(self, model: ModelRef) -> Mapping[Role, ComponentSpec]:
        return _once(self._components, model, lambda: self._catalog.components(model))

    def made_for(self, model: ModelRef) -> MadeFor:
        return _once(self._made_for, model, lambda: self._catalog.made_for(model))

    @property
    def embeddings(self) -> Embeddings:
        return self._catalog.embeddings

    @property
    def controls(self) -> Controls:
        return self._catalog.controls

    def use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int = 1) -> ComponentUse:
        key = (model, role, loras, passes)
        return self._uses.get(key, lambda: self._catalog.use(model, role, loras, passes))

    def lora_spec(self, lora: LoraRef) -> ComponentSpec:
        return self._lora_specs.get(lora, lambda: self._catalog.lora_spec(lora))

    def touches(self, model: ModelRef, role: Role, lora: LoraRef) -> bool:
        return self._touches.get((model, role, lora), lambda: self._catalog.touches(model, role, lora))

    def lora_warning(self, model: ModelRef, lora: LoraRef) -> str | None:
        return self._catalog.lora_warning(model, lora)

    def text_tokens(
        self, model: ModelRef, text: str, seen: tuple[tuple[int, int], ...] = (), numbered: bool = False
    ) -> int:
        return self._catalog.text_tokens(model, text, seen, numbered)

    def ways(self, model: ModelRef, work: Work, context_tokens: Sequence[int] = ()) -> tuple[Division, ...]:
        return self._catalog.ways(model, work, context_tokens)

    def run_seconds(self, model: ModelRef, work: Work) -> float:
        return self._catalog.run_seconds(model, work)


def _once(known: dict[K, T], key: K, find: Callable[[], T]) -> T:
    if key not in known:
        known[key] = find()
    return known[key]


def _installed_versions() -> dict[str, str]:
    """The versions that a recipe tells. What is not installed as a distribution is left out."""
    found = {}
    for name in IMAGE_VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
