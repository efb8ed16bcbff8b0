"""Decides the next step after a run ran out of device memory, given what was tried. Pure and torch-free.

The worker's part of the ladder: drop preloaded weights -> empty the allocator's cache -> drop idle components ->
stream more -> divide the run. Steps are ordered by cost in time; none changes the image (an execution mode documents if
it changes last bits). When none is left, the scheduler decides, which has other workers. `pool.engine.engine` carries
the decision out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelpool.pool.values.specs.spec import ExecutionMode, OomStep


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """One attempt of a run.

    division           execution mode
    most_weight_bytes  maximum resident bytes of its components, the rest streams; None: as many as fit
    oom_steps          steps taken so far, in order
    """

    division: ExecutionMode
    most_weight_bytes: int | None = None
    oom_steps: tuple[OomStep, ...] = ()


#: an allocator that had a smaller cache when a run ran out was not fragmented: torch takes segments of this size
FRAGMENTED_BYTES = 20 << 20


def next_attempt(
    tried: RunAttempt,
    weight_bytes: int,
    modes: Sequence[ExecutionMode],
    may_stream: bool = True,
    ahead_bytes: int = 0,
    cached_bytes: int = 0,
) -> RunAttempt | None:
    """Return the next attempt after `tried` ran out of memory with `weight_bytes` of its components resident, or about
    to be, `ahead_bytes` of other tasks preloaded, and `cached_bytes` that the allocator held but could not use.

    `modes` are all execution modes, the least divided first. None if nothing is left to try. Bounded: preloading stops
    after the first attempt, the allocator's cache is emptied once before anything is evicted, idle components leave
    once, weights are halved once and then fully streamed, and each mode is tried once.
    """
    if ahead_bytes > 0 and not tried.oom_steps:
        return RunAttempt(tried.division, tried.most_weight_bytes, (OomStep.DROP_AHEAD,))
    if cached_bytes >= FRAGMENTED_BYTES and {*tried.oom_steps} <= {OomStep.DROP_AHEAD}:
        return RunAttempt(tried.division, tried.most_weight_bytes, (*tried.oom_steps, OomStep.EMPTY_CACHE))
    if OomStep.DROP_CACHES not in tried.oom_steps:
        return RunAttempt(tried.division, tried.most_weight_bytes, (*tried.oom_steps, OomStep.DROP_CACHES))
    if may_stream and weight_bytes > 0 and tried.most_weight_bytes != 0:
        was_halved = OomStep.STREAM_MORE in tried.oom_steps
        return RunAttempt(
            tried.division, 0 if was_halved else weight_bytes // 2, (*tried.oom_steps, OomStep.STREAM_MORE)
        )
    smaller = [mode for mode in modes if mode.activation_bytes < tried.division.activation_bytes]
    if smaller:
        least_divided = max(smaller, key=lambda mode: mode.activation_bytes)
        return RunAttempt(least_divided, tried.most_weight_bytes, (*tried.oom_steps, OomStep.DIVIDE))
    return None


def max_attempts(modes: Sequence[ExecutionMode]) -> int:
    """Return the maximum number of attempts of one run."""
    return 6 + len(modes) - 1
