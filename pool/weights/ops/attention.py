"""Selects which of torch's attention kernels a run may use, and in which order.

Applies to every call of `scaled_dot_product_attention` inside a run: diffusers' dispatcher calls it by default
("native"), transformers with its "sdpa" implementation. Torch keeps these switches per process, not per thread; a
worker runs one task at a time, so that is enough.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from types import MappingProxyType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from modelpool.pool.devices.capabilities import DeviceCapabilities, Generation
from modelpool.pool.devices.device_kinds import DeviceKind
from modelpool.pool.devices.torch_api.torch_private import set_attention_order


class AttentionBackend(StrEnum):
    """A torch kernel for scaled dot product attention."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


#: fastest first, from compute capability `CUDNN_FIRST_FROM`. Source: comfyui-behaviour facts, section 0 ("SDPA priority
#: list")
DEFAULT_PRIORITY = (
    AttentionBackend.CUDNN,
    AttentionBackend.FLASH,
    AttentionBackend.EFFICIENT,
    AttentionBackend.MATH,
)

#: lowest CUDA compute capability with cuDNN first; before, it comes after the fused kernels of torch. An assumption:
#: not measured on a GPU yet
CUDNN_FIRST_FROM: Generation = (9, 0)
#: the order for cards before `CUDNN_FIRST_FROM`
OLDER_PRIORITY = (
    AttentionBackend.FLASH,
    AttentionBackend.EFFICIENT,
    AttentionBackend.CUDNN,
    AttentionBackend.MATH,
)

#: lowest CUDA compute capability of each
_FROM: Mapping[AttentionBackend, Generation] = MappingProxyType(
    {
        AttentionBackend.CUDNN: (8, 0),
        AttentionBackend.FLASH: (8, 0),
        AttentionBackend.EFFICIENT: (5, 0),
        AttentionBackend.MATH: (0, 0),
    }
)
_TORCH_NAMES: Mapping[AttentionBackend, SDPBackend] = MappingProxyType(
    {
        AttentionBackend.CUDNN: SDPBackend.CUDNN_ATTENTION,
        AttentionBackend.FLASH: SDPBackend.FLASH_ATTENTION,
        AttentionBackend.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
        AttentionBackend.MATH: SDPBackend.MATH,
    }
)


def attention_priority(
    capabilities: DeviceCapabilities, preferred: Sequence[AttentionBackend] | None = None
) -> tuple[AttentionBackend, ...]:
    """Return the kernels of `preferred` (None: the usual order of the generation) that the device has, in order, with
    "math" last: it accepts any input. Pure.

    Empty where there is no choice: on every device but CUDA.
    """
    generation = capabilities.generation
    if capabilities.kind is not DeviceKind.CUDA or generation is None:
        return ()
    if preferred is None:
        preferred = DEFAULT_PRIORITY if generation >= CUDNN_FIRST_FROM else OLDER_PRIORITY
    usable = [b for b in dict.fromkeys(preferred) if b is not AttentionBackend.MATH and generation >= _FROM[b]]
    return (*usable, AttentionBackend.MATH)


@functools.cache
def supports_kernel_priority() -> bool:
    """Whether this torch accepts an order of kernels, not only a set of allowed ones."""
    return "set_priority" in inspect.signature(sdpa_kernel).parameters


@contextmanager
def reordered(order: Sequence[AttentionBackend], usual: Sequence[AttentionBackend]) -> Iterator[None]:
    """Use the kernels in `order` inside the block, which is in the block of `use_attention_kernels` for `usual`.

    Cheaper than that function. Where torch does not accept an order, kernels of `usual` outside `order` are disabled.
    """
    if tuple(order) == tuple(usual):
        yield
    elif not supports_kernel_priority():
        with use_attention_kernels(order, sets_priority=False):
            yield
    else:
        # "math" accepts every input, so nothing after it is ever used
        left = [backend for backend in usual if backend not in order]
        set_attention_order([_TORCH_NAMES[backend] for backend in (*order, *left)])
        try:
            yield
        finally:
            set_attention_order([_TORCH_NAMES[backend] for backend in usual])


@contextmanager
def use_attention_kernels(priority: Sequence[AttentionBackend], sets_priority: bool | None = None) -> Iterator[None]:
    """Make attention inside the block use the first kernel of `priority` that accepts its inputs, and no other.

    An empty `priority` changes nothing. Where torch does not accept an order (`sets_priority`; detected when None),
    kernels outside `priority` are disabled and torch's order applies. Restores the previous state.
    """
    if not priority:
        yield
        return
    if sets_priority is None:
        sets_priority = supports_kernel_priority()
    if sets_priority:
        with sdpa_kernel([_TORCH_NAMES[backend] for backend in priority], set_priority=True):
            yield
        return
    before = {backend: is_on() for backend, (is_on, _) in _switches().items()}
    try:
        for backend, (_, switch) in _switches().items():
            switch(backend in priority)
        yield
    finally:
        for backend, (_, switch) in _switches().items():
            switch(before[backend])


def _switches() -> Mapping[AttentionBackend, tuple[Callable[[], bool], Callable[[bool], None]]]:
    """For each kernel, the functions that read and set whether torch may use it."""
    cuda = torch.backends.cuda
    return {
        AttentionBackend.CUDNN: (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        AttentionBackend.FLASH: (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        AttentionBackend.EFFICIENT: (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        AttentionBackend.MATH: (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    }
