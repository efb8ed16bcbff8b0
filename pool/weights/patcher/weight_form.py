"""Storage form of a component's weights on a device, and how patches are applied to each form. Pure decisions.

In every form the computed values are a function of (host weights, patch set). The forms differ in bytes, in speed and
in where rounding happens. Moves nothing (`pool.weights.patcher.model_patcher`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from modelpool.pool.devices.capabilities import FLOAT16_FROM, DeviceCapabilities
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.packed import PackedWeight, stored_bytes
from modelpool.pool.weights.patcher.compute_dtype import LARGE_TEXT_ENCODER, stored_in_half
from modelpool.pool.weights.quant.quantize import can_requantize

#: most operations of the product of patches at run time, as a share of the layer's: a merged patch costs nothing
MOST_PRODUCT_SHARE = 0.25


class ResidentForm(StrEnum):
    """The form of a resident weight."""

    COMPUTE = "compute"
    """In compute dtype, patches merged: the fastest forward; resident and streamed runs are equal bit for bit."""
    STORED = "stored"
    """As in the file; converted and patched at each use: fewest bytes, no rounding."""
    STORED_MERGED = "stored merged"
    """As in the file with patches merged and rounded to the storage format: fewest bytes, fast, least exact."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The dtype that a component computes in, the form of its resident weights, and how patches are applied.

    patches_at_run_time  patches of low rank on linear layers are products next to these in any form: a switch moves
                         their factors only
    channels_last        resident weights of two-dimensional convolutions have their channels last, which convolutions
                         then give to what they compute
    """

    compute_dtype: torch.dtype
    resident: ResidentForm = ResidentForm.COMPUTE
    patches_at_run_time: bool = False
    channels_last: bool = False

    def stays_stored(self, weight: Tensor) -> bool:
        """Whether a resident copy of `weight` keeps the bytes of the stored one.

        Packed weights always do, as they are packed to be small; so do weights that are not floating point.
        """
        return self.resident is not ResidentForm.COMPUTE or not weight.is_floating_point() or is_packed(weight)

    def merges(self, weight: Tensor) -> bool:
        """Whether patches are merged into the resident copy of `weight`; else they are computed at each use."""
        if not weight.is_floating_point():
            return False
        if self.resident is not ResidentForm.STORED_MERGED:
            return not self.stays_stored(weight)
        return not isinstance(weight, PackedWeight) or can_requantize(weight)

    def adds_products(self, weight: Tensor, rank: int) -> bool:
        """Whether a patch of a linear layer's `weight` that has this rank is computed as a product next to the layer.

        So for weights with which patches are not merged: adding them would convert all of a small weight to float32 at
        each use. With `patches_at_run_time` also for others, unless the product would cost much next to the layer's.
        """
        is_8_bit = weight.dtype.itemsize == 1 and weight.is_floating_point()
        if is_packed(weight) or (is_8_bit and self.stays_stored(weight)):
            return True
        if not self.patches_at_run_time or weight.ndim != 2 or not weight.is_floating_point():
            return False
        return rank * sum(weight.shape) <= MOST_PRODUCT_SHARE * weight.numel()

    def reorders(self, module: nn.Module, weight: Tensor) -> bool:
        """Whether a resident copy of `weight`, of `module`, has its channels last."""
        return (
            self.channels_last
            and weight.ndim == 4
            and isinstance(module, nn.Conv2d)
            and weight.is_floating_point()
            and not self.stays_stored(weight)
        )

    def resident_bytes(self, weight: Tensor) -> int:
        """Return the bytes of `weight` on the device."""
        return stored_bytes(weight) if self.stays_stored(weight) else self.computed_bytes(weight)

    def computed_bytes(self, weight: Tensor) -> int:
        """Return the bytes of `weight` in compute dtype."""
        return weight.numel() * (self.compute_dtype.itemsize if weight.is_floating_point() else weight.dtype.itemsize)

    def converts(self, weight: Tensor) -> bool:
        """Whether computing with `weight` needs another tensor than the stored one."""
        return is_packed(weight) or (weight.is_floating_point() and weight.dtype != self.compute_dtype)


class MemoryFormat(StrEnum):
    """The order of dimensions in the memory of convolution weights (`[pool] memory_format`)."""

    CONTIGUOUS = "contiguous"
    """As in the file."""
    CHANNELS_LAST = "channels_last"
    """Channels last for diffusion models and VAEs."""
    AUTO = "auto"
    """Channels last where tensor cores read them so: half precision on CUDA, from Volta on."""

    def puts_channels_last(self, role: Role, computed: torch.dtype, device: DeviceCapabilities) -> bool:
        """Whether a component that computes in `computed` on `device` has channels last."""
        if self is MemoryFormat.CONTIGUOUS or not (role.is_diffusion_model or role is Role.VAE):
            return False
        if self is MemoryFormat.CHANNELS_LAST:
            return True
        has_cores = device.kind is DeviceKind.CUDA and device.generation is not None
        return has_cores and (device.generation or (0, 0)) >= FLOAT16_FROM and computed.itemsize == 2


def resident_form(
    role: Role, storage: torch.dtype, computed: torch.dtype, parameters: int, device: DeviceCapabilities
) -> ResidentForm:
    """Return the form for a component of `parameters` parameters, stored mostly in `storage` and computed in
    `computed`.

    8-bit weights stay stored, as they are small so that more of them fit on a GPU. A half-precision diffusion model
    stays stored where the device computes in float32 but stores half precision well
    (`pool.weights.patcher.compute_dtype.stored_in_half`). On the CPU, memory is the host's anyway, and conversion at
    each use costs more than it saves.
    """
    if device.kind.computes_on_host or not storage.is_floating_point:
        return ResidentForm.COMPUTE
    is_widened = storage.itemsize == 2 and computed is torch.float32
    if role.is_text_encoder and is_widened and parameters > LARGE_TEXT_ENCODER:
        return ResidentForm.STORED
    is_widened = role.is_diffusion_model and is_widened
    if storage.itemsize == 1 or (is_widened and stored_in_half(parameters, device)):
        return ResidentForm.STORED
    return ResidentForm.COMPUTE


def is_packed(weight: Tensor) -> bool:
    """Whether `weight` is stored in packed form."""
    return isinstance(weight, PackedWeight)
