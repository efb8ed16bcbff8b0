"""Which dtype a component computes in. Pure decisions.

Device weights are kept in this dtype, so that a resident layer costs what plain torch costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pool.devices.capabilities import DeviceCapabilities, HalfStorage
from pool.devices.kinds import DeviceKind
from pool.spec import Role

_HALVES = (torch.float16, torch.bfloat16)


def compute_dtype(role: Role, storage: torch.dtype, device_kind: str, has_bfloat16: bool = True) -> torch.dtype:
    """The dtype that a component stored in `storage` computes in on a device of this kind.

    CPU and simulated devices compute in float32: their half precision is slower and their results are the reference.
    On a GPU the diffusion model keeps its half precision; the text encoder runs once a prompt and stays exact; the VAE
    overflows in float16, so it takes bfloat16 where there is one. Source: comfyui-behaviour facts, sections 3 and 7.
    """
    if device_kind != "cuda" or role is Role.TEXT_ENCODER:
        return torch.float32
    if role is Role.VAE:
        return torch.bfloat16 if has_bfloat16 else torch.float32
    if storage in _HALVES:
        return storage if storage is torch.float16 or has_bfloat16 else torch.float16
    return torch.float32 if storage is torch.float32 else torch.float16


def diffusion_storage_dtype(
    parameters: int, supported: Sequence[torch.dtype], stored: torch.dtype | None, capabilities: DeviceCapabilities
) -> torch.dtype:
    """The dtype that a diffusion model of so many `parameters` rests in on a device.

    `supported` are the dtypes that the architecture computes well in, best first; `stored` what the file holds, None
    when that says nothing. Source: comfyui-behaviour facts, section 3, `unet_dtype`; checked against a table of 540
    decisions.
    """
    if capabilities.kind is not DeviceKind.CUDA:
        return torch.float32
    if stored is not None and stored.itemsize == 1 and stored.is_floating_point:
        short = parameters * 2 > capabilities.weight_bytes
        if capabilities.fp8_matmul or short:
            return stored
    if stored is torch.float16 and torch.float16 in supported and capabilities.float16:
        return torch.float16
    for dtype in supported:
        if dtype in _HALVES and capabilities.computes(dtype):
            return dtype
    if torch.float16 in supported and _rests_in_float16(parameters, capabilities):
        return torch.float16
    return torch.float32


def diffusion_cast_dtype(
    resting: torch.dtype, supported: Sequence[torch.dtype], capabilities: DeviceCapabilities
) -> torch.dtype | None:
    """The dtype that weights resting in `resting` are cast to for each use; None when they are used as they are.

    Source: comfyui-behaviour facts, section 3, `unet_manual_cast`; checked against the same table.
    """
    if resting in (torch.float32, torch.float64) or (resting in _HALVES and capabilities.computes(resting)):
        return None
    for dtype in supported:
        if dtype in _HALVES and capabilities.computes(dtype):
            return dtype
    return torch.float32


def vae_dtype(allowed: Sequence[torch.dtype], capabilities: DeviceCapabilities) -> torch.dtype:
    """The first of the dtypes that a VAE works in that the device computes well in, else float32."""
    return next((dtype for dtype in allowed if capabilities.computes(dtype)), torch.float32)


def _rests_in_float16(parameters: int, capabilities: DeviceCapabilities) -> bool:
    """Weights rest in float16 on a device that computes in float32."""
    if capabilities.half_storage is HalfStorage.WHEN_SHORT:
        return parameters * 4 > capabilities.weight_bytes
    return capabilities.half_storage is HalfStorage.ALWAYS
