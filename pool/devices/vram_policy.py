"""How eagerly weights are kept on a device: policies that a person chooses, or a device suggests. Torch-free.

Source of the six states: comfyui-behaviour facts, section 3; here each is a handful of rules for plans, not a mode that
code asks about.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    """The device computes in host memory: weights stay where they are."""


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


_RULES = {
    VramPolicy.DISABLED: ResidencyRules(),
    VramPolicy.NONE: ResidencyRules(weights_share=0.0),
    VramPolicy.LOW: ResidencyRules(keeps_idle=False),
    VramPolicy.NORMAL: ResidencyRules(),
    VramPolicy.HIGH: ResidencyRules(may_stream=False),
    VramPolicy.SHARED: ResidencyRules(),
}


def rules_for(policy: VramPolicy) -> ResidencyRules:
    """The rules of `policy`."""
    return _RULES[policy]
