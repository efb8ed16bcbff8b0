"""Chooses the dtype that a component computes in, and gives the reason. Pure decisions.

Device weights are kept in this dtype (except as `pool.weights.patcher.weight_form` decides), so that a resident layer
costs what plain torch costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modelpool.pool.devices.capabilities import DeviceCapabilities, HalfStorage
from modelpool.pool.values.core.decision import Decision
from modelpool.pool.values.specs.spec import Role

_HALVES = (torch.float16, torch.bfloat16)
#: compute dtypes of a diffusion model, best first, unless its weights prefer one
_DEFAULT_ORDER = (torch.float16, torch.bfloat16, torch.float32)
#: parameters above which a text encoder is computed in half precision: CLIP-G, the largest of the small ones, has 0.7
#: billion, T5-XXL 4.7 billion
LARGE_TEXT_ENCODER = 1_000_000_000
#: compute dtypes of a VAE, best first: float16 overflows in it. Source: comfyui-behaviour facts, section 7
VAE_DTYPES = (torch.bfloat16, torch.float32)


def component_dtype(
    role: Role,
    storage: torch.dtype,
    device: DeviceCapabilities,
    parameters: int = 0,
    order: Sequence[torch.dtype] = _DEFAULT_ORDER,
) -> Decision[torch.dtype]:
    """Return the dtype that a component of `parameters` parameters, stored mostly in `storage`, computes in on
    `device`, and why. `order` lists the dtypes that a diffusion model of its family computes well in, best first."""
    if device.kind.computes_on_host:
        return Decision(torch.float32, "the CPU computes: half precision is slower there, and float32 is the reference")
    match role:
        case Role.TEXT_ENCODER | Role.TEXT_ENCODER_2 | Role.TEXT_ENCODER_3 | Role.TEXT_ENCODER_4:
            return _text_choice(parameters, device)
        case Role.VISION_ENCODER:
            return Decision(torch.float32, "an image is encoded once per run, which costs little and stays exact")
        case Role.VAE:
            return _vae_choice(device)
        case _:
            return _diffusion_choice(storage, device, order)


def compute_dtype(
    role: Role,
    storage: torch.dtype,
    device: DeviceCapabilities,
    parameters: int = 0,
    order: Sequence[torch.dtype] = _DEFAULT_ORDER,
) -> torch.dtype:
    """`component_dtype` without the reason."""
    return component_dtype(role, storage, device, parameters, order).value


def preferred_dtypes(storage: torch.dtype, order: Sequence[torch.dtype] = _DEFAULT_ORDER) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a diffusion model stored in `storage` computes well in, best first: its half precision
    first, if `order` of its family has it.

    A model trained in bfloat16 may overflow in float16, so the dtype of the file precedes a faster one.
    """
    return tuple(dict.fromkeys((storage, *order))) if storage in _HALVES and storage in order else tuple(order)


def diffusion_storage_dtype(
    parameters: int, supported: Sequence[torch.dtype], stored: torch.dtype | None, capabilities: DeviceCapabilities
) -> torch.dtype:
    """Return the dtype that a diffusion model of `parameters` parameters is stored in on a device.

    `supported` are the dtypes that the architecture computes well in, best first; `stored` the file's dtype, None if
    unknown. Source: comfyui-behaviour facts, section 3, `unet_dtype`; checked against a table of 540 decisions.
    """
    if capabilities.kind.computes_on_host:
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
    if torch.float16 in supported and stored_in_half(parameters, capabilities):
        return torch.float16
    return torch.float32


def diffusion_cast_dtype(
    stored_dtype: torch.dtype, supported: Sequence[torch.dtype], capabilities: DeviceCapabilities
) -> torch.dtype | None:
    """Return the dtype that weights stored in `stored_dtype` are cast to for each use; None if they are used as they
    are.

    Source: comfyui-behaviour facts, section 3, `unet_manual_cast`; checked against the same table.
    """
    if stored_dtype in (torch.float32, torch.float64) or (
        stored_dtype in _HALVES and capabilities.computes(stored_dtype)
    ):
        return None
    for dtype in supported:
        if dtype in _HALVES and capabilities.computes(dtype):
            return dtype
    return torch.float32


def vae_dtype(allowed: Sequence[torch.dtype], capabilities: DeviceCapabilities) -> torch.dtype:
    """Return the first of the `allowed` dtypes that the device computes well in, else float32."""
    return next((dtype for dtype in allowed if capabilities.computes(dtype)), torch.float32)


def stored_in_half(parameters: int, capabilities: DeviceCapabilities) -> bool:
    """Whether the weights of a diffusion model are stored in half precision on a device that computes them in
    float32."""
    if capabilities.half_storage is HalfStorage.WHEN_SHORT:
        return parameters * 4 > capabilities.weight_bytes
    return capabilities.half_storage is HalfStorage.ALWAYS


def _text_choice(parameters: int, device: DeviceCapabilities) -> Decision[torch.dtype]:
    if parameters <= LARGE_TEXT_ENCODER:
        return Decision(torch.float32, "a text is encoded once per prompt, which costs little and stays exact")
    if device.computes(torch.bfloat16):
        return Decision(torch.bfloat16, "text encoders of this size were published in it, and it takes half the memory")
    return Decision(torch.float32, f"{device.name} has no bfloat16, and large text encoders overflow in float16")


def _diffusion_choice(
    storage: torch.dtype, device: DeviceCapabilities, order: Sequence[torch.dtype]
) -> Decision[torch.dtype]:
    order = preferred_dtypes(storage, order)
    stored_dtype = diffusion_storage_dtype(
        0, order, storage, device
    )  # the number of parameters changes only the storage dtype
    chosen = diffusion_cast_dtype(stored_dtype, order, device) or stored_dtype
    stored = _name(storage)
    if chosen == storage:
        return Decision(chosen, f"its weights are {stored}, which {device.name} computes in")
    if chosen is torch.float32:
        return Decision(chosen, f"{device.name} is slow or inexact in float16 and has no bfloat16")
    if storage in _HALVES:
        return Decision(chosen, f"its weights are {stored}, which {device.name} lacks")
    return Decision(chosen, f"its weights are {stored}, and half precision is faster on {device.name}")


def _vae_choice(device: DeviceCapabilities) -> Decision[torch.dtype]:
    chosen = vae_dtype(VAE_DTYPES, device)
    if chosen is torch.bfloat16:
        return Decision(chosen, f"{device.name} supports it, and a VAE does not overflow in it as in float16")
    return Decision(chosen, f"a VAE overflows in float16, and {device.name} has no bfloat16")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
