"""Who may try again: one table over the kinds of error. The only authority on retry; Ray's own retries are off."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from modelpool.pool.specs.spec import RunError, RunErrorKind


class Rule(Enum):
    """What a kind of error says about a second try."""

    AGAIN = "again"  #: it may go better, as things are
    CLIMB = "climb"  #: it may go better when something is done first: `scheduler.tables.oom_escalation`
    FAIL = "fail"  #: it would go the same way


#: What follows from a run that ended this way, within the limits.
RULES: Mapping[RunErrorKind, Rule] = {
    RunErrorKind.OUT_OF_VRAM: Rule.CLIMB,  # the worker did what it could
    RunErrorKind.OUT_OF_HOST_MEMORY: Rule.CLIMB,
    RunErrorKind.WORKER_LOST: Rule.AGAIN,  # mostly not the task's fault; a limit stops the task whose fault it is
    RunErrorKind.INPUT_LOST: Rule.AGAIN,  # its inputs are made again first
    RunErrorKind.BAD_INPUT: Rule.FAIL,
    RunErrorKind.CANCELLED: Rule.FAIL,  # nobody asked: see `verdict`
    RunErrorKind.INTERNAL: Rule.FAIL,  # a mistake of ours: loud, once
}


class Verdict(Enum):
    """What becomes of a task whose run ended badly."""

    AGAIN = "again"  #: run it again, and count the failure
    AGAIN_FREE = "again_free"  #: run it again; the end was our own wish
    CLIMB = "climb"  #: count the failure, and do what the next rung says
    QUARANTINE = "quarantine"  #: its jobs fail, and equal work is refused for a while
    FAIL = "fail"  #: its jobs fail


def verdict(
    kind: RunErrorKind, stop_asked: bool, failures: int, max_attempts: int, crashes: int = 0, crash_limit: int = 1
) -> Verdict:
    """What to do about a run that ended with `kind`, when a live job needs the task.

    failures  runs of this task that ended badly, this one included
    crashes   workers that it took down with it, this one included
    A climb is not stopped by the limit here: its last rung, quarantine, follows from it.
    """
    if kind is RunErrorKind.CANCELLED and stop_asked:
        return Verdict.AGAIN_FREE
    match RULES[kind]:
        case Rule.CLIMB:
            return Verdict.CLIMB
        case Rule.AGAIN if kind is RunErrorKind.WORKER_LOST and crashes >= crash_limit:
            return Verdict.QUARANTINE
        case Rule.AGAIN if failures < max_attempts:
            return Verdict.AGAIN
        case _:
            return Verdict.FAIL


def blamed(error: RunError, stop_asked: bool, timed_out: bool = False) -> RunError:
    """`error`; INTERNAL when it claims a cancellation that was not asked for, WORKER_LOST when the run was stopped
    because it took too long: a run that hangs in its worker and one that takes the worker down are dealt with alike."""
    if error.kind is not RunErrorKind.CANCELLED or stop_asked:
        return error
    if timed_out:
        return RunError(RunErrorKind.WORKER_LOST, "it took longer than run_timeout_seconds and was stopped")
    return RunError(RunErrorKind.INTERNAL, f"the run was cancelled but nobody asked: {error.message}")
