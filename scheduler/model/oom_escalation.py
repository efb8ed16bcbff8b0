"""Escalation of a task that ran out of memory on a worker, after the worker's own measures failed.

Another worker, a new process, quarantine: pure decisions over values, and the text for the user. Workers are names and
sizes; `scheduler.core.recovery` carries the decisions out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from modelpool.pool.values.core.errors import format_bytes
from modelpool.pool.values.specs.spec import OomStep, RunErrorKind, TaskSpec, WorkerId

#: The scheduler's measures for each kind of error, in order. Host memory is used by the process more often than by the
#: GPU: another GPU of the same machine would not help, a new process does.
ESCALATION_STEPS: Mapping[RunErrorKind, tuple[OomStep, ...]] = {
    RunErrorKind.OUT_OF_VRAM: (OomStep.OTHER_WORKER, OomStep.RECYCLE, OomStep.QUARANTINE),
    RunErrorKind.OUT_OF_HOST_MEMORY: (OomStep.RECYCLE, OomStep.QUARANTINE),
}


@dataclass(frozen=True, slots=True)
class MemoryFailure:
    """One run of a task that ran out of memory.

    oom_steps  measures taken by then, before that run and in it
    """

    kind: RunErrorKind
    worker_id: WorkerId
    capacity_bytes: int
    attempt: int
    oom_steps: tuple[OomStep, ...] = ()


@dataclass(frozen=True, slots=True)
class EscalationTarget:
    """A worker that the task fits on.

    wait_seconds  until it should be free; None if unknown
    """

    worker_id: WorkerId
    capacity_bytes: int
    wait_seconds: float | None


@dataclass(frozen=True, slots=True)
class EscalationStep:
    """The next measure. `worker_id` is the worker to wait for; None for QUARANTINE, and if no worker is left to try:
    then `oom_step` is None too and the task waits for any worker."""

    oom_step: OomStep | None
    worker_id: WorkerId | None = None


def next_step(
    failures: Sequence[MemoryFailure],
    candidates: Iterable[EscalationTarget],
    taken: Sequence[OomStep],
    attempts_left: int,
) -> EscalationStep:
    """Return the measure after the last of `failures`.

    taken          measures for this task so far
    attempts_left  runs that the limit on attempts still allows Of other workers, the one with most memory is tried; the
                   last attempt is kept for a new process, which is tried once, on the largest worker that the task
                   failed on.
    """
    oom_steps = ESCALATION_STEPS[failures[-1].kind]
    offered = sorted(candidates, key=_preference)
    failed = [failure.worker_id for failure in failures]
    others = [c.worker_id for c in offered if c.worker_id not in failed]
    again = sorted((c for c in offered if c.worker_id in failed), key=lambda c: _again_preference(c, failed[-1]))
    if attempts_left <= 0 or OomStep.RECYCLE in taken:
        return EscalationStep(OomStep.QUARANTINE)
    if OomStep.OTHER_WORKER in oom_steps and others and (attempts_left > 1 or not again):
        return EscalationStep(OomStep.OTHER_WORKER, others[0])
    if again:
        return EscalationStep(OomStep.RECYCLE, again[0].worker_id)
    return EscalationStep(None)


def _preference(candidate: EscalationTarget) -> tuple[int, float, WorkerId]:
    wait_seconds = float("inf") if candidate.wait_seconds is None else candidate.wait_seconds
    return -candidate.capacity_bytes, wait_seconds, candidate.worker_id


def _again_preference(candidate: EscalationTarget, last: WorkerId) -> tuple[int, bool, WorkerId]:
    return -candidate.capacity_bytes, candidate.worker_id != last, candidate.worker_id


def join_steps(before: tuple[OomStep, ...], reported: tuple[OomStep, ...]) -> tuple[OomStep, ...]:
    """Join the measures taken `before` a run and those in its report; a worker may repeat what it was sent."""
    return reported if reported[: len(before)] == before else before + reported


def memory_story(task: TaskSpec, failures: Sequence[MemoryFailure], scratch_bytes: int, last_message: str) -> str:
    """The text for the user: why a task was quarantined after these failures, with numbers, and what to do."""
    what = "GPU memory" if failures[-1].kind is RunErrorKind.OUT_OF_VRAM else "host memory"
    least = ""
    if task.divisions:
        least = f", {format_bytes(task.least_activation_bytes)} at the finest division"
    runs, known_steps = [], 0
    for failure in failures:
        done = ", ".join(oom_step.value for oom_step in failure.oom_steps[known_steps:]) or "nothing else"
        known_steps = len(failure.oom_steps)
        runs.append(
            f"attempt {failure.attempt} on {failure.worker_id} ({format_bytes(failure.capacity_bytes)}) after {done}"
        )
    return (
        f"{task.stage.value} task {task.task_id} ran out of {what} each time and is quarantined: {'; '.join(runs)}. "
        f"It was planned with {format_bytes(task.activation_bytes)} of activations{least}, "
        f"{format_bytes(scratch_bytes)} of scratch. {_ADVICE[failures[-1].kind]}. Last: {last_message}"
    )


_ADVICE: Mapping[RunErrorKind, str] = {
    RunErrorKind.OUT_OF_VRAM: (
        "Request a smaller image or a smaller batch, give the workers more memory (`vram`), "
        "or end other programs on the GPU"
    ),
    RunErrorKind.OUT_OF_HOST_MEMORY: "Use fewer workers or models on that machine, or give it more memory",
}
