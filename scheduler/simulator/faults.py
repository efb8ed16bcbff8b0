"""What goes wrong or varies in a simulation. Handed in, so that the simulation itself knows no chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from modelpool.pool.specs.spec import RunErrorKind
from modelpool.scheduler.tables.messages import RunTask, StartWorker


@dataclass(frozen=True, slots=True)
class Disturbances:
    """Functions of what is going on. By default nothing goes wrong.

    start_fails  this start comes to nothing
    run_factor   called once a run, in order: its seconds are multiplied by this
    run_error    how this run ends, with all its mates; None for well
    run_hangs    this run never ends by itself, nor when it is asked to stop
    """

    start_fails: Callable[[StartWorker], bool] = lambda command: False
    run_factor: Callable[[], float] = lambda: 1.0
    run_error: Callable[[RunTask], RunErrorKind | None] = lambda command: None
    run_hangs: Callable[[RunTask], bool] = lambda command: False
