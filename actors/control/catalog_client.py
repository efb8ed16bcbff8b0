"""`CatalogClient`: the questions to a catalog in another process, each by the name of a method of `CatalogService`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from modelpool.actors.control.catalog_service import PinnableModel
from modelpool.actors.control.graph_shapes import BuiltRequest
from modelpool.actors.graph.common.stage_request import StageLike
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import JobId, TaskId

if TYPE_CHECKING:
    from modelpool.pool.catalog.registry.listings import FileNames, LoraListing, ModelListing


class CatalogClient(ABC):
    """A catalog whose answers come from another process: see `CatalogQueries` for the methods."""

    @abstractmethod
    async def _ask(self, method: str, *arguments: object) -> object:
        """Return the answer of a method of `CatalogService` there. Raises what it raises."""

    async def build_some(
        self, wanted: Sequence[tuple[JobId, GenerateRequest]], capacity_bytes: int | None, until_error: bool = False
    ) -> list[BuiltRequest | UserError]:
        """See `CatalogService`."""
        built = await self._ask("build_some", tuple(wanted), capacity_bytes, until_error)
        return cast("list[BuiltRequest | UserError]", built)

    async def build_stage(
        self, stage: StageLike, job_id: JobId, given: frozenset[TaskId], capacity_bytes: int | None
    ) -> JobGraph:
        """See `CatalogService`."""
        return cast("JobGraph", await self._ask("build_stage", stage, job_id, given, capacity_bytes))

    async def weights(self, name: str) -> PinnableModel:
        """See `CatalogService`."""
        return cast("PinnableModel", await self._ask("weights", name))

    async def models(self) -> tuple[ModelListing, ...]:
        """See `CatalogService`."""
        return cast("tuple[ModelListing, ...]", await self._ask("models"))

    async def loras(self) -> tuple[LoraListing, ...]:
        """See `CatalogService`."""
        return cast("tuple[LoraListing, ...]", await self._ask("loras"))

    async def file_names(self) -> FileNames:
        """See `CatalogService`."""
        return cast("FileNames", await self._ask("file_names"))

    async def tiny_decoders(self) -> tuple[tuple[str, str], ...]:
        """See `CatalogService`."""
        return cast("tuple[tuple[str, str], ...]", await self._ask("tiny_decoders"))
