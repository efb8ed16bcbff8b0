"""What the command line needs of a pool. `actors.client.ModelPool` is one; the tests bring another.

Types only, so that `modelpool --help` loads neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from actors.outcomes import JobFailure, MadeResult, Summary
    from actors.progress import Progress
    from actors.recipe import Recipe
    from actors.requests import GenerateRequest
    from actors.status import PoolStatus
    from pool.errors import UserError
    from pool.registry.listings import LoraListing, ModelListing
    from scheduler.history import JobHistory


class Jobs(Protocol):
    """What `submit` gave back."""

    def results(self) -> Iterator[MadeResult | JobFailure]: ...
    def progress(self) -> Progress: ...
    def cancel(self) -> None: ...
    def summary(self) -> Summary: ...


class Pool(Protocol):
    """A running pool. Leaving its context closes it, or leaves it to its owner when it was only connected to."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def recipes(self, requests: Iterable[GenerateRequest]) -> tuple[Recipe | UserError, ...]: ...
    def submit(
        self,
        requests: GenerateRequest | Iterable[GenerateRequest],
        *,
        output: str | Path | Literal[False] | None = None,
    ) -> Jobs: ...
    def models(self) -> tuple[ModelListing, ...]: ...
    def loras(self) -> tuple[LoraListing, ...]: ...
    def status(self) -> PoolStatus: ...
    def history(self, job: str) -> JobHistory: ...
    def wait_ready(self, timeout: float | None = None) -> None: ...
