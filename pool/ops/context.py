"""Where and in what dtype a model call computes, for the casting layers below it.

A `ContextVar`, so that a run in one thread or task never sees another's. Knows no module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from pool.devices.transfers import TransferLedger


@dataclass(frozen=True, slots=True)
class ComputeContext:
    """What casting layers compute with.

    interrupt  called at the head of every stock layer; raising ends the run there
    ledger     told of weights that stream to the device, for devices that do not count by themselves
    """

    device: torch.device
    dtype: torch.dtype
    interrupt: Callable[[], None] | None = None
    ledger: TransferLedger | None = None


_CURRENT: ContextVar[ComputeContext | None] = ContextVar("compute_context", default=None)

#: the context of the call that is under way, or None
current = _CURRENT.get


@contextmanager
def compute(
    device: torch.device,
    dtype: torch.dtype,
    interrupt: Callable[[], None] | None = None,
    ledger: TransferLedger | None = None,
) -> Iterator[None]:
    """Model calls inside the block compute on `device` in `dtype`. May be nested; the inner one counts."""
    token = _CURRENT.set(ComputeContext(device, dtype, interrupt, ledger))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def check_interrupt() -> None:
    """Give the run's interrupt a chance to end it. Nothing while a graph is compiled: it would be compiled in."""
    if torch.compiler.is_compiling():
        return
    context = _CURRENT.get()
    if context is not None and context.interrupt is not None:
        context.interrupt()
