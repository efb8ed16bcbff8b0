"""Retry rules: one table over the kinds of error. The only authority on retries; Ray's own retries are off."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from modelpool.pool.values.specs.spec import RunError, RunErrorKind


class RetryRule(Enum):
    """Rule for a second attempt after a kind of error."""

    AGAIN = "again"  #: it may succeed as things are
    ESCALATE = "escalate"  #: it may succeed after a measure: `scheduler.model.oom_escalation`
    FAIL = "fail"  #: it would fail again


#: the rule for each kind of error, within the limits
RULES: Mapping[RunErrorKind, RetryRule] = {
    RunErrorKind.OUT_OF_VRAM: RetryRule.ESCALATE,  # the worker took all its measures
    RunErrorKind.OUT_OF_HOST_MEMORY: RetryRule.ESCALATE,
    RunErrorKind.WORKER_LOST: RetryRule.AGAIN,  # mostly not the task's fault; a limit stops a task that causes it
    RunErrorKind.INPUT_LOST: RetryRule.AGAIN,  # its inputs are computed again first
    RunErrorKind.FILE_UNAVAILABLE: RetryRule.AGAIN,  # on another machine: that one lacks the file
    RunErrorKind.BAD_INPUT: RetryRule.FAIL,
    RunErrorKind.CANCELLED: RetryRule.FAIL,  # not requested: see `verdict`
    RunErrorKind.OUTPUT: RetryRule.FAIL,  # of a driver, which could not write the file; no run ends so
    RunErrorKind.INTERNAL: RetryRule.FAIL,  # a bug of modelpool: report it at once
}


class Verdict(Enum):
    """Decision about a task whose run failed."""

    AGAIN = "again"  #: run it again, and count the failure
    AGAIN_FREE = "again_free"  #: run it again, and count nothing: it was stopped on request, or is not the cause
    ESCALATE = "escalate"  #: count the failure, and take the next measure
    QUARANTINE = "quarantine"  #: its jobs fail, and equal work is refused for a while
    FAIL = "fail"  #: its jobs fail


def verdict(
    kind: RunErrorKind,
    stop_requested: bool,
    failures: int,
    max_attempts: int,
    crashes: int = 0,
    crash_limit: int = 1,
    is_shared: bool = False,
    is_external: bool = False,
) -> Verdict:
    """Decide about a run that ended with `kind`, while a live job needs the task.

    failures    failed runs of this task, including this one
    crashes     workers that were lost with it, including this one
    is_shared   it shared this run with others, which may be the cause: it is suspected only after a run alone
    is_external  nothing that it did can be the cause

    ESCALATE is not stopped by the limit here: its last measure, quarantine, follows from it.
    """
    if (kind is RunErrorKind.CANCELLED and stop_requested) or is_external:
        return Verdict.AGAIN_FREE
    match RULES[kind]:
        case RetryRule.ESCALATE:
            return Verdict.ESCALATE
        case RetryRule.AGAIN if kind is RunErrorKind.WORKER_LOST and crashes >= crash_limit and not is_shared:
            return Verdict.QUARANTINE
        case RetryRule.AGAIN if failures < max_attempts:
            return Verdict.AGAIN
        case _:
            return Verdict.FAIL


def blamed(error: RunError, stop_requested: bool, timed_out: bool = False) -> RunError:
    """Return `error`, or INTERNAL for a cancellation that was not requested, or WORKER_LOST if the run was stopped
    because it took too long: a hanging run and one that crashes its worker are handled alike."""
    if error.kind is not RunErrorKind.CANCELLED or stop_requested:
        return error
    if timed_out:
        return RunError(RunErrorKind.WORKER_LOST, "it took longer than run_timeout_seconds and was stopped")
    return RunError(RunErrorKind.INTERNAL, f"the run was cancelled without a request: {error.message}")
