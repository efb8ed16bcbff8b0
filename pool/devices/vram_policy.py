"""VRAM policies: how eagerly weights are kept on a device, and the memory reserved for other programs. Torch-free.

Source of the six policies: comfyui-behaviour facts, section 3; here each is a small set of rules for plans, not a mode
that code queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.values.core.decision import Decision

_MIB = 1 << 20
#: GPU memory reserved for other programs. Source: comfyui-behaviour facts, section 3, EXTRA_RESERVED_VRAM
RESERVE_BYTES = 400 * _MIB
WINDOWS_RESERVE_BYTES = 600 * _MIB
#: additional reserve on Windows for cards larger than `LARGE_CARD_BYTES`
WINDOWS_LARGE_RESERVE_BYTES = 100 * _MIB
LARGE_CARD_BYTES = 15 * 1024 * _MIB
#: minimum memory of a worker: no real model runs in less
LEAST_ROOM_BYTES = _MIB // 16


class VramPolicy(StrEnum):
    """The use of device memory for weights."""

    DISABLED = "disabled"
    """The device is not used: everything computes on the CPU."""
    NONE = "none"
    """No weights are kept on the device: all of them stream."""
    LOW = "low"
    """Only weights of the running component; nothing is kept."""
    NORMAL = "normal"
    """Weights stay until the room is needed."""
    HIGH = "high"
    """As normal, but runs that would stream weights are refused."""
    SHARED = "shared"
    """Device memory is host memory: plans as normal; weights are loaded directly to the device."""


@dataclass(frozen=True, slots=True)
class ResidencyRules:
    """Rules of a policy for plans.

    weights_share  maximum fraction for weights of the memory left by activations and scratch
    keeps_idle     weights stay after the run that needed them
    may_stream     a run may use weights that are not resident
    """

    weights_share: float = 1.0
    keeps_idle: bool = True
    may_stream: bool = True


_RULES: Mapping[VramPolicy, ResidencyRules] = MappingProxyType(
    {
        VramPolicy.DISABLED: ResidencyRules(),
        VramPolicy.NONE: ResidencyRules(weights_share=0.0),
        VramPolicy.LOW: ResidencyRules(keeps_idle=False),
        VramPolicy.NORMAL: ResidencyRules(),
        VramPolicy.HIGH: ResidencyRules(may_stream=False),
        VramPolicy.SHARED: ResidencyRules(),
    }
)


def rules_for(policy: VramPolicy) -> ResidencyRules:
    """Return the rules of `policy`."""
    return _RULES[policy]


def choose_policy(flag: VramPolicy | None, kind: DeviceKind, shares_host_memory: bool = False) -> Decision[VramPolicy]:
    """Return the policy for a device of this kind: the user's, or the default of the device (None). Pure."""
    if kind is DeviceKind.CPU:
        asked = f", although {flag.value} is configured" if flag not in (None, VramPolicy.DISABLED) else ""
        return Decision(VramPolicy.DISABLED, f"the CPU computes, and there is no device memory{asked}")
    if flag is not None:
        return Decision(flag, "it is configured")
    if shares_host_memory or kind.facts.shares_host_memory:
        return Decision(VramPolicy.SHARED, f"the memory of this {kind.facts.title} is the host's")
    return Decision(VramPolicy.NORMAL, "no other policy is configured, and the device has its own memory")


def default_reserve_bytes(kind: DeviceKind, device_bytes: int, on_windows: bool = False) -> int:
    """Return the default memory for other programs on a device with `device_bytes` of memory. Pure."""
    if kind.computes_on_host:
        return 0
    if not on_windows:
        return RESERVE_BYTES
    return WINDOWS_RESERVE_BYTES + (WINDOWS_LARGE_RESERVE_BYTES if device_bytes > LARGE_CARD_BYTES else 0)


def reserve_for(asked_bytes: int | None, kind: DeviceKind, device_bytes: int, on_windows: bool = False) -> int:
    """Return the memory for other programs: as configured, else the default (None). Zero for sim and cpu: their memory
    is their budget, which no other program uses. Pure."""
    if asked_bytes is None or kind.computes_on_host:
        return default_reserve_bytes(kind, device_bytes, on_windows)
    return asked_bytes


def capacity_bytes(budget_bytes: int | None, free_bytes: int, reserve_bytes: int) -> int:
    """Return the memory for a worker on a device with `free_bytes`, of which `reserve_bytes` are for other programs.
    Pure.

    The reserve is taken from free memory, not from the budget: a worker with a budget of 64 MiB on a large card may use
    all of it.
    """
    room_bytes = max(0, free_bytes - reserve_bytes)
    return room_bytes if budget_bytes is None else min(budget_bytes, room_bytes)
