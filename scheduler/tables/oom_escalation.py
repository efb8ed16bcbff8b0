"""What is done about a task that ran out of memory on a worker, where the worker's own rungs were not enough.

Another worker, a new process, quarantine: pure decisions over values, and the text that a person reads in the end.
Knows no worker but by name and size; `scheduler.core.recovery` carries the decisions out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from modelpool.pool.core.errors import format_bytes
from modelpool.pool.specs.spec import RunErrorKind, Rung, TaskSpec, WorkerId

#: The scheduler's rungs for each kind of error, in the order in which they are climbed. Host memory is the process's
#: own doing more often than the GPU's: another GPU of the same machine would not help, a new process does.
LADDER: Mapping[RunErrorKind, tuple[Rung, ...]] = {
    RunErrorKind.OUT_OF_VRAM: (Rung.OTHER_WORKER, Rung.RECYCLE, Rung.QUARANTINE),
    RunErrorKind.OUT_OF_HOST_MEMORY: (Rung.RECYCLE, Rung.QUARANTINE),
}


@dataclass(frozen=True, slots=True)
class MemoryFailure:
    """One run of a task that ran out of memory.

    rungs  what had been done about it by then, before that run and in it
    """

    kind: RunErrorKind
    worker_id: WorkerId
    capacity_bytes: int
    attempt: int
    rungs: tuple[Rung, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that the task fits on.

    wait_seconds  until it should be free; None when that is not known
    """

    worker_id: WorkerId
    capacity_bytes: int
    wait_seconds: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next. `worker_id` is the worker to wait for; None for QUARANTINE, and where no worker is left to ask:
    then `rung` is None too and the task waits for whichever comes."""

    rung: Rung | None
    worker_id: WorkerId | None = None


def next_step(
    failures: Sequence[MemoryFailure], candidates: Iterable[Candidate], climbed: Sequence[Rung], attempts_left: int
) -> Step:
    """The next rung after the last of `failures`.

    climbed        rungs of this task so far
    attempts_left  runs that the limit on attempts still allows
    Of other workers, the one with most memory; the last attempt is kept for a new process, which is tried once, on the
    largest worker that the task failed on.
    """
    rungs = LADDER[failures[-1].kind]
    offered = sorted(candidates, key=_preference)
    failed = [failure.worker_id for failure in failures]
    others = [c.worker_id for c in offered if c.worker_id not in failed]
    again = sorted((c for c in offered if c.worker_id in failed), key=lambda c: _again_preference(c, failed[-1]))
    if attempts_left <= 0 or Rung.RECYCLE in climbed:
        return Step(Rung.QUARANTINE)
    if Rung.OTHER_WORKER in rungs and others and (attempts_left > 1 or not again):
        return Step(Rung.OTHER_WORKER, others[0])
    if again:
        return Step(Rung.RECYCLE, again[0].worker_id)
    return Step(None)


def _preference(candidate: Candidate) -> tuple[int, float, WorkerId]:
    wait_seconds = float("inf") if candidate.wait_seconds is None else candidate.wait_seconds
    return -candidate.capacity_bytes, wait_seconds, candidate.worker_id


def _again_preference(candidate: Candidate, last: WorkerId) -> tuple[int, bool, WorkerId]:
    return -candidate.capacity_bytes, candidate.worker_id != last, candidate.worker_id


def joined(before: tuple[Rung, ...], told: tuple[Rung, ...]) -> tuple[Rung, ...]:
    """The rungs climbed `before` a run and what its report tells; a worker repeats what it was sent with."""
    return told if told[: len(before)] == before else before + told


def memory_story(task: TaskSpec, failures: Sequence[MemoryFailure], scratch_bytes: int, last_message: str) -> str:
    """Why a task was quarantined after these failures, with numbers, and what to do: for a person."""
    what = "GPU memory" if failures[-1].kind is RunErrorKind.OUT_OF_VRAM else "host memory"
    least = ""
    if task.divisions:
        least = f", {format_bytes(task.least_activation_bytes)} when divided as far as it can be"
    runs, seen = [], 0
    for failure in failures:
        done = ", ".join(rung.value for rung in failure.rungs[seen:]) or "nothing else"
        seen = len(failure.rungs)
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
        "Ask for a smaller image or a smaller batch, give the workers more memory (`vram`), "
        "or end other programs on the GPU"
    ),
    RunErrorKind.OUT_OF_HOST_MEMORY: "Have fewer workers or models on that machine, or give it more memory",
}
