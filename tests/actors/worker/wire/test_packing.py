"""What travels between processes comes out as it went in, and what Ray keeps whole is not packed."""

from __future__ import annotations

import numpy as np
import pytest

from modelpool.actors.worker.gpu_worker import result_bytes
from modelpool.actors.worker.wire.messages import RunRequest
from modelpool.actors.worker.wire.packing import SMALL_BYTES, packed, packed_result, result_of, unpacked
from modelpool.pool.values.core.stage_params import (
    Encoded,
    GuidanceParams,
    ImagePixels,
    Latent,
    LoraRef,
    ModelRef,
    OutputShape,
    SampleParams,
    SamplerState,
    SamplingSchedule,
)
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentUse,
    ExecutionMode,
    OomStep,
    RunCost,
    RunError,
    RunErrorKind,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
)
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident

RAY_MESSAGE_BYTES = 100 << 10

KEY = ComponentKey("shapes/vae@0123456789")
WORK = SampleParams(
    ModelRef("shapes", "/m", "a" * 64),
    (LoraRef("light", "/l", "b" * 64, 0.5),),
    OutputShape(64, 64),
    SamplingSchedule(4, "euler", "normal"),
    GuidanceParams(5.0),
    7,
)
TASK = TaskSpec(
    TaskId("t"),
    Stage.SAMPLE,
    (ComponentUse(KEY, 5, "digest", 7),),
    3,
    0.5,
    (TaskId("n"),),
    (ExecutionMode(2, batch=1),),
)
REQUEST = RunRequest(TASK, WORK, 2, 9, fresh=True, needed_next=(KEY,), oom_steps=(OomStep.DROP_CACHES,))
REPORT = TaskReport(
    TaskId("t"),
    2,
    WorkerId("gpu-0"),
    1,
    Residency(64, (Resident(KEY, 8, "digest", 7),)),
    RunCost(0.5, 0.25, division=ExecutionMode(2, batch=1), oom_steps=(OomStep.DIVIDE,)),
    RunError(RunErrorKind.OUT_OF_VRAM, "full", "trace"),
    99,
)


@pytest.mark.parametrize("value", [REQUEST, REPORT, (REPORT, REPORT)], ids=["request", "report", "reports"])
def test_requests_and_reports_come_out_as_they_went_in(value: object) -> None:
    assert unpacked(packed(value)) == value


def test_all_that_is_handed_on_between_two_models_is_counted() -> None:
    """What a sampler remembers too, which is several times the latent."""
    latent = np.zeros((4, 2, 3, 3), np.float32)
    halfway = SamplerState(latent, (0.9, 0.95, 1.0), np.stack([latent] * 3), latent)
    assert result_bytes(halfway) == 5 * latent.nbytes
    assert result_bytes(SamplerState(latent)) == latent.nbytes


@pytest.mark.parametrize("kind", [Encoded, Latent, ImagePixels])
@pytest.mark.parametrize("nbytes", [0, 4, SMALL_BYTES, SMALL_BYTES + 4, 1 << 20])
def test_small_results_travel_in_a_message_and_others_as_they_are(kind: type, nbytes: int) -> None:
    array = np.random.default_rng(1).integers(0, 256, (1, 1, nbytes), np.uint8)
    result = kind(array if kind is ImagePixels else array.view(np.float32))
    assert result_bytes(result) == nbytes
    sent = packed_result(result, nbytes)
    if nbytes > SMALL_BYTES:
        assert sent is result
    else:
        assert isinstance(sent, bytes)
        assert len(sent) < RAY_MESSAGE_BYTES
    read = result_of(sent)
    assert type(read) is kind
    (field,) = (name for name in kind.__slots__ if isinstance(getattr(result, name), np.ndarray))
    before, after = getattr(result, field), getattr(read, field)
    assert (after.dtype, after.shape, after.tobytes()) == (before.dtype, before.shape, before.tobytes())


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("side", [8, 64])
def test_what_is_handed_on_between_two_models_travels_whole(side: int, remembers: bool) -> None:
    """A latent of 64 cells is small alone, and is not with what a sampler remembers."""
    draw = np.random.default_rng(1)
    latent = draw.random((4, side, side), np.float32)
    whole = SamplerState(latent, (0.9, 0.95, 1.0), draw.random((3, *latent.shape), np.float32), latent + 1)
    result = whole if remembers else SamplerState(latent)
    sent = packed_result(result, result_bytes(result))
    assert isinstance(sent, bytes) == (side == 8 or not remembers)
    read = result_of(sent)
    assert (type(read), read.levels) == (SamplerState, result.levels)
    assert [array.tobytes() for array in read.arrays] == [array.tobytes() for array in result.arrays]
    assert [array.shape for array in read.arrays] == [array.shape for array in result.arrays]


@pytest.mark.parametrize("tokens", [77, 2000])
def test_both_arrays_of_a_text_travel_and_count(tokens: int) -> None:
    """Of 2000 tokens neither array is large, and both together are."""
    draw = np.random.default_rng(1)
    result = Encoded(draw.random((tokens, 8), np.float32), draw.random(SMALL_BYTES // 8, np.float32))
    size_bytes = result_bytes(result)
    assert size_bytes == tokens * 8 * 4 + SMALL_BYTES // 8 * 4
    sent = packed_result(result, size_bytes)
    assert isinstance(sent, bytes) == (tokens == 77)
    read = result_of(sent)
    assert isinstance(read, Encoded)
    assert read.pooled_V is not None
    assert read.pooled_V.tobytes() == result.pooled_V.tobytes()
    assert read.context_LD.tobytes() == result.context_LD.tobytes()


def test_a_run_that_failed_has_no_result_to_pack() -> None:
    assert packed_result(None, 0) is None
    assert result_of(None) is None
