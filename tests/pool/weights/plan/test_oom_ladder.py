"""Proves of the worker's rungs, as a pure decision: for any run they end within the bound, go from cheap to dear, need
less memory with each step, and leave nothing untried."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import ExecutionMode, OomStep
from modelpool.pool.weights.plan.oom_ladder import FRAGMENTED_BYTES, RunAttempt, max_attempts, next_attempt

WAYS = st.lists(st.integers(1, 1000), min_size=1, max_size=5, unique=True).map(
    lambda sizes: tuple(ExecutionMode(size, tile=place) for place, size in enumerate(sorted(sizes, reverse=True)))
)
ORDER = (OomStep.EMPTY_CACHE, OomStep.DROP_CACHES, OomStep.STREAM_MORE, OomStep.DIVIDE)


def climb(
    modes: tuple[ExecutionMode, ...], first: int, weight_bytes: int, may_stream: bool, cached_bytes: int = 0
) -> list[RunAttempt]:
    """Every try of a run that never finds enough memory, with `weight_bytes` of weights."""
    tries = [RunAttempt(modes[first])]
    while len(tries) < 100:
        most_bytes = tries[-1].most_weight_bytes
        resident_bytes = weight_bytes if most_bytes is None else min(weight_bytes, most_bytes)
        following = next_attempt(tries[-1], resident_bytes, modes, may_stream, cached_bytes=cached_bytes)
        if following is None:
            return tries
        tries.append(following)
    raise AssertionError("it never ends")


@given(
    modes=WAYS,
    data=st.data(),
    weight_bytes=st.integers(0, 1000),
    may_stream=st.booleans(),
    cached_bytes=st.sampled_from([0, FRAGMENTED_BYTES - 1, FRAGMENTED_BYTES]),
)
def test_any_run_climbs_in_order_and_gives_up(
    modes: tuple[ExecutionMode, ...], data: st.DataObject, weight_bytes: int, may_stream: bool, cached_bytes: int
) -> None:
    first = data.draw(st.integers(0, len(modes) - 1))
    tries = climb(modes, first, weight_bytes, may_stream, cached_bytes)
    assert len(tries) <= max_attempts(modes)
    places = [ORDER.index(rung) for rung in tries[-1].oom_steps]
    assert places == sorted(places)
    own = int(cached_bytes >= FRAGMENTED_BYTES)
    assert tries[-1].oom_steps.count(OomStep.EMPTY_CACHE) == own
    assert tries[-1].oom_steps[own] is OomStep.DROP_CACHES
    assert [len(t.oom_steps) for t in tries] == list(range(len(tries)))
    assert tries[-1].division == modes[-1]
    assert {t.division for t in tries} == set(modes[first:])
    if may_stream and weight_bytes:
        assert tries[-1].most_weight_bytes == 0
    else:
        assert OomStep.STREAM_MORE not in tries[-1].oom_steps
    for before, after in itertools.pairwise(tries[1 + own :]):  # the first rungs drop weights that are not the run's
        needed = [
            t.division.activation_bytes + (weight_bytes if t.most_weight_bytes is None else t.most_weight_bytes)
            for t in (before, after)
        ]
        assert needed[1] < needed[0]


def test_half_of_the_weights_stream_before_all_do() -> None:
    tries = climb((ExecutionMode(100),), 0, 80, may_stream=True)
    assert [t.most_weight_bytes for t in tries] == [None, None, 40, 0]
