"""Measures the peak bytes of a forward pass without weights, by a dry run on the meta device.

The module's own code runs with zero-byte tensors while every storage that it would allocate is counted, so the result
holds for any architecture, size, number of frames, batch and dtype without a formula per family. Memory of the device's
libraries is not included; `with_margin` adds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelpool.pool.weights.tracing.dry_run import AttentionForm, dry_run
from modelpool.pool.weights.tracing.meta_cache import MetaCache, tensors_in

MIB = 1 << 20

#: device kinds without allocations outside of torch's operations
WITHOUT_MARGIN = frozenset({"sim", "cpu"})
#: libraries on a GPU (convolution workspaces, fragmentation): a fraction and a constant.
#: Source: ComfyUI keeps 0.8 GiB for inference at large; field.md. Measured peaks correct it
#: (`pool.catalog.estimates.activation_calibration`).
GPU_MARGIN_FRACTION = 0.25
GPU_MARGIN_BYTES = 128 * MIB


#: kinds of device that never hold the matrix of scores of scaled dot product attention. Source: torch's own kernels;
#: the simulated device computes with the CPU's. Every other kind counts as one that holds it: MPS does
#: (`_scaled_dot_product_attention_math_for_mps`); ROCm's kernels are built for some cards only, XPU's depend on the
#: release, and kernels of other packages are not torch's
WITH_FUSED_ATTENTION = frozenset({"cuda", "sim", "cpu"})


def with_margin(counted_bytes: int, device_kind: str) -> int:
    """Return the bytes to reserve for `counted_bytes` of activations on a device of this kind."""
    if device_kind in WITHOUT_MARGIN:
        return counted_bytes
    return int(counted_bytes * (1 + GPU_MARGIN_FRACTION)) + GPU_MARGIN_BYTES


def attention_form(device_kind: str) -> AttentionForm:
    """Return how torch's attention allocates on devices of this kind."""
    return AttentionForm.FUSED if device_kind in WITH_FUSED_ATTENTION else AttentionForm.MATH


def peak_bytes(
    module: nn.Module,
    compute_dtype: torch.dtype,
    call: Callable[[nn.Module], object],
    attention: AttentionForm = AttentionForm.FUSED,
    cache: MetaCache | None = None,
) -> int:
    """Return the maximum of live bytes while `call(module)` runs, without weights.

    `call` must create its inputs on the meta device itself, so that they are counted. The weights of the module are not
    read. `cache` as for `dry_run`. The module is unchanged afterwards; no other thread may use it meanwhile.
    """
    counter = PeakCounter()
    dry_run(module, compute_dtype, call, (counter,), attention, cache=cache)
    return counter.peak_bytes


class PeakCounter(TorchDispatchMode):
    """Counts the bytes of storages on the meta device that are allocated inside the block and still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled here; torch's guard against that costs time in every operation
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and count what it allocated."""
        known = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            if tensor.is_meta and tensor.untyped_storage()._cdata not in known:
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


@dataclass(frozen=True, slots=True)
class StageModule:
    """A built module of a stage, with the arguments of `peak_bytes`."""

    module: nn.Module
    compute_dtype: torch.dtype
    attention: AttentionForm = AttentionForm.FUSED
    cache: MetaCache | None = None

    def peak_bytes(self, call: Callable[[nn.Module], object]) -> int:
        """See `pool.weights.tracing.activation_bytes.peak_bytes`."""
        return peak_bytes(self.module, self.compute_dtype, call, self.attention, self.cache)
