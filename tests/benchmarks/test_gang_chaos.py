"""The series of faults of gangs: its faults are those of its seed; and, nightly, a few of them on real Ray workers."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.gang_chaos import ROWS, draw_faults, series

STEPS = 10


def test_a_seed_draws_the_same_faults_of_all_kinds_over_all_rows() -> None:
    drawn = draw_faults(50, 1, list(ROWS), STEPS)
    assert drawn == draw_faults(50, 1, list(ROWS), STEPS)
    assert drawn != draw_faults(50, 2, list(ROWS), STEPS)
    faults = [(row, fault) for row, each in drawn.items() for fault in each]
    assert Counter(fault.kind for _, fault in faults) == {"kill": 30, "stop": 5, "pause": 5, "drain": 10}
    assert all(0 <= fault.rank < ROWS[row].gpus and 0 < fault.step < STEPS - 2 for row, fault in faults)
    assert {fault.rank == 0 for _, fault in faults} == {True, False}
    assert set(drawn) == {row for row, _ in faults}


@pytest.mark.ray
@pytest.mark.nightly(usually="tests/pool/engine/gang/test_absent_members.py")
def test_a_few_faults_break_nothing() -> None:
    tally = series(6, 2, ["3: tokens", "4: peer weights, texts and tokens"], STEPS, 0.6)
    assert not tally.broken, tally.broken
    assert sum(map(len, tally.noticed.values())) == 6
