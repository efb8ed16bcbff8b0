"""An image has the same bits on every device, and sampling reads nothing back from one but the result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.inference.sampling.sampler_names import SAMPLERS, SCHEDULES
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    ModelRef,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
)
from tests.each_case import each_case
from tests.pool.changed_work import changed_work
from tests.pool.inference.sampling.one_image import denoise_image

SHAPE = (4, 8, 8)
WORK = SampleParams(
    ModelRef("toy", "toy.safetensors", "00"),
    (),
    OutputShape(64, 64),
    SamplingSchedule(6, "euler", "normal"),
    GuidanceParams(5.0),
    3,
)
QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)


def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
    """Of operations that round alike everywhere, so that a difference is the samplers'."""
    mix_B = timestep_B * 0.001 + context_BLD[:, 0, 0]
    return x_BCHW * 0.9 + mix_B[:, None, None, None] * 0.05


def image(device: torch.device, sampler: str, schedule: str) -> Tensor:
    cond_LD, uncond_LD = torch.full((77, 8), 0.3), torch.full((77, 8), -0.1)
    work = changed_work(WORK, sampler=sampler, noise_schedule=schedule)
    return denoise_image(predict_noise, work, SHAPE, cond_LD, uncond_LD, device, QUIET)


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        return torch.device("cuda")
    sim.configure(0, budget_bytes=1 << 20)
    return torch.device("sim", 0)


def test_an_image_has_the_bits_that_it_has_on_the_cpu(device: torch.device) -> None:
    pairs = {(name, SAMPLERS[name].schedule) for name in SAMPLERS} | {("euler", s) for s in SCHEDULES}
    for sampler, schedule in sorted(pairs - {("euler", "ays_svd")}):
        expected = image(torch.device("cpu"), sampler, schedule)
        assert torch.equal(image(device, sampler, schedule), expected), (sampler, schedule)


@each_case("sampler", sorted(SAMPLERS.keys() - {"dpm_adaptive"}))  # which reads its error back
def test_only_the_result_is_read_back_from_the_device(sampler: str) -> None:
    sim.configure(0, budget_bytes=1 << 20)
    before = sim.memory_stats(0)
    result = image(torch.device("sim", 0), sampler, "normal")
    after = sim.memory_stats(0)
    assert after.d2h_count - before.d2h_count == 1
    assert after.d2h_bytes - before.d2h_bytes == result.nbytes
    assert after.used_bytes == before.used_bytes
