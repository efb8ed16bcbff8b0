"""The progress of a submission. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.values.specs.spec import JobId, Stage, WorkerId


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job with a task on a worker. `step` of `steps` are done; both are 0 before the first step. `nodes` are
    the nodes of its workflow that the task serves; without a workflow, its stage, a dot, and a number."""

    job_id: JobId
    index: int
    prompt: str
    worker: WorkerId
    stage: Stage
    step: int
    steps: int
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """A submission at one moment. Jobs that are neither ended nor in `running` wait.

    A task that several jobs share appears as one of them in `running`. `held` says why no more jobs start for now:
    their output folder cannot be written; "" if they do.
    """

    total: int
    done: int
    failed: int
    cancelled: int
    running: tuple[RunningJob, ...] = ()
    held: str = ""

    @property
    def ended(self) -> int:
        """Number of jobs that have ended."""
        return self.done + self.failed + self.cancelled
