"""Suggests where the components of a model are loaded, kept and computed: device or host. Pure; torch-free.

Suggestions by policy and sizes for a single model, for users who place components by hand and for `modelpool doctor`.
Workers of a pool plan for all models together instead (`pool.weights.plan.eviction_plan`): there a component is loaded
to the device when a task needs it. Source of the rules: comfyui-behaviour facts, section 3.
"""

from __future__ import annotations

from enum import StrEnum

from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.values.core.decision import Decision


class MemoryPlace(StrEnum):
    """Device memory or host memory."""

    DEVICE = "device"
    HOST = "host"


def text_encoder_place(policy: VramPolicy, float16: bool) -> Decision[MemoryPlace]:
    """Return where texts are encoded. `float16`: the device computes well in float16."""
    if policy not in (VramPolicy.HIGH, VramPolicy.NORMAL):
        return Decision(
            MemoryPlace.HOST, f"the policy is {policy.value}, which leaves the device to the diffusion model"
        )
    if not float16:
        return Decision(MemoryPlace.HOST, "a device without fast float16 gains little over the CPU")
    return Decision(MemoryPlace.DEVICE, f"the policy is {policy.value}, and the device is fast")


def diffusion_first_place(
    policy: VramPolicy, size_bytes: int, free_device_bytes: int, free_host_bytes: int
) -> Decision[MemoryPlace]:
    """Return where a diffusion model of `size_bytes` is loaded first. It computes on the device, if one is used."""
    match policy:
        case VramPolicy.DISABLED:
            return Decision(MemoryPlace.HOST, "the device is not used")
        case VramPolicy.HIGH | VramPolicy.SHARED:
            return Decision(MemoryPlace.DEVICE, f"the policy is {policy.value}")
        case VramPolicy.NONE:
            return Decision(MemoryPlace.HOST, "no weights are kept on the device")
    if free_device_bytes > free_host_bytes and size_bytes < free_device_bytes:
        return Decision(MemoryPlace.DEVICE, "the device has room for it, and more than the host")
    return Decision(MemoryPlace.HOST, "the host has more room")


def diffusion_rest_place(policy: VramPolicy) -> Decision[MemoryPlace]:
    """Return where an idle diffusion model is kept."""
    if policy is VramPolicy.HIGH:
        return Decision(MemoryPlace.DEVICE, "the policy is high: what is loaded stays")
    return Decision(MemoryPlace.HOST, "device memory is for the running component")


def vae_place(policy: VramPolicy) -> Decision[MemoryPlace]:
    """Return where images are decoded."""
    if policy is VramPolicy.DISABLED:
        return Decision(MemoryPlace.HOST, "the device is not used")
    return Decision(MemoryPlace.DEVICE, "decoding on the CPU takes many times as long")
