"""`OpenedCatalog`: answers the questions of `catalog_questions` in the thread of the catalog. Imports what builds task
graphs; who only asks imports the table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from modelpool.actors.control.cached_catalog import CACHE_ENTRIES, CachedCatalog
from modelpool.actors.control.computed_by import computed_by_of
from modelpool.actors.control.file_listings import FileListings
from modelpool.actors.control.graph_shapes import BuiltRequest
from modelpool.actors.graph.build_graph import build_graph, build_stage_graph
from modelpool.actors.graph.common.graph_catalog import GraphCatalog
from modelpool.actors.graph.common.stage_request import StageLike
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.common.task_files import task_files
from modelpool.actors.graph.features.auto_batch import BatchTerms
from modelpool.actors.graph.memory_fit import check_fits
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.models.loading.file_fingerprint import fingerprint
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.installed_versions import installed_versions
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.stage_params import ModelRef
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    JobId,
    ReadFile,
    Role,
    RunCost,
    TaskId,
    TaskSpec,
    file_name,
)
from modelpool.pool.values.specs.wire_value import evolve

#: after this time, an answer holds no further requests: other callers get their turn
TURN_SECONDS = 0.05


class ListingCatalog(GraphCatalog, FileListings, Protocol):
    """The catalog, as a pool needs it; `pool.catalog.catalog.Catalog` implements it from files."""

    def tiny_decoders(self) -> tuple[tuple[str, str], ...]:
        """Return the files of tiny decoders, for previews, each with the name of the decoder."""

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """Learn from the measured cost of a successful run."""


@dataclass(frozen=True, slots=True)
class PinnableModel:
    """The components of one model, and the fingerprints of their files as in `JobGraph`."""

    model: ModelRef
    components: tuple[tuple[Role, ComponentSpec], ...]
    fingerprints: Mapping[ReadFile, str]

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


class OpenedCatalog:
    """A catalog that is open, and what answers need besides it. Belongs to the thread of the catalog."""

    def __init__(self, files: ListingCatalog, computed_by: Mapping[str, str]) -> None:
        """`computed_by` is for recipes."""
        #: the catalog itself, which lists files as they are now
        self.files = files
        self._catalog = CachedCatalog(files)
        self._computed_by = computed_by
        self._versions = installed_versions()
        self._fingerprints: LruCache[tuple[ComponentKey, FilePart], str] = LruCache(CACHE_ENTRIES)

    @property
    def files_address(self) -> str:
        """The address at which other nodes get files that this node fetched to hash them; "" without sources."""
        return str(getattr(self.files, "files_address", ""))  # catalogs without sources need not have one

    def forget_names(self) -> None:
        """Look up names again, as files may have been added or removed."""
        self._catalog.forget_names()

    def build_some(
        self,
        wanted: Sequence[tuple[JobId, GenerateRequest]],
        capacity_bytes: int | None,
        until_error: bool,
        batches: BatchTerms,
    ) -> list[BuiltRequest | UserError]:
        """Convert requests to task graphs, or return their errors: the first request, further ones as long as the
        answer takes less than `TURN_SECONDS`, and `until_error` none after one with an error. `batches` decide about
        batch sizes."""
        built: list[BuiltRequest | UserError] = []
        over_at = time.monotonic() + TURN_SECONDS
        for job_id, request in wanted:
            try:
                built.append(self._build_request(capacity_bytes, request, job_id, batches))
            except UserError as problem:
                built.append(problem)
                if until_error:
                    break
            if time.monotonic() >= over_at:
                break
        return built

    def build_stage(
        self, stage: StageLike, job_id: JobId, given: frozenset[TaskId], capacity_bytes: int | None
    ) -> JobGraph:
        """Convert one stage and everything it needs except the `given` results. Raises UserError."""
        job = build_stage_graph(stage, job_id, self._catalog, given)
        if capacity_bytes is not None:
            check_fits(job.job, capacity_bytes)
        return self._with_fingerprints(job)

    def weights(self, name: str) -> PinnableModel:
        """Return the weights of a model. Raises UserError if there is none of this name, or if it cannot be read."""
        model = self._catalog.find_model(name)
        found = PinnableModel(model, tuple(self._catalog.components(model).items()), {})
        return replace(found, fingerprints=self._fingerprints_of(found.parts.items()))

    def learn_all(self, measured: Sequence[tuple[TaskSpec, RunCost]]) -> None:
        """Learn from successful runs, in order."""
        for task, cost in measured:
            self.files.learn(task, cost)

    def _build_request(
        self, capacity_bytes: int | None, request: GenerateRequest, job_id: JobId, batches: BatchTerms
    ) -> BuiltRequest:
        recipe, job = build_graph(request, job_id, self._catalog, batches)
        if capacity_bytes is not None:
            check_fits(job.job, capacity_bytes)
        found = evolve(recipe, versions=self._versions, computed_by=computed_by_of(self._computed_by, recipe.model))
        return BuiltRequest(found, self._with_fingerprints(job))

    def _with_fingerprints(self, graph: JobGraph) -> JobGraph:
        """Add the fingerprints of all files, so that workers on other machines notice if theirs differ."""
        files: dict[tuple[ComponentKey, FilePart], None] = {}
        for task in graph.job.tasks:
            files.update(dict.fromkeys(task_files(task, graph.works[task.task_id]).items()))
        return evolve(graph, fingerprints=self._fingerprints_of(files))

    def _fingerprints_of(self, files: Iterable[tuple[ComponentKey, FilePart]]) -> dict[ReadFile, str]:
        """Return the fingerprint of each file. Files that cannot be read here are left out: they are not checked. Files
        of sources are verified when they are fetched."""
        found: dict[ReadFile, str] = {}
        for key, part in files:
            if not part.files:
                with contextlib.suppress(UserError):
                    found[key, file_name(part.sha256)] = self._fingerprints.get((key, part), partial(fingerprint, part))
        return found
