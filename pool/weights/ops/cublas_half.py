"""Linear layers that accumulate in float16, by the package `cublas_ops`. The only module that imports it.

The package is optional; `pool.weights.ops.layer_choice` never chooses this kernel where it is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from modelpool.pool.weights.ops.context import LinearKernel

#: product of (M, K) with transposed (N, K); both float16 on one CUDA device
PRODUCT_NAME = "cublas_half_matmul_simple"


def cublas_half_linear() -> LinearKernel | None:
    """Return a linear kernel that uses the package; None if it is missing or lacks the function."""
    try:
        package = importlib.import_module("cublas_ops")
    except ImportError:
        return None
    product = getattr(package, PRODUCT_NAME, None)
    return None if product is None else half_linear_with(product)


def half_linear_with(product: Callable[[Tensor, Tensor], Tensor]) -> LinearKernel:
    """Return a linear kernel that uses `product`, for inputs of any number of dimensions."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        half = x.dtype is torch.float16 and weight.dtype is torch.float16
        if not half or weight.device != x.device or (bias is not None and bias.device != x.device):
            return None
        out = product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias.to(out.dtype)

    return linear
