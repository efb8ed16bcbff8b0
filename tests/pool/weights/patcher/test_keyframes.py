"""Which keyframe is in force at which step: against a run written out step by step, and the rules one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.inference.sampling.schedules import make_sigmas, sd1_sigma_table
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.weights.patcher.keyframes import (
    SIGMA_TOLERANCE,
    HookKeyframe,
    HookKeyframes,
    Interpolation,
    KeyframePosition,
    interpolated,
)

TABLE = sd1_sigma_table()
SIGMAS = make_sigmas("normal", 10, TABLE).tolist()[:-1]


def strengths(keyframes: HookKeyframes, sigmas: list[float] = SIGMAS) -> list[float]:
    place, found = KeyframePosition(), []
    for sigma in sigmas:
        place = keyframes.advance(place, sigma, sigmas[0], TABLE.sigma_at_percent)
        found.append(keyframes.strength_at(place))
    return found


def test_without_keyframes_the_strength_is_one() -> None:
    assert strengths(HookKeyframes()) == [1.0] * 10


def test_each_keyframe_starts_with_its_share_of_the_schedule() -> None:
    """10 steps of `normal` are evenly spaced timesteps 999, 888, ..., 0: half is done between the fifth and sixth."""
    keyframes = HookKeyframes((HookKeyframe(0.5, 0.5), HookKeyframe(1.0, 0.0)))
    assert strengths(keyframes) == [1.0] * 5 + [0.5] * 5


def test_a_keyframe_that_starts_exactly_at_a_step_is_in_force_there() -> None:
    sigmas = make_sigmas("normal", 6, TABLE).tolist()[:-1]  # 0, 0.2, ..., 1.0 of the schedule, as near as float32 is
    keyframes = HookKeyframes(tuple(HookKeyframe(n, n / 5, 0) for n in range(5)))
    assert strengths(keyframes, sigmas) == [0, 1, 2, 3, 4, 4]


def test_the_first_keyframe_is_in_force_from_the_start_wherever_it_starts() -> None:
    assert strengths(HookKeyframes((HookKeyframe(0.3, 0.9),))) == [0.3] * 10


def test_guaranteed_steps_hold_the_next_keyframe_back() -> None:
    keyframes = HookKeyframes((HookKeyframe(1.0, 0.0, 4), HookKeyframe(2.0, 0.2, 1), HookKeyframe(3.0, 0.9, 1)))
    # starting before the run counts as no guarantee: the first keyframe's is only from infinity
    assert strengths(keyframes) == [1.0, 1.0, *[2.0] * 7, 3.0][:10]
    inside = HookKeyframes((HookKeyframe(1.0, 0.0), HookKeyframe(2.0, 0.2, 5), HookKeyframe(3.0, 0.3, 1)))
    assert strengths(inside) == [1.0, 1.0, *[2.0] * 5, *[3.0] * 3]


def test_of_many_that_have_started_the_first_with_guaranteed_steps_is_taken() -> None:
    late = HookKeyframes((HookKeyframe(1.0), *(HookKeyframe(s, 0.5, 0) for s in (2.0, 3.0, 4.0))))
    assert strengths(late) == [1.0] * 5 + [4.0] * 5
    held = HookKeyframes((HookKeyframe(1.0), HookKeyframe(2.0, 0.5, 1), HookKeyframe(3.0, 0.5, 0)))
    assert strengths(held) == [1.0] * 5 + [2.0] + [3.0] * 4


def test_a_second_call_at_the_same_level_is_the_same_step() -> None:
    keyframes = HookKeyframes((HookKeyframe(1.0), HookKeyframe(2.0, 0.2, 2), HookKeyframe(3.0, 0.2, 0)))
    twice = [sigma for sigma in SIGMAS for _ in range(2)]
    assert strengths(keyframes, twice) == [s for s in strengths(keyframes) for _ in range(2)]


@given(
    starts=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6),
    steps=st.integers(1, 20),
)
def test_without_guarantees_the_strength_in_force_is_the_last_that_started(starts: list[float], steps: int) -> None:
    keyframes = HookKeyframes(tuple(HookKeyframe(float(n), p, 0) for n, p in enumerate(starts)))
    sigmas = make_sigmas("normal", steps, TABLE).tolist()[:-1]
    for sigma, strength in zip(sigmas, strengths(keyframes, sigmas), strict=True):
        started = [k for k in keyframes.keyframes if TABLE.sigma_at_percent(k.start_percent) >= sigma * SIGMA_TOLERANCE]
        assert strength == (started[-1] if started else keyframes.keyframes[0]).strength


@pytest.mark.parametrize(
    ("method", "middle"),
    [
        (Interpolation.LINEAR, 0.5),
        (Interpolation.EASE_IN, 0.25),
        (Interpolation.EASE_OUT, 0.75),
        (Interpolation.EASE_IN_OUT, 0.5),
    ],
)
def test_interpolation_begins_and_ends_where_it_is_told_to(method: Interpolation, middle: float) -> None:
    frames = interpolated(0.2, 1.0, 0.1, 0.9, 5, method).keyframes
    assert [f.start_percent for f in frames] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert [frames[0].strength, frames[-1].strength] == pytest.approx([0.2, 1.0])
    assert frames[2].strength == pytest.approx(0.2 + 0.8 * middle)
    assert [f.guarantee_steps for f in frames] == [1, 0, 0, 0, 0]
    quarter = {"linear": 0.25, "ease_in": 0.0625, "ease_out": 0.4375, "ease_in_out": (1 - math.cos(math.pi / 4)) / 2}
    assert frames[1].strength == pytest.approx(0.2 + 0.8 * quarter[method.value])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: HookKeyframe(1.0, 1.5), "start_percent"),
        (lambda: HookKeyframe(math.nan), "strength"),
        (lambda: HookKeyframe(1.0, 0.0, -1), "guarantee_steps"),
        (lambda: interpolated(0, 1, count=1), "count"),
        (lambda: interpolated(0, 1, 0.5, 0.4), "end_percent"),
    ],
)
def test_a_field_that_cannot_be_is_named(make, named: str) -> None:
    with pytest.raises(UnusableField, match=named):
        make()
