"""What images would do to a GPU's memory: properties of forecasts.

Proves: the limits that a forecast names are exact (one byte less than the smallest is refused; from the next ones on no
run is divided, and nothing moves for later images); no plan exceeds the capacity; figures are the figures of the tasks;
a smaller memory is never faster; images add up.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.control.forecast import PLANNED_IMAGES, Forecast, Speeds, forecast
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.memory_fit import check_fits
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.devices.vram_policy import VramPolicy, rules_for
from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.specs.spec import ComponentKey, JobId, Stage
from modelpool.pool.weights.plan.partial_loads import ModuleBytes
from tests.actors.fakes import MIB, SIZES, FakeCatalog

GPU = Speeds(1e9, overlaps=True, ahead_bytes=MIB)
PLAIN = Speeds(1e9, overlaps=False)


def cut(prompt: str = "p", **fields: object) -> JobGraph:
    request = GenerateRequest(model="shapes", prompt=prompt, seed=1, **fields)
    return build_graph(request, JobId("planned"), FakeCatalog())[1]


WIDE = cut(width=4096, height=4096)
LIMITS = forecast(WIDE, 1 << 40, PLAIN)


def test_limits_are_exact() -> None:
    smallest = forecast(WIDE, LIMITS.smallest_bytes, PLAIN)
    assert max(stage.planned_bytes for stage in smallest.first) == LIMITS.smallest_bytes
    with pytest.raises(DoesNotFit):
        forecast(WIDE, LIMITS.smallest_bytes - 1, PLAIN)
    with pytest.raises(DoesNotFit):
        check_fits(WIDE.job, LIMITS.smallest_bytes - 1)
    assert all(stage.division is None for stage in forecast(WIDE, LIMITS.whole_bytes, PLAIN).first)
    assert any(stage.division is not None for stage in forecast(WIDE, LIMITS.whole_bytes - 1, PLAIN).first)
    resident = forecast(WIDE, LIMITS.resident_bytes, PLAIN, images=2)
    assert all(stage.upload_bytes == stage.streamed_bytes == 0 for stage in resident.again)
    assert all(stage.seconds.slowdown == 1.0 for stage in resident.first)
    tighter = forecast(WIDE, LIMITS.resident_bytes - 1, PLAIN, images=2)
    assert any(stage.evicted for stage in (*tighter.first, *tighter.again))


@given(
    st.integers(0, LIMITS.resident_bytes - LIMITS.smallest_bytes + 5 * MIB),
    st.integers(1, 20),
    st.sampled_from([GPU, PLAIN]),
)
def test_no_plan_exceeds_the_capacity_and_images_add_up(extra_bytes: int, images: int, speeds: Speeds) -> None:
    capacity_bytes = LIMITS.smallest_bytes + extra_bytes
    found = forecast(WIDE, capacity_bytes, speeds, images)
    stages = (*found.first, *found.again)
    assert all(stage.planned_bytes <= capacity_bytes for stage in stages)
    assert all(stage.resident_bytes <= stage.weight_bytes for stage in stages)
    assert all(stage.seconds.slowdown >= 1.0 for stage in stages)
    assert [stage.stage for stage in found.again] == ([Stage.SAMPLE, Stage.DECODE] if images > 1 else [])
    least_seconds = images * sum(t.run_seconds for t in WIDE.job.tasks if t.stage is not Stage.ENCODE)
    assert found.seconds >= least_seconds * (1 - 1e-9)
    assert found == forecast(WIDE, capacity_bytes, speeds, images)
    assert (LIMITS.smallest_bytes, LIMITS.resident_bytes) == (found.smallest_bytes, found.resident_bytes)


@given(st.lists(st.integers(0, LIMITS.resident_bytes - LIMITS.smallest_bytes), min_size=2, max_size=2))
def test_a_smaller_memory_is_never_faster(extra: list[int]) -> None:
    small, large = (forecast(WIDE, LIMITS.smallest_bytes + more, PLAIN) for more in sorted(extra))
    assert small.seconds >= large.seconds * (1 - 1e-9)


def test_policies_forecast_what_they_do() -> None:
    """Found in a review: forecasts were the same under every policy."""
    none, low, high = (rules_for(policy) for policy in (VramPolicy.NONE, VramPolicy.LOW, VramPolicy.HIGH))
    assert LIMITS.resident_bytes is not None
    streamed = forecast(WIDE, LIMITS.resident_bytes, PLAIN, 2, rules=none)
    assert all(stage.resident_bytes == stage.upload_bytes == 0 < stage.streamed_bytes for stage in streamed.first)
    assert all("the policy keeps no weights" in stage.why[0] for stage in streamed.first)
    loaded = forecast(WIDE, LIMITS.resident_bytes, PLAIN, 2, rules=low)
    assert all(stage.resident_bytes == stage.weight_bytes for stage in (*loaded.first, *loaded.again))
    assert all(stage.upload_bytes > 0 for stage in loaded.again)
    assert streamed.resident_bytes is loaded.resident_bytes is None
    whole = forecast(WIDE, LIMITS.resident_bytes, PLAIN, 2, rules=high)
    assert whole.resident_bytes == LIMITS.resident_bytes
    assert whole.smallest_bytes > LIMITS.smallest_bytes
    tight = forecast(WIDE, whole.smallest_bytes, PLAIN, 2, rules=high)
    assert all(stage.streamed_bytes == 0 for stage in (*tight.first, *tight.again))
    with pytest.raises(DoesNotFit, match="the policy does not allow streaming"):
        forecast(WIDE, whole.smallest_bytes - 1, PLAIN, rules=high)


def test_many_images_are_multiplied_not_listed() -> None:
    """Found in a review: 20,000,000 images took 98 seconds. This would not end."""
    images = 10**15
    found, fewer = (forecast(WIDE, LIMITS.smallest_bytes, PLAIN, count) for count in (images, PLANNED_IMAGES))
    more_bytes = sum(stage.upload_bytes + stage.streamed_bytes for stage in found.again)
    assert found.bus_bytes == fewer.bus_bytes + (images - PLANNED_IMAGES) * more_bytes
    assert found.seconds > fewer.seconds * images / PLANNED_IMAGES / 2


def test_figures_are_those_of_the_tasks() -> None:
    found = forecast(WIDE, LIMITS.resident_bytes, PLAIN)
    for stage, task in zip(found.first, WIDE.job.tasks, strict=True):
        assert stage.activation_bytes == task.activation_bytes
        assert stage.scratch_bytes == MIB
        assert stage.components == tuple(use.component for use in task.uses)
    by_stage = {stage.stage: stage for stage in found.first}
    assert by_stage[Stage.ENCODE].weight_bytes == min(SIZES.values()) + 4 * MIB


def test_what_leaves_and_what_streams_is_told_with_the_reason() -> None:
    """Room for the text encoder or for a part of the diffusion model, not for both."""
    found = forecast(cut(), 12 * MIB, PLAIN)
    (sampled,) = (stage for stage in found.first if stage.stage is Stage.SAMPLE)
    assert sampled.evicted[0][0].startswith("shapes/text_encoder@")
    assert sampled.streamed_bytes > 0
    assert any("leaves" in sentence for sentence in sampled.why)
    assert any("streams" in sentence for sentence in sampled.why)
    assert sampled.seconds.slowdown > 1.0


def test_streamed_modules_are_hidden_behind_computing_only_as_their_order_allows() -> None:
    """All the work lies in the first module; the copies of the others cannot run beside it further than ahead_bytes."""

    def modules(key: ComponentKey) -> tuple[ModuleBytes, ...]:
        sizes = [MIB] * 20
        return tuple(ModuleBytes(f"m{i}", size, size, 1_000_000 if i == 0 else 1) for i, size in enumerate(sizes))

    def sample_seconds(found: Forecast) -> float:
        return next(stage.seconds.run_seconds for stage in found.first if stage.stage is Stage.SAMPLE)

    rough = forecast(cut(), 8 * MIB, GPU)
    fine = forecast(cut(), 8 * MIB, GPU, modules=modules)
    assert sample_seconds(fine) >= sample_seconds(rough)
    assert sample_seconds(forecast(cut(), 64 * MIB, GPU, modules=modules)) == sample_seconds(
        forecast(cut(), 64 * MIB, GPU)
    )
