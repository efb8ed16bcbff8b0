"""Built VAEs run as every component does: weights at rest in half precision elsewhere, computing in full on a device.

Latents in, pixels out and back through the codec on a simulated GPU, with all weights streamed; equal to the CPU with
the same rounded weights.
"""

from __future__ import annotations

import pytest
import torch

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.models.components.vae.build_vae import plan_vae
from modelpool.pool.models.components.vae.codec import VaeCodec
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.models.components.vae.cases import CASES, Case
from tests.pool.models.components.vae.test_codec import format_for, model_latents

INDEX = 68  # of a simulated device that no other test uses
#: sums with an order that depends on where the weights lie in memory
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def device() -> torch.device:
    sim.install()
    sim.configure(INDEX, 1 << 28)
    return torch.device("sim", INDEX)


@pytest.mark.parametrize(
    "name", ["kl", "flux2", "kl_temporal", "taesd", "cascade_a", "oobleck", "ltx_v1", "cosmos", "wan21"]
)
def test_streamed_weights_give_what_resident_ones_do(name: str, device: torch.device) -> None:
    case: Case = CASES[name]
    file = {key: x.half() if x.is_floating_point() else x for key, x in case.file(case.module()).items()}
    plan = plan_vae({key: tuple(x.shape) for key, x in file.items()})
    latents = model_latents(case)
    latent = format_for(case, latents.shape[1])
    resident = VaeCodec(
        plan.build({key: x.float() if x.is_floating_point() else x for key, x in file.items()}), plan.facts, latent
    )
    module = plan.build(file)
    swap_to_casting(module)
    streamed = VaeCodec(module, plan.facts, latent)
    pixels = torch.rand(case.pixels, generator=torch.Generator().manual_seed(4)) * 2 - 1
    before_bytes = sim.memory_stats(INDEX).used_bytes
    with compute(device, torch.float32):
        decoded = streamed.decode(latents.to(device)).cpu()
        encoded = streamed.encode(pixels.to(device)).cpu()
    assert sim.memory_stats(INDEX).used_bytes == before_bytes, "what was made of streamed weights stays nowhere"
    torch.testing.assert_close(decoded, resident.decode(latents), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(encoded, resident.encode(pixels), rtol=TOLERANCE, atol=TOLERANCE)
