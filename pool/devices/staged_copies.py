"""Copies host bytes to a device through a ring of pinned buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from modelpool.pool.devices.copy_streams import Stream, StreamMaker
from modelpool.pool.devices.pinned_memory import StagingRing

#: copies the second tensor, bytes on the host, into the first
Fill: TypeAlias = Callable[[Tensor, Tensor], object]


def copy_staged(
    staging: StagingRing, source: Tensor, target: Tensor, maker: StreamMaker, stream: Stream, fill: Fill = Tensor.copy_
) -> None:
    """Copy the bytes of `source` (uint8, on the host) to `target` (uint8, on the device) in pieces of a buffer. The
    current stream must be `stream`, which may still copy when this returns, and also when it raises.

    A buffer is not filled again before the copy that reads it is over, whatever raises.
    """
    step = staging.slot_bytes
    for begin in range(0, source.numel(), step):
        copied = maker.new_event()
        with staging.lock:
            filled, slot = staging.stage(source[begin : begin + step], fill)
            try:
                target[begin : begin + step].copy_(filled, non_blocking=True)
            finally:
                copied.record(stream)
                slot.copied(copied)
