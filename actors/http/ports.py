"""Protocols for what the HTTP interfaces need of a pool; `actors.api.client.ModelPool` implements them. Types only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from modelpool.actors.control.status import PoolStatus
    from modelpool.actors.detached.job_service import JobsProgress
    from modelpool.actors.detached.records import RequestOutcome, SubmissionRecord
    from modelpool.actors.graph.recipe import Recipe
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.actors.results.outcomes import JobFailure, OutputResult
    from modelpool.actors.results.progress import Progress
    from modelpool.pool.core.errors import UserError
    from modelpool.pool.registry.listings import LoraListing, ModelListing
    from modelpool.scheduler.core.history import JobHistory


class HttpJobs(Protocol):
    """The result of `submit`."""

    @property
    def id(self) -> str: ...
    def ready_results(self) -> Iterator[OutputResult | JobFailure]: ...
    def watch(self, changed: Callable[[], None]) -> None: ...
    def progress(self) -> Progress: ...
    def lost(self) -> Exception | None: ...
    def cancel(self) -> None: ...


class HttpDetachedJobs(Protocol):
    """The result of `submit_detached` and `attach`."""

    @property
    def id(self) -> str: ...
    def progress(self) -> JobsProgress: ...
    def outcomes(self) -> Iterator[RequestOutcome]: ...
    def cancel(self) -> SubmissionRecord: ...


class HttpPool(Protocol):
    """A running pool; every method may be called from any thread."""

    def submit(
        self, requests: Iterable[GenerateRequest], *, output: str | Path, user: str | None = None
    ) -> HttpJobs: ...
    def submit_detached(
        self,
        requests: Iterable[GenerateRequest],
        *,
        output: str | Path,
        jobs_id: str | None = None,
        user: str | None = None,
    ) -> HttpDetachedJobs: ...
    def attach(self, jobs_id: str) -> HttpDetachedJobs: ...
    def detached(self) -> tuple[SubmissionRecord, ...]: ...
    def recipes(self, requests: Iterable[GenerateRequest]) -> tuple[Recipe | UserError, ...]: ...
    def models(self) -> tuple[ModelListing, ...]: ...
    def loras(self) -> tuple[LoraListing, ...]: ...
    def status(self) -> PoolStatus: ...
    def history(self, job: str) -> JobHistory: ...
