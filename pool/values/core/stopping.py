"""Checks whether a run was asked to stop: at steps, at tiles, and at the start of each layer.

Torch-free. The source of the request is behind `RunHooks.should_stop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from modelpool.pool.values.core.stage_params import RunHooks, Stopped

#: interval of the checks at layers: shorter is not noticeable, and reading a clock costs next to nothing
ASK_EVERY_SECONDS = 0.005


def stop_if_asked(should_stop: Callable[[], bool]) -> None:
    """Raise Stopped if `should_stop` returns True."""
    if should_stop():
        raise Stopped


def stop_check(
    hooks: RunHooks, every_seconds: float = ASK_EVERY_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], None]:
    """Return a function for the start of each layer of one run: `stop_if_asked`, at most once in `every_seconds`.

    The first call checks. Create one for each run.
    """
    should_stop = hooks.should_stop
    ask_at = float("-inf")

    def check() -> None:
        nonlocal ask_at
        now = clock()
        if now < ask_at:
            return
        ask_at = now + every_seconds
        stop_if_asked(should_stop)

    return check
