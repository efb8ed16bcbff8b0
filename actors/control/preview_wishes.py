"""`PreviewWishes`: which submissions somebody wants previews of. Plain values; the controller's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from modelpool.actors.control.parked_jobs import QueuedJob
from modelpool.actors.worker.wire.messages import SubmissionId
from modelpool.pool.values.core.previews import PreviewKind, PreviewWish


class PreviewWishes:
    """The wishes by submission. A request that names a kind of previews has that kind: none, whoever wants some, or
    some, also while nobody asks."""

    def __init__(self) -> None:
        self._wishes: dict[SubmissionId, PreviewWish] = {}
        #: whether a request has ever named a kind
        self._are_named = False
        #: the pool's files of tiny decoders, with their names
        self.tiny_decoders: tuple[tuple[str, str], ...] = ()

    def set(self, submission_id: SubmissionId, wish: PreviewWish | None) -> None:
        """Want previews of a submission from now on, or none."""
        if wish is None:
            self._wishes.pop(submission_id, None)
        else:
            self._wishes[submission_id] = wish

    @property
    def are_any(self) -> bool:
        """Whether a job may want previews."""
        return self._are_named or bool(self._wishes)

    def named(self) -> None:
        """A request names a kind of previews."""
        self._are_named = True

    def of(self, job: QueuedJob) -> PreviewWish | None:
        """Return the preview wish for a job."""
        wish = self._wishes.get(job.submission_id)
        if job.preview:
            kind = PreviewKind(job.preview)
            wish = None if kind is PreviewKind.NONE else replace(wish or PreviewWish(), kind=kind)
        return None if wish is None else replace(wish, tiny_decoders=self.tiny_decoders)

    def of_jobs(self, jobs: Iterable[QueuedJob]) -> PreviewWish | None:
        """Return the previews that the first interested job of these wants of a task."""
        return next((wish for job in jobs if (wish := self.of(job)) is not None), None)
