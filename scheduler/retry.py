"""Who may try again: one table over the kinds of error. The only authority on retry; Ray's own retries are off."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from pool.spec import RunError, RunErrorKind


class Verdict(Enum):
    """What becomes of a task whose run ended badly."""

    AGAIN = "again"  #: run it again, and count the failure
    AGAIN_FREE = "again_free"  #: run it again; the end was our own wish
    FAIL = "fail"  #: its jobs fail


#: May a run that ended this way be tried again, within the limit on attempts?
RETRIED: Mapping[RunErrorKind, bool] = {
    RunErrorKind.OUT_OF_VRAM: True,  # a second attempt evicts everything first, or lands on another worker
    RunErrorKind.OUT_OF_HOST_MEMORY: True,  # another machine may have more, and this one may have it later
    RunErrorKind.WORKER_LOST: True,  # mostly not the task's fault; the limit stops the task whose fault it is
    RunErrorKind.INPUT_LOST: True,  # its inputs are made again first
    RunErrorKind.BAD_INPUT: False,  # it would fail the same way
    RunErrorKind.CANCELLED: False,  # nobody asked: see `verdict`
    RunErrorKind.INTERNAL: False,  # a mistake of ours: loud, once
}


def verdict(kind: RunErrorKind, stop_asked: bool, failures: int, max_attempts: int) -> Verdict:
    """What to do about a run that ended with `kind`, when a live job needs the task.

    failures  runs of this task that ended badly, this one included
    """
    if kind is RunErrorKind.CANCELLED and stop_asked:
        return Verdict.AGAIN_FREE
    if RETRIED[kind] and failures < max_attempts:
        return Verdict.AGAIN
    return Verdict.FAIL


def blamed(error: RunError, stop_asked: bool) -> RunError:
    """`error`, or INTERNAL when it claims a cancellation that was not asked for."""
    if error.kind is not RunErrorKind.CANCELLED or stop_asked:
        return error
    return RunError(RunErrorKind.INTERNAL, f"the run was cancelled but nobody asked: {error.message}")
