"""What is done next about a run that ran out of device memory, given what was tried. Pure and torch-free.

The worker's part of the ladder: drop what was brought ahead for another task -> drop caches -> stream more -> divide
the run. Each step is taken when the one before did not help, from what costs the least time to what costs the most;
none changes which image comes out (a division says so itself where it changes last bits). When nothing is left the
run is the scheduler's again, which has other workers. `pool.engine.engine` does what is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelpool.pool.specs.spec import Division, Rung


@dataclass(frozen=True, slots=True)
class Try:
    """One way to try a run.

    division           whole or in parts
    most_weight_bytes  of its components, so many bytes may be resident, the rest streams; None: as many as fit
    rungs              what was done to get here, in order
    """

    division: Division
    most_weight_bytes: int | None = None
    rungs: tuple[Rung, ...] = ()


def next_try(
    tried: Try, weight_bytes: int, ways: Sequence[Division], may_stream: bool = True, ahead_bytes: int = 0
) -> Try | None:
    """What to try when `tried` ran out of memory with `weight_bytes` of its components resident, or about to be, and
    `ahead_bytes` of another task's brought while it ran.

    `ways` are all divisions, the least divided first. None when nothing is left to try. Bounded: nothing is brought
    ahead after the first try, caches are dropped once, weights are halved once and then all streamed, and each division
    is tried once.
    """
    if ahead_bytes > 0 and not tried.rungs:
        return Try(tried.division, tried.most_weight_bytes, (Rung.DROP_AHEAD,))
    if Rung.DROP_CACHES not in tried.rungs:
        return Try(tried.division, tried.most_weight_bytes, (*tried.rungs, Rung.DROP_CACHES))
    if may_stream and weight_bytes > 0 and tried.most_weight_bytes != 0:
        was_halved = Rung.STREAM_MORE in tried.rungs
        return Try(tried.division, 0 if was_halved else weight_bytes // 2, (*tried.rungs, Rung.STREAM_MORE))
    smaller = [way for way in ways if way.activation_bytes < tried.division.activation_bytes]
    if smaller:
        least_divided = max(smaller, key=lambda way: way.activation_bytes)
        return Try(least_divided, tried.most_weight_bytes, (*tried.rungs, Rung.DIVIDE))
    return None


def most_tries(ways: Sequence[Division]) -> int:
    """No run is tried more often than this."""
    return 5 + len(ways) - 1
