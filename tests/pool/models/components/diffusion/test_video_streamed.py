"""Built models for video and audio, Stable Cascade and special UNets run as every component does: weights at rest in
few bits on the host, computing in full on a device that they are streamed to; equal to the plain model with the same
rounded weights on the CPU. Tables that no file carries have their values."""

from __future__ import annotations

import pytest
import torch

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.models.components.diffusion.video_cases import CASES, Case
from tests.pool.zoo.case import quiet_libraries

INDEX = 70  # of a simulated device that no other test uses
#: sums with an order that depends on where the weights lie in memory
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def device() -> torch.device:
    sim.install()
    sim.configure(INDEX, 1 << 28)
    return torch.device("sim", INDEX)


@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e4m3fn], ids=["fp16", "fp8"])
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_streamed_weights_give_what_resident_ones_do(case: Case, storage: torch.dtype, device: torch.device) -> None:
    file = {key: x.to(storage) for key, x in case.file(case.module()).items()}
    plan = plan_diffusion_model({key: tuple(x.shape) for key, x in file.items()}, config=case.hints or None)
    x, level, told = case.inputs()
    with torch.no_grad(), quiet_libraries():
        resident = plan.build({key: x.float() for key, x in file.items()})
        expected = plan.call(resident, x, level, told)
        streamed = plan.build(file)
        swap_to_casting(streamed)
        with compute(device, torch.float32):
            elsewhere = {name: value.to(device) for name, value in told.items()}
            given = plan.call(streamed, x.to(device), level.to(device), elsewhere)
    assert given.device == device
    torch.testing.assert_close(given.cpu(), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_it_computes_in_half_precision(case: Case, device: torch.device) -> None:
    """Latents and conditions in 16 bits, the level and masks as they are: near to the same in 32, and in 16 bits.

    Levels and guidance that are cut to 16 bits on their way, as diffusers does to some, are off by ten times as much.
    """
    module = case.module()
    file = case.file(module)
    plan = plan_diffusion_model({key: tuple(x.shape) for key, x in file.items()}, config=case.hints or None)
    x, level, told = case.inputs()
    kept = ("frame_rate", "guidance", "numbers", "image_mask", "noise_level")
    half = {
        name: value.to(torch.bfloat16) if value.is_floating_point() and name not in kept else value
        for name, value in told.items()
    }
    with torch.no_grad(), quiet_libraries():
        expected = plan.call(plan.build(file), x, level, told)
        streamed = plan.build(file)
        swap_to_casting(streamed)
        with compute(device, torch.bfloat16):
            elsewhere = {name: value.to(device) for name, value in half.items()}
            given = plan.call(streamed, x.to(torch.bfloat16).to(device), level.to(device), elsewhere)
    assert given.dtype == torch.bfloat16
    error = (given.cpu().float() - expected).std() / expected.std()
    assert error < 0.03
