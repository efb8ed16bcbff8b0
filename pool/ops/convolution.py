"""Convolutions: by number of dimensions, and around a fault of cuDNN with three of them.

Knows the versions in which the fault is. Does not know casting: the weights come ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

#: by number of dimensions
_CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

#: cuDNN versions, as torch counts them, and torch minor versions whose 3D convolutions in half precision go wrong: from
#: the first to below the second. Source: comfyui-behaviour facts, section 1.
FAULTY_CUDNN = (91002, 91500)
FAULTY_TORCH = ((2, 9), (2, 11))
_HALVES = (torch.float16, torch.bfloat16)

#: called as `torch.cudnn_convolution` is
Convolve: TypeAlias = Callable[..., Tensor]


def conv_nd(dims: int, *args: Any, **kwargs: Any) -> nn.Module:
    """A convolution of `dims` dimensions, 1 to 3; the other arguments are those of `torch.nn.Conv2d`.

    Raises ValueError for any other number.
    """
    convolution = _CONVOLUTIONS.get(dims)
    if convolution is None:
        raise ValueError(f"dims: found {dims!r}, expected one of {sorted(_CONVOLUTIONS)}")
    return convolution(*args, **kwargs)


def needs_conv3d_workaround(
    torch_version: str, cudnn_version: int | None, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether torch would take, for a 3D convolution, a way through cuDNN that needs far too much memory. Pure.

    `cudnn_version` as `torch.backends.cudnn.version()` gives it; None where there is none.
    """
    faulty = has_conv3d_fault(torch_version, cudnn_version)
    return faulty and device.type == "cuda" and dtype in _HALVES


def has_conv3d_fault(torch_version: str, cudnn_version: int | None) -> bool:
    """Whether these versions together have the fault. Pure."""
    if cudnn_version is None:
        return False
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    first, end = FAULTY_TORCH
    return FAULTY_CUDNN[0] <= cudnn_version < FAULTY_CUDNN[1] and first <= (major, minor) < end


def this_torch_has_conv3d_fault() -> bool:
    """`has_conv3d_fault` of what is installed. Casting classes ask once, so that audio versions pay nothing."""
    return has_conv3d_fault(torch.__version__, torch.backends.cudnn.version())


def conv3d(self: nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`nn.Conv3d._conv_forward` for versions with the fault: around it where it would strike."""
    if x.device.type == "cuda" and x.dtype in _HALVES:
        return conv3d_by_cudnn(self, x, weight, bias, torch.cudnn_convolution)
    out: Tensor = nn.Conv3d._conv_forward(self, x, weight, bias)
    return out


def conv3d_by_cudnn(self: nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None, convolve: Convolve) -> Tensor:
    """What `nn.Conv3d` computes, by calling `convolve` (torch's direct door to cuDNN) and adding the bias after."""
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
