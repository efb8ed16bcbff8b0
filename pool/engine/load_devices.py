"""Suggests where the components of a model are loaded, kept and computed: device or host. Pure; torch-free.

Suggestions by policy and sizes for a single model, for users who place components by hand and for `modelpool doctor`.
Workers of a pool plan for all models together instead (`pool.weights.plan.eviction_plan`): there a component is loaded
to the device when a task needs it. Source of the rules: comfyui-behaviour facts, section 3.
"""

from __future__ import annotations

from enum import StrEnum

from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.values.core.decision import Decision

#: a text encoder up to this size is loaded on the host: moving it to the device is fast. Source: as above
SMALL_ENCODER_BYTES = 1 << 30
#: device memory needed to load a text encoder there, as a multiple of its size. Source: as above
ENCODER_ROOM = 1.2


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


def text_encoder_first_place(
    computes: MemoryPlace, size_bytes: int, free_device_bytes: int, free_host_bytes: int
) -> Decision[MemoryPlace]:
    """Return where a text encoder of `size_bytes`, computing in `computes`, is loaded first. Free bytes are current."""
    if computes is MemoryPlace.HOST:
        return Decision(MemoryPlace.HOST, "it computes there")
    if size_bytes <= SMALL_ENCODER_BYTES:
        return Decision(MemoryPlace.HOST, "it is small, and moving it to the device is fast")
    if free_device_bytes > free_host_bytes / 2 and size_bytes * ENCODER_ROOM < free_device_bytes:
        return Decision(MemoryPlace.DEVICE, "the device has room for it, and the host has less than twice as much")
    return Decision(MemoryPlace.HOST, "the device has no room to spare for it")


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
