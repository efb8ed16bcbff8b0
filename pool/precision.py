"""Which dtype a component computes in. Pure decisions.

Device weights are kept in this dtype, so that a resident layer costs what plain torch costs.
"""

from __future__ import annotations

import torch

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
