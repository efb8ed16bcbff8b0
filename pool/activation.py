"""How many bytes a forward pass needs beside its weights: measured by a dry run on the meta device.

The module's own code runs with zero-byte tensors while every storage that it would allocate is counted, so the figure
holds for any architecture, size and batch without a formula a family. Attention is counted as the fused kernels compute
it, which never hold the matrix of scores. What the device's libraries take for themselves is not seen; `with_margin`
adds for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 1 << 20

#: libraries on a CUDA device (convolution workspaces, fragmentation): a fraction and a constant.
#: Source: ComfyUI keeps 0.8 GiB for inference at large; field.md. To be replaced by measured peaks.
CUDA_MARGIN_FRACTION = 0.25
CUDA_MARGIN_BYTES = 128 * MIB


def with_margin(counted_bytes: int, device_kind: str) -> int:
    """What to set aside for `counted_bytes` of activations on a device of this kind."""
    if device_kind == "cuda":
        return int(counted_bytes * (1 + CUDA_MARGIN_FRACTION)) + CUDA_MARGIN_BYTES
    return counted_bytes


def peak_bytes(module: nn.Module, compute_dtype: torch.dtype, call: Callable[[nn.Module], object]) -> int:
    """The most bytes that are live at once while `call(module)` runs, weights left out.

    `call` must make its inputs on the meta device itself, so that they are counted. The module's weights are not read
    and stay as they are; its classes must be the plain ones (not yet swapped to casting).
    """
    weights = _on_meta(module, compute_dtype)
    counter = PeakCounter()
    with torch.no_grad(), counter, _FusedAttention():
        torch.func.functional_call(_Call(module, call), {f"module.{n}": t for n, t in weights.items()}, ())
    return counter.peak_bytes


class PeakCounter(TorchDispatchMode):
    """Counts the bytes of storages that are allocated inside the block and still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and count what it allocated."""
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(storage)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, size).atexit = False

    def _forget(self, size: int) -> None:
        self.live_bytes -= size


class _FusedAttention(TorchFunctionMode):
    """Scaled dot product attention as one operation whose only allocation is its result."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace attention, leave the rest alone."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, value = args[0], args[2]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **(kwargs or {}))


class _Call(nn.Module):
    """Lets `functional_call` run any function of a module."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.module = module
        self._call_it = call

    def forward(self) -> object:
        return self._call_it(self.module)


def _on_meta(module: nn.Module, compute_dtype: torch.dtype) -> dict[str, Tensor]:
    """Zero-byte stand-ins for all parameters and buffers, floating point ones in compute dtype."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: torch.empty(t.shape, dtype=compute_dtype if t.is_floating_point() else t.dtype, device="meta")
        for name, t in tensors.items()
    }
