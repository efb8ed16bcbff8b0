"""Where the components of a model are loaded, rest and compute: on the device or on the host. Pure; torch-free.

These are what policy and sizes suggest for one model on its own, for people who place components by hand and for
`modelpool doctor`. A pool's workers plan for all models together instead (`pool.plan.residency`): there a component
goes to the device when a task needs it.
Source of the rules: comfyui-behaviour facts, section 3.
"""

from __future__ import annotations

from enum import StrEnum

from modelpool.pool.core.decision import Choice
from modelpool.pool.devices.vram_policy import VramPolicy

#: a text encoder up to this size is loaded on the host: it is on the device soon enough. Source: as above
SMALL_ENCODER_BYTES = 1 << 30
#: room that a text encoder needs on the device, as a multiple of its size, to be loaded there. Source: as above
ENCODER_ROOM = 1.2


class Place(StrEnum):
    """One of two memories."""

    DEVICE = "device"
    HOST = "host"


def text_encoder_place(policy: VramPolicy, float16: bool) -> Choice[Place]:
    """Where texts are encoded. `float16`: the device computes well in it."""
    if policy not in (VramPolicy.HIGH, VramPolicy.NORMAL):
        return Choice(Place.HOST, f"the policy is {policy.value}, which leaves the device to the diffusion model")
    if not float16:
        return Choice(Place.HOST, "a device without fast float16 gains little over the CPU")
    return Choice(Place.DEVICE, f"the policy is {policy.value}, and the device is fast")


def text_encoder_first_place(
    computes: Place, size_bytes: int, free_device_bytes: int, free_host_bytes: int
) -> Choice[Place]:
    """Where a text encoder of `size_bytes` is loaded first, which `computes` there. Free bytes are those of now."""
    if computes is Place.HOST:
        return Choice(Place.HOST, "it computes there")
    if size_bytes <= SMALL_ENCODER_BYTES:
        return Choice(Place.HOST, "it is small, and on the device soon enough")
    if free_device_bytes > free_host_bytes / 2 and size_bytes * ENCODER_ROOM < free_device_bytes:
        return Choice(Place.DEVICE, "the device has room for it, and the host has less than twice as much")
    return Choice(Place.HOST, "the device has no room to spare for it")


def diffusion_first_place(
    policy: VramPolicy, size_bytes: int, free_device_bytes: int, free_host_bytes: int
) -> Choice[Place]:
    """Where a diffusion model of `size_bytes` is loaded first. It computes on the device, or not at all there."""
    match policy:
        case VramPolicy.DISABLED:
            return Choice(Place.HOST, "the device is not used")
        case VramPolicy.HIGH | VramPolicy.SHARED:
            return Choice(Place.DEVICE, f"the policy is {policy.value}")
        case VramPolicy.NONE:
            return Choice(Place.HOST, "no weights rest on the device")
    if free_device_bytes > free_host_bytes and size_bytes < free_device_bytes:
        return Choice(Place.DEVICE, "the device has room for it, and more than the host")
    return Choice(Place.HOST, "the host has more room")


def diffusion_rest_place(policy: VramPolicy) -> Choice[Place]:
    """Where a diffusion model goes that is not needed now."""
    if policy is VramPolicy.HIGH:
        return Choice(Place.DEVICE, "the policy is high: what is loaded stays")
    return Choice(Place.HOST, "the device's memory is for what runs")


def vae_place(policy: VramPolicy) -> Choice[Place]:
    """Where images are decoded."""
    if policy is VramPolicy.DISABLED:
        return Choice(Place.HOST, "the device is not used")
    return Choice(Place.DEVICE, "decoding on the CPU takes many times as long")
