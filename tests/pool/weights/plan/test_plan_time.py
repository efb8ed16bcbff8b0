"""Expected seconds: bytes before the run, bytes while it runs, and how the two kinds of device hide the second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.plan.eviction_plan import Move, Residency, ResidencyPlan, Resident, plan
from modelpool.pool.weights.plan.plan_time import PlanSeconds, expected_seconds

A = ComponentKey("a")


def moving(upload_bytes: int, streamed_bytes: int) -> ResidencyPlan:
    return ResidencyPlan((), (Move(A, upload_bytes),), (), Residency(1), streamed_bytes)


def test_golden_seconds() -> None:
    """300 B before the run and 800 B during it at 100 B/s, 5 s of computing."""
    assert expected_seconds(moving(300, 800), 5, 100, overlaps=True) == PlanSeconds(3, 8, 5)
    assert expected_seconds(moving(300, 400), 5, 100, overlaps=True) == PlanSeconds(3, 5, 5)
    assert expected_seconds(moving(300, 800), 5, 100, overlaps=False) == PlanSeconds(3, 13, 5)
    assert expected_seconds(moving(0, 800), 5, 100, overlaps=True).slowdown == 1.6
    assert expected_seconds(moving(0, 0), 0, 100, overlaps=True).slowdown == 1


@given(st.integers(0, 30), st.integers(1, 9), st.floats(0, 100), st.booleans())
def test_more_room_is_never_slower(room_bytes, passes, computing_seconds, overlaps) -> None:
    specs = {A: ComponentSpec(A, Role.VAE, 30, 30)}

    def seconds(capacity_bytes: int) -> PlanSeconds:
        now = Residency(capacity_bytes, (Resident(A, capacity_bytes),) if capacity_bytes else ())
        return expected_seconds(
            plan(now, (ComponentUse(A, 0, passes=passes),), specs, 0), computing_seconds, 2, overlaps
        )

    less, more = seconds(room_bytes), seconds(min(30, room_bytes + 1))
    assert more.run_seconds <= less.run_seconds
    assert less.run_seconds >= computing_seconds
    assert less.load_seconds == 0
    assert less.run_seconds >= (30 - room_bytes) * passes / 2
    assert seconds(30).run_seconds == pytest.approx(computing_seconds)
