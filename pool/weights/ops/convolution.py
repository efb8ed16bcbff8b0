"""Avoids a fault of cuDNN in 3D convolutions.

Knows the affected versions. Does not cast: the weights are passed ready to use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

#: cuDNN versions (as torch numbers them) and torch minor versions with faulty 3D convolutions in half precision: from
#: the first to below the second. Source: comfyui-behaviour facts, section 1.
FAULTY_CUDNN = (91002, 91500)
FAULTY_TORCH = ((2, 9), (2, 11))
_HALVES = (torch.float16, torch.bfloat16)

#: signature of `torch.cudnn_convolution`
Convolve: TypeAlias = Callable[..., Tensor]


def has_conv3d_fault(torch_version: str, cudnn_version: int | None) -> bool:
    """Whether this combination of versions has the fault. Pure."""
    if cudnn_version is None:
        return False
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    first, end = FAULTY_TORCH
    return FAULTY_CUDNN[0] <= cudnn_version < FAULTY_CUDNN[1] and first <= (major, minor) < end


def installed_torch_has_conv3d_fault() -> bool:
    """`has_conv3d_fault` of the installed versions. Evaluated once per casting class: other versions have no
    overhead."""
    return has_conv3d_fault(torch.__version__, torch.backends.cudnn.version())


def conv3d(self: nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`nn.Conv3d._conv_forward` for versions with the fault: avoids it where it would occur."""
    if x.device.type == "cuda" and x.dtype in _HALVES:
        return conv3d_by_cudnn(self, x, weight, bias, torch.cudnn_convolution)
    out: Tensor = nn.Conv3d._conv_forward(self, x, weight, bias)
    return out


def conv3d_by_cudnn(self: nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None, convolve: Convolve) -> Tensor:
    """Compute `nn.Conv3d` by `convolve` (torch's direct binding of cuDNN), adding the bias afterwards."""
    padding: Any = self.padding
    if self.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        x = F.pad(x, self._reversed_padding_repeated_twice, mode=mode)
        padding = (0, 0, 0)
    out = convolve(
        x,
        weight,
        padding,
        self.stride,
        self.dilation,
        self.groups,
        benchmark=False,
        deterministic=False,
        allow_tf32=True,
    )
    return out if bias is None else out + bias.reshape(1, -1, 1, 1, 1)
