"""ControlNets that act at a part of the noise levels: it is the same part, however a run is divided."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from modelpool.pool.inference.controlnets.controlnet_run import RunControlNet, levels_of
from modelpool.pool.inference.sampling.schedules import SigmaTable, sigma_table
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind
from modelpool.pool.values.core.stage_params import ControlRef, task_id
from tests.pool.inference.controlnets.test_controlnet_run import WORK

TABLES = {"levels": sigma_table(), "flow": sigma_table(NoiseFacts(NoiseKind.FLOW, shift=3.0))}


def ref(start: float, end: float, by_noise: bool = True) -> ControlRef:
    return ControlRef("c", "c", "bb", 1.0, start, end, by_noise=by_noise)


def acting(start: float, end: float, table: SigmaTable, sigmas: list[float], by_noise: bool = True) -> list[int]:
    """The steps in which a ControlNet acts that are run at these levels."""
    nothing: Any = None
    control = ref(start, end, by_noise)
    net = RunControlNet(control, nothing, nothing, torch.zeros(1), levels_of(control, table))
    inputs = [torch.full((2,), table.time_input(sigma), dtype=torch.float32) for sigma in sigmas]
    return [step for step, level_B in enumerate(inputs) if net.is_on(step, len(sigmas), level_B)]


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_a_part_of_the_noise_is_the_same_in_each_part_of_a_run(table: SigmaTable) -> None:
    """Of steps, it began anew in each part."""
    steps = 12
    sigmas = [table.sigma((1 - step / steps) * table.last_timestep) for step in range(steps)]
    for start, end in ((0.0, 0.5), (0.25, 0.75), (0.4, 1.0), (0.0, 0.01), (0.99, 1.0), (0.5, 0.75)):
        whole = acting(start, end, table, sigmas)
        expected = [step for step in range(steps) if start - 1e-6 <= step / steps <= end + 1e-6]
        assert whole == expected, (start, end)
        parts = [acting(start, end, table, part) for part in (sigmas[:5], sigmas[5:9], sigmas[9:])]
        joined = [first + step for first, part in zip((0, 5, 9), parts, strict=True) for step in part]
        assert joined == whole, (start, end)
    assert acting(0.0, 0.5, table, sigmas[6:], by_noise=False) == [0, 1, 2], "steps are those of a part"


def test_the_ends_have_no_bound_and_steps_have_no_levels() -> None:
    table = TABLES["levels"]
    assert levels_of(ref(0.0, 1.0), table) == (-math.inf, math.inf)
    assert levels_of(ref(0.2, 0.5, by_noise=False), table) is None
    low, high = levels_of(ref(0.2, 0.5), table) or (0, 0)
    assert (low, high) == pytest.approx((0.5 * 999, 0.8 * 999), rel=1e-6)


def test_what_shares_are_of_is_part_of_the_task() -> None:
    works = [replace(WORK, conditions=(ref(0.2, 0.5, by_noise),)) for by_noise in (False, True)]
    assert len({task_id(work, {}) for work in works}) == 2
