"""The age of a submission: it never shrinks, whatever happens to the wall clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.control.detached.submission_age import SubmissionAge


def test_a_clock_that_is_set_back_takes_nothing_from_the_age_and_a_sleep_of_the_machine_counts() -> None:
    age = SubmissionAge(created_at=1000.0)
    read = [age.seconds(*clocks) for clocks in ((1100.0, 5.0), (500.0, 25.0), (510.0, 35.0), (2000.0, 36.0))]
    assert read == [100.0, 120.0, 130.0, 1000.0]
    assert SubmissionAge(created_at=1000.0).seconds(900.0, 5.0) == 0.0, "set back before the first reading"


@given(steps=st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.0, 1e6)), min_size=1))
def test_the_age_grows_at_least_as_the_monotonic_clock(steps: list[tuple[float, float]]) -> None:
    age, wall, monotonic = SubmissionAge(created_at=0.0), 0.0, 0.0
    before = age.seconds(wall, monotonic)
    for wall_step, passed_seconds in steps:
        wall, monotonic = wall + wall_step, monotonic + passed_seconds
        now = age.seconds(wall, monotonic)
        assert now >= max(before, wall)
        assert now - before >= passed_seconds * (1 - 1e-6) - 1e-6
        before = now
