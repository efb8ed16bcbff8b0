"""How eagerly weights are kept on a device: policies that a person chooses, or a device suggests. Torch-free.

Source of the six states: comfyui-behaviour facts, section 3; here each is a handful of rules for plans, not a mode that
code asks about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from modelpool.pool.core.decision import Choice
from modelpool.pool.devices.kind_names import DeviceKind

_MIB = 1 << 20
#: what other programs may need of a GPU's memory. Source: comfyui-behaviour facts, section 3, EXTRA_RESERVED_VRAM
RESERVE_BYTES = 400 * _MIB
WINDOWS_RESERVE_BYTES = 600 * _MIB
#: and so much more on Windows where the card has more than that
WINDOWS_LARGE_RESERVE_BYTES = 100 * _MIB
LARGE_CARD_BYTES = 15 * 1024 * _MIB
#: with less than this no worker starts: nothing that anybody would call a model runs in it
LEAST_ROOM_BYTES = _MIB // 16


class VramPolicy(StrEnum):
    """How a device's memory is used for weights."""

    DISABLED = "disabled"
    """The device is not used: everything computes on the CPU."""
    NONE = "none"
    """No weights rest on the device: all of them stream."""
    LOW = "low"
    """Weights of the component that runs; nothing stays for later."""
    NORMAL = "normal"
    """Whatever fits stays until something else needs the room."""
    HIGH = "high"
    """Like normal, and a run whose weights would have to stream is refused."""
    SHARED = "shared"
    """The device's memory is the host's: plans are as under normal; what models load goes straight to the device."""


@dataclass(frozen=True, slots=True)
class ResidencyRules:
    """What a policy means for plans.

    weights_share  of the room beside activations and scratch, the part that weights may take
    keeps_idle     weights stay after the run that needed them
    may_stream     a run may go on with weights that are not resident
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
    """The rules of `policy`."""
    return _RULES[policy]


def choose_policy(flag: VramPolicy | None, kind: DeviceKind, shares_host_memory: bool = False) -> Choice[VramPolicy]:
    """The policy for a device of this kind: what a person asked for, or what the device suggests (None). Pure."""
    if kind is DeviceKind.CPU:
        asked = f", although {flag.value} was asked for" if flag not in (None, VramPolicy.DISABLED) else ""
        return Choice(VramPolicy.DISABLED, f"the CPU computes, and there is no device memory{asked}")
    if flag is not None:
        return Choice(flag, "it was asked for")
    if shares_host_memory or kind.facts.shares_host_memory:
        return Choice(VramPolicy.SHARED, f"the memory of this {kind.facts.title} is the host's")
    return Choice(VramPolicy.NORMAL, "nothing else was asked for, and the device has memory of its own")


def default_reserve_bytes(kind: DeviceKind, device_bytes: int, on_windows: bool = False) -> int:
    """What is left to other programs on a device with `device_bytes` of memory when nobody says how much. Pure."""
    if kind.computes_on_host:
        return 0
    if not on_windows:
        return RESERVE_BYTES
    return WINDOWS_RESERVE_BYTES + (WINDOWS_LARGE_RESERVE_BYTES if device_bytes > LARGE_CARD_BYTES else 0)


def reserve_for(asked_bytes: int | None, kind: DeviceKind, device_bytes: int, on_windows: bool = False) -> int:
    """What is left to other programs: what was asked for, else the usual (None). Of sim and cpu nothing is: what they
    have is their budget, which no other program uses. Pure."""
    if asked_bytes is None or kind.computes_on_host:
        return default_reserve_bytes(kind, device_bytes, on_windows)
    return asked_bytes


def capacity_bytes(budget_bytes: int | None, free_bytes: int, reserve_bytes: int) -> int:
    """What a worker may use of a device that has `free_bytes`, of which `reserve_bytes` are for other programs. Pure.

    The reserve comes out of what is free, not out of the budget that a person gave: a worker that was given 64 MiB of a
    large card may have them all.
    """
    room_bytes = max(0, free_bytes - reserve_bytes)
    return room_bytes if budget_bytes is None else min(budget_bytes, room_bytes)
