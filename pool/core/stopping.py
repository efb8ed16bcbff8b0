"""How a run that is under way finds out that it was asked to stop: at steps, at tiles, and at the head of each layer.

Torch-free. Who asks, and how, is behind `RunHooks.should_stop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from modelpool.pool.core.stage_params import RunHooks, Stopped

#: how often layers ask: people do not notice less, and asking a clock costs a layer next to nothing
ASK_EVERY_SECONDS = 0.005


def stop_if_asked(should_stop: Callable[[], bool]) -> None:
    """Raise Stopped when `should_stop` says that the run was asked to."""
    if should_stop():
        raise Stopped


def stop_check(
    hooks: RunHooks, every_seconds: float = ASK_EVERY_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], None]:
    """A function for the head of each layer of one run: `stop_if_asked`, but at most once in `every_seconds`.

    The first call asks. Make one for each run.
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
