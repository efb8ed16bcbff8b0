"""Where and in what dtype a model call computes, for the casting layers below it.

A `ContextVar`, so that a run in one thread or task never sees another's. Knows no module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.devices.torch_api.torch_private import constant_when_compiled
from modelpool.pool.devices.transfers import TransferLedger
from modelpool.pool.devices.uploads import Uploader
from modelpool.pool.ops.attention import AttentionBackend, attending_with

#: another way to compute a linear layer: (input, weight at rest, bias at rest) -> result, None to decline
LinearKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]


@dataclass(frozen=True, slots=True)
class ComputeContext:
    """What casting layers compute with.

    interrupt  called at the head of every stock layer, and where another module reads a parameter; raising ends the run
               there
    ledger     told of weights that stream to the device, for devices that do not count by themselves
    linear     asked first by linear layers without weight functions; not while a graph is compiled
    uploader   brings host weights to `device`; None to copy them at once
    """

    device: torch.device
    dtype: torch.dtype
    interrupt: Callable[[], None] | None = None
    ledger: TransferLedger | None = None
    linear: LinearKernel | None = None
    uploader: Uploader | None = None


_CURRENT: ContextVar[ComputeContext | None] = ContextVar("compute_context", default=None)


def _current() -> ComputeContext | None:
    return _CURRENT.get()


#: the context of the call that is under way, or None. While a graph is compiled, its value at that time is a constant
#: of the graph: torch cannot trace a `ContextVar`.
current: Callable[[], ComputeContext | None] = constant_when_compiled(_current)


@contextmanager
def compute(
    device: torch.device,
    dtype: torch.dtype,
    interrupt: Callable[[], None] | None = None,
    ledger: TransferLedger | None = None,
    linear: LinearKernel | None = None,
    attention: Sequence[AttentionBackend] = (),
    uploader: Uploader | None = None,
) -> Iterator[None]:
    """Model calls inside the block compute on `device` in `dtype`. May be nested; the inner one counts.

    `attention` is the order of attention kernels (`pool.ops.attention`); empty for whatever is in force.
    """
    with attending_with(attention):
        token = _CURRENT.set(ComputeContext(device, dtype, interrupt, ledger, linear, uploader))
        try:
            yield
        finally:
            _CURRENT.reset(token)


@contextmanager
def without_uploader() -> Iterator[None]:
    """Host weights that move inside the block come by themselves: they stay, and no later pass asks for them."""
    context = _CURRENT.get()
    if context is None or context.uploader is None:
        yield
        return
    token = _CURRENT.set(replace(context, uploader=None))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def check_interrupt() -> ComputeContext | None:
    """Give the run's interrupt a chance to end it. Returns the context.

    Nothing, and None, while a graph is compiled: the question would be compiled in.
    """
    if torch.compiler.is_compiling():
        return None
    context = _CURRENT.get()
    if context is not None and context.interrupt is not None:
        context.interrupt()
    return context
