"""Conditions on a device: what the host computes with stays on the host."""

from __future__ import annotations

import torch

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.families.parts.video_calls import frame_rate
from modelpool.pool.inference.conditioning.conditions import Condition

INDEX = 61  # of a simulated device that no other test uses


def test_reading_the_frame_rate_does_not_wait_for_the_device() -> None:
    """Found in a review: LTX-Video and Cosmos read it from the device, once or twice in each step."""
    sim.configure(INDEX, 1 << 20)
    device = torch.device("sim", INDEX)
    inputs = {"frame_rate": torch.tensor([24.0, 24.0]), "image_mask": torch.ones(2, 1)}
    placed = Condition(torch.ones(2, 3, 4), None, inputs).to(device)
    assert placed.context_BLD.device == placed.model_kwargs["image_mask"].device == device
    before = sim.memory_stats(INDEX).d2h_count
    assert frame_rate(placed.model_kwargs) == 24.0
    assert sim.memory_stats(INDEX).d2h_count == before
