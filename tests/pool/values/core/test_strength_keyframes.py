"""Strengths over the steps: exact at keyframes, as the patcher's keyframes between them, and few different ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.core.refs import LoraRef
from modelpool.pool.values.core.strength_keyframes import MAX_LEVELS, Interpolation, strength_at, strongest
from modelpool.pool.weights.patcher.keyframes import interpolated

RISING = ((0.0, 0.2), (0.5, 1.0))


def strengths(keyframes: tuple[tuple[float, float], ...], interpolation: str, steps: int) -> list[float]:
    return [strength_at(keyframes, interpolation, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("keyframes", "interpolation", "steps", "expected"),
    [
        (RISING, "", 4, [0.2, 0.2, 1.0, 1.0]),
        (RISING, "", 3, [0.2, 0.2, 1.0]),
        (RISING, "linear", 8, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0]),
        (((0.0, 1.0), (0.07, 0.0)), "", 100, [1.0] * 7 + [0.0] * 93),
        (((0.0, -1.0), (1.0, 1.0)), "linear", 4, [-1.0, -0.5, 0.0, 0.5]),
        (((0.0, 0.5),), "", 2, [0.5, 0.5]),
    ],
)
def test_the_strength_of_each_step(
    keyframes: tuple[tuple[float, float], ...], interpolation: str, steps: int, expected: list[float]
) -> None:
    assert strengths(keyframes, interpolation, steps) == expected


@pytest.mark.parametrize("method", list(Interpolation))
def test_between_two_keyframes_the_strength_is_that_of_the_patchers_interpolated_keyframes(
    method: Interpolation,
) -> None:
    """Which has a keyframe at the beginning of each step."""
    keyframes = interpolated(0.2, 1.0, 0.0, 1.0, 11, method).keyframes
    found = strengths(((0.0, 0.2), (1.0, 1.0)), method, 10)
    assert found == pytest.approx([each.strength for each in keyframes[:10]], abs=1e-6)


@given(st.integers(1, 1000), st.sampled_from(["", *Interpolation]), st.integers(1, MAX_LEVELS))
def test_a_run_has_few_different_strengths(steps: int, interpolation: str, count: int) -> None:
    """Each is another set of patched weights."""
    keyframes = tuple((place / count, float((place * 7) % 5)) for place in range(count))
    found = strengths(keyframes, interpolation, steps)
    changes = sum(one != other for one, other in pairwise(found))
    assert changes < MAX_LEVELS
    assert found[0] == keyframes[0][1]


def test_a_lora_acts_at_its_strength_of_a_step() -> None:
    lora = LoraRef("a", "a", "a", 1.0, keyframes=((0.0, 0.0), (0.25, 0.2), (0.5, 1.0)), end=0.75)
    plain = LoraRef("a", "a", "a", 1.0)
    assert [lora.at_step(step, 4) for step in range(4)] == [None, LoraRef("a", "a", "a", 0.2), plain, None]
    assert plain.at_step(3, 4) is plain
    assert strongest(((0.0, 0.5), (0.5, -1.0))) == -1.0
