"""Built diffusion models run as every component does: weights at rest in few bits on the host, computing in full on a
device that they are streamed to; equal to the plain model with the same rounded weights on the CPU."""

from __future__ import annotations

import pytest
import torch

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.each_case import each_case
from tests.pool.models.components.diffusion.image_cases import CASES, Case
from tests.pool.models.components.diffusion.test_image_build import level
from tests.pool.zoo.case import quiet_libraries

INDEX = 56  # of a simulated device that no other test uses
#: sums with an order that depends on where the weights lie in memory
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def device() -> torch.device:
    sim.install()
    sim.configure(INDEX, 1 << 28)
    return torch.device("sim", INDEX)


@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e4m3fn], ids=["fp16", "fp8"])
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_streamed_weights_give_what_resident_ones_do(case: Case, storage: torch.dtype, device: torch.device) -> None:
    file = {key: x.to(storage) for key, x in case.file(case.module()).items()}
    plan = plan_diffusion_model({key: tuple(x.shape) for key, x in file.items()})
    x, told = case.inputs()
    levels = level(case)
    with torch.no_grad(), quiet_libraries():
        resident = plan.build({key: x.float() for key, x in file.items()})
        expected = plan.call(resident, x, levels, told)
        streamed = plan.build(file)
        swap_to_casting(streamed)
        with compute(device, torch.float32):
            elsewhere = {name: value.to(device) for name, value in told.items()}
            given = plan.call(streamed, x.to(device), levels.to(device), elsewhere)
    assert given.device == device
    torch.testing.assert_close(given.cpu(), expected, rtol=TOLERANCE, atol=TOLERANCE)


# Krea 2 norms in full precision, by weights that are in half
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@each_case("case", list(CASES.values()), ids=list(CASES))
def test_half_precision_is_near_full_precision(case: Case) -> None:
    """Computed in bfloat16, as most models are: no dtype meets another, and time keeps its digits.

    Time and guidance are numbers that bfloat16 has; several classes round them.
    """
    file = {key: x.to(torch.bfloat16) for key, x in case.file(case.module()).items()}
    plan = plan_diffusion_model({key: tuple(x.shape) for key, x in file.items()})
    x, told = case.inputs()
    levels = level(case) * 2 / 3  # one half and a sixth
    levels[1] = levels[0] / 2
    exact = {name: value for name, value in told.items() if name in ("size", "next_level") or value.dtype is torch.bool}
    if "guidance" in told:
        exact["guidance"] = torch.full((2,), 4.0)
    half = {name: value.to(torch.bfloat16) for name, value in told.items() if name not in exact}
    with torch.no_grad(), quiet_libraries():
        plain = plan.build({key: x.float() for key, x in file.items()})
        full = {name: value.float() for name, value in half.items()}
        expected = plan.call(plain, x.to(torch.bfloat16).float(), levels, full | exact)
        module = plan.build(file)
        swap_to_casting(module)
        with compute(torch.device("cpu"), torch.bfloat16):
            given = plan.call(module, x.to(torch.bfloat16), levels, half | exact)
    assert given.dtype is torch.bfloat16
    difference = ((given.float() - expected).norm() / expected.norm()).item()
    assert difference < 0.06
