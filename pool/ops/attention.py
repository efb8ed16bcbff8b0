"""Which of torch's attention kernels a run may use, and in which order.

Governs every call of `scaled_dot_product_attention` inside a run, whoever makes it: diffusers' dispatcher calls it by
default ("native"), transformers does where its "sdpa" is on. Torch keeps these switches for the whole process, not for
a thread; a worker runs one task at a time, so that is enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from types import MappingProxyType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from modelpool.pool.devices.capabilities import DeviceCapabilities, Generation
from modelpool.pool.devices.kinds import DeviceKind


class AttentionBackend(StrEnum):
    """A kernel of torch's for scaled dot product attention."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


#: fastest first. Source: comfyui-behaviour facts, section 0 ("SDPA priority list")
DEFAULT_PRIORITY = (
    AttentionBackend.CUDNN,
    AttentionBackend.FLASH,
    AttentionBackend.EFFICIENT,
    AttentionBackend.MATH,
)

#: first generation of CUDA cards that each runs on
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
    capabilities: DeviceCapabilities, wanted: Sequence[AttentionBackend] = DEFAULT_PRIORITY
) -> tuple[AttentionBackend, ...]:
    """Those of `wanted` that the device has, in that order, with "math" last: it takes any input. Pure.

    Empty where there is nothing to choose: everywhere but on CUDA.
    """
    generation = capabilities.generation
    if capabilities.kind is not DeviceKind.CUDA or generation is None:
        return ()
    usable = [b for b in dict.fromkeys(wanted) if b is not AttentionBackend.MATH and generation >= _FROM[b]]
    return (*usable, AttentionBackend.MATH)


def torch_sets_priority() -> bool:
    """This torch can be told an order, not only which kernels are allowed."""
    return "set_priority" in inspect.signature(sdpa_kernel).parameters


@contextmanager
def attending_with(priority: Sequence[AttentionBackend], sets_priority: bool | None = None) -> Iterator[None]:
    """Attention inside the block uses the first kernel of `priority` that takes its inputs, and none that is not named.

    An empty `priority` leaves everything as it is. Where torch cannot be told an order (`sets_priority`; found out when
    None), the kernels that are not named are switched off and torch's own order holds. Restores what was.
    """
    if not priority:
        yield
        return
    if sets_priority is None:
        sets_priority = torch_sets_priority()
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
    """For each kernel, how torch is asked whether it is on and how it is switched."""
    cuda = torch.backends.cuda
    return {
        AttentionBackend.CUDNN: (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        AttentionBackend.FLASH: (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        AttentionBackend.EFFICIENT: (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        AttentionBackend.MATH: (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    }
