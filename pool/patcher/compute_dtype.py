"""Which dtype a component computes in. Pure decisions, with their reasons.

Device weights are kept in this dtype (`pool.patcher.weight_form` says when not), so that a resident layer costs what
plain torch costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modelpool.pool.core.decision import Choice
from modelpool.pool.devices.capabilities import DeviceCapabilities, HalfStorage
from modelpool.pool.specs.spec import Role

_HALVES = (torch.float16, torch.bfloat16)
#: what a diffusion model is computed in, best first, where its own weights prefer nothing
_USUAL_ORDER = (torch.float16, torch.bfloat16, torch.float32)
#: parameters from which on a text encoder is computed in half precision: CLIP-G, the largest of the small ones, has 0.7
#: thousand million, T5-XXL 4.7
LARGE_TEXT_ENCODER = 1_000_000_000
#: what a VAE works in, best first: float16 overflows in it. Source: comfyui-behaviour facts, section 7
VAE_DTYPES = (torch.bfloat16, torch.float32)


def component_dtype(
    role: Role,
    storage: torch.dtype,
    device: DeviceCapabilities,
    parameters: int = 0,
    order: Sequence[torch.dtype] = _USUAL_ORDER,
) -> Choice[torch.dtype]:
    """The dtype that a component of so many `parameters`, stored mostly in `storage`, computes in on `device`, and why.
    `order` is that in which a diffusion model of its family computes well, best first."""
    if device.kind.computes_on_host:
        return Choice(torch.float32, "the CPU computes: half precision is slower there, and float32 is the reference")
    match role:
        case Role.TEXT_ENCODER | Role.TEXT_ENCODER_2 | Role.TEXT_ENCODER_3 | Role.TEXT_ENCODER_4:
            return _text_choice(parameters, device)
        case Role.VISION_ENCODER:
            return Choice(torch.float32, "an image is seen once a run, which costs little and stays exact")
        case Role.VAE:
            return _vae_choice(device)
        case _:
            return _diffusion_choice(storage, device, order)


def compute_dtype(
    role: Role,
    storage: torch.dtype,
    device: DeviceCapabilities,
    parameters: int = 0,
    order: Sequence[torch.dtype] = _USUAL_ORDER,
) -> torch.dtype:
    """`component_dtype` without the reason."""
    return component_dtype(role, storage, device, parameters, order).value


def preferred_dtypes(storage: torch.dtype, order: Sequence[torch.dtype] = _USUAL_ORDER) -> tuple[torch.dtype, ...]:
    """The dtypes that a diffusion model stored in `storage` computes well in, best first: its own half precision first,
    where its family has that in `order`.

    What was trained in bfloat16 may overflow in float16, so the file's own goes before the faster.
    """
    return tuple(dict.fromkeys((storage, *order))) if storage in _HALVES and storage in order else tuple(order)


def diffusion_storage_dtype(
    parameters: int, supported: Sequence[torch.dtype], stored: torch.dtype | None, capabilities: DeviceCapabilities
) -> torch.dtype:
    """The dtype that a diffusion model of so many `parameters` rests in on a device.

    `supported` are the dtypes that the architecture computes well in, best first; `stored` what the file holds, None
    when that says nothing. Source: comfyui-behaviour facts, section 3, `unet_dtype`; checked against a table of 540
    decisions.
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
    if torch.float16 in supported and rests_in_half(parameters, capabilities):
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


def rests_in_half(parameters: int, capabilities: DeviceCapabilities) -> bool:
    """Whether the weights of a diffusion model rest in half precision on a device that computes them in float32."""
    if capabilities.half_storage is HalfStorage.WHEN_SHORT:
        return parameters * 4 > capabilities.weight_bytes
    return capabilities.half_storage is HalfStorage.ALWAYS


def _text_choice(parameters: int, device: DeviceCapabilities) -> Choice[torch.dtype]:
    if parameters <= LARGE_TEXT_ENCODER:
        return Choice(torch.float32, "a text is encoded once a prompt, which costs little and stays exact")
    if device.computes(torch.bfloat16):
        return Choice(torch.bfloat16, "a text encoder of this size was published in it, and takes half the memory")
    return Choice(torch.float32, f"{device.name} has no bfloat16, and large text encoders overflow in float16")


def _diffusion_choice(
    storage: torch.dtype, device: DeviceCapabilities, order: Sequence[torch.dtype]
) -> Choice[torch.dtype]:
    order = preferred_dtypes(storage, order)
    resting = diffusion_storage_dtype(0, order, storage, device)  # how many parameters changes what rests, no more
    chosen = diffusion_cast_dtype(resting, order, device) or resting
    stored = _name(storage)
    if chosen == storage:
        return Choice(chosen, f"its weights are {stored}, which {device.name} computes in")
    if chosen is torch.float32:
        return Choice(chosen, f"{device.name} is slow or wrong in float16 and has no bfloat16")
    if storage in _HALVES:
        return Choice(chosen, f"its weights are {stored}, which {device.name} lacks")
    return Choice(chosen, f"its weights are {stored}, and half precision is faster on {device.name}")


def _vae_choice(device: DeviceCapabilities) -> Choice[torch.dtype]:
    chosen = vae_dtype(VAE_DTYPES, device)
    if chosen is torch.bfloat16:
        return Choice(chosen, f"{device.name} computes in it, and a VAE does not overflow in it as in float16")
    return Choice(chosen, f"a VAE overflows in float16, and {device.name} has no bfloat16")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
