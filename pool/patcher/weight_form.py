"""How a component's weights are kept on a device, and how patches reach them. Pure decisions.

Whatever the form, what is computed is a function of (host weights, patch set). The forms differ in bytes, in speed and
in where rounding happens. Does not move anything (`pool.patcher.model_patcher`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.ops.packed import PackedWeight, stored_bytes
from modelpool.pool.patcher.compute_dtype import LARGE_TEXT_ENCODER, rests_in_half
from modelpool.pool.quant.quantize import can_requantize
from modelpool.pool.specs.spec import Role


class ResidentForm(StrEnum):
    """What a resident weight is."""

    COMPUTE = "compute"
    """In compute dtype, patches merged: the fastest forward, resident and streamed runs equal bit for bit."""
    STORED = "stored"
    """As in the file, converted at each use, patches computed at each use: the fewest bytes and no rounding."""
    STORED_MERGED = "stored merged"
    """As in the file with patches merged, rounded back into the storage format: fewest bytes, fast, least exact."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The dtype that a component computes in, and the form of what is resident."""

    compute_dtype: torch.dtype
    resident: ResidentForm = ResidentForm.COMPUTE

    def stays_stored(self, weight: Tensor) -> bool:
        """A resident copy of `weight` has the bytes of the stored one.

        Packed weights always do: they are packed to be small. So does what is not floating point.
        """
        return self.resident is not ResidentForm.COMPUTE or not weight.is_floating_point() or is_packed(weight)

    def merges(self, weight: Tensor) -> bool:
        """Patches are merged into the resident copy of `weight`; else they are computed at each use."""
        if not weight.is_floating_point():
            return False
        if self.resident is not ResidentForm.STORED_MERGED:
            return not self.stays_stored(weight)
        return not isinstance(weight, PackedWeight) or can_requantize(weight)

    def resident_bytes(self, weight: Tensor) -> int:
        """Bytes of `weight` on the device."""
        return stored_bytes(weight) if self.stays_stored(weight) else self.computed_bytes(weight)

    def computed_bytes(self, weight: Tensor) -> int:
        """Bytes of `weight` as it is computed with."""
        return weight.numel() * (self.compute_dtype.itemsize if weight.is_floating_point() else weight.dtype.itemsize)

    def converts(self, weight: Tensor) -> bool:
        """Computing with `weight` needs another tensor than the stored one."""
        return is_packed(weight) or (weight.is_floating_point() and weight.dtype != self.compute_dtype)


def resident_form(
    role: Role, storage: torch.dtype, computed: torch.dtype, parameters: int, device: DeviceCapabilities
) -> ResidentForm:
    """The form for a component of so many `parameters`, stored mostly in `storage` and computed in `computed`.

    Weights of 8 bits are that small so that more of them fit on a GPU: there they stay so. A diffusion model in half
    precision stays so where a card computes it in float32 but keeps it well
    (`pool.patcher.compute_dtype.rests_in_half`). Where the
    CPU computes, memory is the host's anyway, and conversion at each use costs more than it saves.
    """
    if device.kind.computes_on_host or not storage.is_floating_point:
        return ResidentForm.COMPUTE
    is_widened = storage.itemsize == 2 and computed is torch.float32
    if role.is_text_encoder and is_widened and parameters > LARGE_TEXT_ENCODER:
        return ResidentForm.STORED
    is_widened = role.is_diffusion_model and is_widened
    if storage.itemsize == 1 or (is_widened and rests_in_half(parameters, device)):
        return ResidentForm.STORED
    return ResidentForm.COMPUTE


def is_packed(weight: Tensor) -> bool:
    """Whether `weight` is stored in packed form."""
    return isinstance(weight, PackedWeight)
