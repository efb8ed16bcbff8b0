"""Device and dtype of the current model call, for its casting layers.

A `ContextVar`, so that runs in different threads or tasks are independent. Knows no module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from modelpool.pool.devices.torch_api.torch_private import constant_when_compiled
from modelpool.pool.devices.transfers import TransferLedger
from modelpool.pool.devices.uploads import Uploader
from modelpool.pool.weights.ops.attention import AttentionBackend, use_attention_kernels
from modelpool.pool.weights.ops.attention_calls import AttentionKernels, routed

#: alternative computation of a linear layer: (input, stored weight, stored bias) -> result, or None to decline
LinearKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
#: alternative computation of another layer: (function, layer, input, stored weight, stored bias) -> the result of
#: function(layer, input, weight, bias), which is one operation; or None to decline
LayerKernel: TypeAlias = Callable[[Callable[..., Tensor], Any, Tensor, Tensor | None, Tensor | None], Tensor | None]


class Peers(Protocol):
    """The weights that members of a gang hold for each other."""

    def get(self, host: Tensor) -> Tensor | None:
        """Return a new copy of `host` on the device; None if no member holds it."""
        ...


@dataclass(frozen=True, slots=True)
class ComputeContext:
    """The parameters of a computation with casting layers.

    interrupt  called at the start of every stock layer, and where another module reads a parameter; ends the run by
               raising
    ledger     counts weights that stream to the device, for devices without counters
    linear     tried first by linear layers without weight functions; not while a graph is compiled
    uploader   moves host weights to `device`; None to copy them synchronously
    peers      asked first for host weights; None if none are on other GPUs
    layer      tried first by convolutions, norms and activations, as `linear` is
    """

    device: torch.device
    dtype: torch.dtype
    interrupt: Callable[[], None] | None = None
    ledger: TransferLedger | None = None
    linear: LinearKernel | None = None
    uploader: Uploader | None = None
    peers: Peers | None = None
    layer: LayerKernel | None = None


_CURRENT: ContextVar[ComputeContext | None] = ContextVar("compute_context", default=None)


def _current() -> ComputeContext | None:
    return _CURRENT.get()


#: the context of the current call, or None. While a graph is compiled, its value is a constant of the graph: torch
#: cannot trace a `ContextVar`.
current: Callable[[], ComputeContext | None] = constant_when_compiled(_current)


@contextmanager
def compute(
    device: torch.device,
    dtype: torch.dtype,
    interrupt: Callable[[], None] | None = None,
    ledger: TransferLedger | None = None,
    linear: LinearKernel | None = None,
    attention: Sequence[AttentionBackend] | AttentionKernels = (),
    uploader: Uploader | None = None,
    layer: LayerKernel | None = None,
) -> Iterator[None]:
    """Make model calls inside the block compute on `device` in `dtype`. Contexts nest; the innermost applies.

    `attention` is the order of attention kernels (`pool.weights.ops.attention`), perhaps by shape; empty to leave it
    unchanged.
    """
    kernels = attention if isinstance(attention, AttentionKernels) else AttentionKernels(attention)
    with use_attention_kernels(kernels.order), routed(kernels):
        token = _CURRENT.set(ComputeContext(device, dtype, interrupt, ledger, linear, uploader, None, layer))
        try:
            yield
        finally:
            _CURRENT.reset(token)


@contextmanager
def without_uploader() -> Iterator[None]:
    """Move host weights inside the block without the uploader: they stay on the device, and later
    passes do not request them again."""
    context = _CURRENT.get()
    if context is None or context.uploader is None:
        yield
        return
    token = _CURRENT.set(replace(context, uploader=None))
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def with_peers(peers: Peers) -> Iterator[Uploader | None]:
    """Ask `peers` inside the block for host weights before they are read from the host; yields what reads them."""
    context = _CURRENT.get()
    assert context is not None, "weights are used inside of runs"
    token = _CURRENT.set(replace(context, peers=peers))
    try:
        yield context.uploader
    finally:
        _CURRENT.reset(token)


@contextmanager
def without_interrupt() -> Iterator[None]:
    """Call no interrupt inside the block."""
    context = _CURRENT.get()
    if context is None or context.interrupt is None:
        yield
        return
    token = _CURRENT.set(replace(context, interrupt=None))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def check_interrupt() -> ComputeContext | None:
    """Call the interrupt of the context, which may raise to end the run. Return the context.

    Returns None and calls nothing while a graph is compiled: the check would be compiled in.
    """
    if torch.compiler.is_compiling():
        return None
    context = _CURRENT.get()
    if context is not None and context.interrupt is not None:
        context.interrupt()
    return context
