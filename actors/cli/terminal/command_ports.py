"""Protocols for what the command line needs of a pool; `actors.client.client.ModelPool` implements them.

Types only, so that `modelpool --help` loads neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from modelpool.actors.control.file_listings import FileListings

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from modelpool.actors.control.detached.job_service import JobsProgress
    from modelpool.actors.control.detached.records import RequestOutcome, SubmissionRecord
    from modelpool.actors.control.metrics.families import MetricFamily
    from modelpool.actors.control.operator_orders import OperatorOrder, OrderTaken
    from modelpool.actors.control.status import PinnedModel, PoolStatus
    from modelpool.actors.graph.features.recipe import Recipe
    from modelpool.actors.graph.features.recorded_batches import SubmittedBatches
    from modelpool.actors.outputs.layout import OutputLayout
    from modelpool.actors.outputs.results.outcomes import JobFailure, OutputResult, Summary
    from modelpool.actors.outputs.results.previews import ImagePreview
    from modelpool.actors.outputs.results.progress import Progress
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.actors.request.upscale_fields import Upscale
    from modelpool.pool.values.core.errors import UserError
    from modelpool.pool.values.core.stage_params import Result
    from modelpool.scheduler.autoscaling.preview import ScalingPreview
    from modelpool.scheduler.core.history import JobHistory
    from modelpool.scheduler.core.waiting_jobs import SubmissionWaits
    from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup


class OperatedPool(Protocol):
    """The pool as operators use it; `actors.client.pool_operator.PoolOperator` implements it."""

    def order(self, order: OperatorOrder) -> OrderTaken: ...
    def would_request(
        self, groups: Sequence[NodeGroup] = (), limits: AutoscalingConfig | None = None
    ) -> ScalingPreview: ...


class PoolJobs(Protocol):
    """The result of `submit`."""

    def results(self) -> Iterator[OutputResult | JobFailure]: ...
    def progress(self) -> Progress: ...
    def cancel(self) -> None: ...
    def summary(self) -> Summary: ...


class PoolDetachedJobs(Protocol):
    """The result of `submit_detached`."""

    @property
    def id(self) -> str: ...
    def progress(self) -> JobsProgress: ...
    def outcomes(self) -> Iterator[RequestOutcome]: ...
    def cancel(self) -> SubmissionRecord: ...
    def remove(self) -> None: ...


class PoolStage(Protocol):
    """The result of `upscale`."""

    def result(self, timeout: float | None = None) -> Result: ...


class Pool(FileListings, Protocol):
    """A running pool. Leaving its context closes it, or only disconnects if it was joined."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def why_ended(self) -> str: ...
    def recipes(self, requests: Iterable[GenerateRequest]) -> tuple[Recipe | UserError, ...]: ...
    def submit(
        self,
        requests: GenerateRequest | Iterable[GenerateRequest],
        *,
        output: str | Path | Literal[False] | None = None,
        on_preview: Callable[[ImagePreview], None] | None = None,
    ) -> PoolJobs: ...
    def submit_stream(
        self,
        chunks: Iterable[Sequence[GenerateRequest]],
        decide: Callable[[int, Recipe | UserError], bool],
        *,
        output: str | Path | Literal[False] | None = None,
        name: str | None = None,
        hold: bool = False,
        on_preview: Callable[[ImagePreview], None] | None = None,
        batches: SubmittedBatches = ...,
    ) -> PoolJobs: ...
    def submit_detached(
        self,
        requests: GenerateRequest | Iterable[GenerateRequest],
        *,
        output: str | Path,
        jobs_id: str | None = None,
        name: str | None = None,
        layout: OutputLayout | None = None,
    ) -> PoolDetachedJobs: ...
    def attach(self, jobs_id: str) -> PoolDetachedJobs: ...
    def detached(self) -> tuple[SubmissionRecord, ...]: ...
    def upscale(
        self, image: Path, upscale: Upscale, *, user: str | None = None, priority: int | None = None
    ) -> PoolStage: ...
    def pin(self, *models: str, replicas: int = 1) -> tuple[PinnedModel, ...]: ...
    def unpin(self, *models: str) -> tuple[PinnedModel, ...]: ...
    @property
    def operator(self) -> OperatedPool: ...
    def status(self) -> PoolStatus: ...
    def metrics(self) -> tuple[MetricFamily, ...]: ...
    def history(self, job: str) -> JobHistory: ...
    def waits(self, submission: str) -> SubmissionWaits | None: ...
    def wait_ready(self, timeout: float | None = None) -> None: ...
