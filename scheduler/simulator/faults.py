"""Failures and variations of a simulation; passed in, so that the simulation itself has no randomness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from modelpool.pool.values.specs.spec import RunErrorKind
from modelpool.scheduler.model.messages import RunTask, StartWorker


@dataclass(frozen=True, slots=True)
class Disturbances:
    """Functions that cause failures. By default nothing fails.

    start_fails  whether this start fails
    run_factor   called once per run, in order: factor on the seconds of it and its mates
    run_error    the error of this run and all its mates; None for success
    run_hangs    whether this run never ends by itself, nor when asked to stop
    """

    start_fails: Callable[[StartWorker], bool] = lambda command: False
    run_factor: Callable[[RunTask], float] = lambda command: 1.0
    run_error: Callable[[RunTask], RunErrorKind | None] = lambda command: None
    run_hangs: Callable[[RunTask], bool] = lambda command: False
