"""Policies: what a person asks for, what a device suggests, the bytes left to others, and what a worker may then
use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.devices.capabilities import INFERENCE_BYTES
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.vram_policy import (
    RESERVE_BYTES,
    VramPolicy,
    capacity_bytes,
    choose_policy,
    default_reserve_bytes,
    reserve_for,
    rules_for,
)
from tests.each_case import each_case

GIB = 1 << 30
MIB = 1 << 20
SIZES = st.integers(0, 1 << 40)


@each_case("kind", DeviceKind)
@each_case("flag", VramPolicy)
def test_what_was_asked_for_holds_wherever_there_is_device_memory(kind: DeviceKind, flag: VramPolicy) -> None:
    found = choose_policy(flag, kind)
    assert found.value is (VramPolicy.DISABLED if kind is DeviceKind.CPU else flag)
    assert ("although" in found.reason) is (kind is DeviceKind.CPU and flag is not VramPolicy.DISABLED)


@pytest.mark.parametrize(
    ("kind", "shares", "suggested"),
    [
        (DeviceKind.CUDA, False, VramPolicy.NORMAL),
        (DeviceKind.CUDA, True, VramPolicy.SHARED),
        (DeviceKind.ROCM, False, VramPolicy.NORMAL),
        (DeviceKind.XPU, True, VramPolicy.SHARED),
        (DeviceKind.MPS, False, VramPolicy.SHARED),
        (DeviceKind.DIRECTML, False, VramPolicy.NORMAL),
        (DeviceKind.SIM, False, VramPolicy.NORMAL),
        (DeviceKind.CPU, True, VramPolicy.DISABLED),
    ],
)
def test_what_devices_suggest(kind: DeviceKind, shares: bool, suggested: VramPolicy) -> None:
    found = choose_policy(None, kind, shares)
    assert found.value is suggested
    assert found.reason


def test_policies_differ_in_their_rules() -> None:
    assert rules_for(VramPolicy.NONE).weights_share == 0
    assert not rules_for(VramPolicy.LOW).keeps_idle
    assert not rules_for(VramPolicy.HIGH).may_stream


@pytest.mark.parametrize(
    ("kind", "device_bytes", "on_windows", "reserve_bytes"),
    [
        (DeviceKind.CUDA, 24 * GIB, False, 400 * MIB),
        (DeviceKind.CUDA, 8 * GIB, True, 600 * MIB),
        (DeviceKind.CUDA, 24 * GIB, True, 700 * MIB),
        (DeviceKind.MPS, 12 * GIB, False, 400 * MIB),
        (DeviceKind.SIM, 24 * GIB, True, 0),
        (DeviceKind.CPU, 24 * GIB, False, 0),
    ],
)
def test_the_usual_reserve(kind: DeviceKind, device_bytes: int, on_windows: bool, reserve_bytes: int) -> None:
    assert default_reserve_bytes(kind, device_bytes, on_windows) == reserve_bytes


@given(st.none() | SIZES, st.sampled_from(DeviceKind), SIZES)
def test_a_reserve_that_was_asked_for_holds_where_others_use_the_device(
    asked: int | None, kind: DeviceKind, size: int
) -> None:
    """Found in a review: on sim and cpu it came out of the budget that the worker was given."""
    found = reserve_for(asked, kind, size)
    if kind in (DeviceKind.SIM, DeviceKind.CPU):
        assert capacity_bytes(64 * MIB, 64 * MIB, found) == 64 * MIB
    else:
        assert found == (400 * MIB if asked is None else asked)


def test_the_reserve_is_part_of_what_the_golden_run_needs() -> None:
    golden = json.loads((Path(__file__).parents[2] / "golden" / "misc.json").read_text())["cpu"]["min_inference"]
    assert pytest.approx(golden - 0.8 * GIB) == RESERVE_BYTES
    assert pytest.approx(golden) == INFERENCE_BYTES


@given(st.none() | SIZES, SIZES, SIZES)
def test_a_worker_leaves_the_reserve_and_keeps_to_its_budget(budget: int | None, free: int, reserve: int) -> None:
    found = capacity_bytes(budget, free, reserve)
    assert 0 <= found <= max(0, free - reserve)
    assert budget is None or found <= budget
    assert found in (budget, max(0, free - reserve)), "as much as there may be"


def test_a_small_budget_on_a_large_card_is_there_to_be_used() -> None:
    assert capacity_bytes(64 * MIB, 20 * GIB, 400 * MIB) == 64 * MIB
