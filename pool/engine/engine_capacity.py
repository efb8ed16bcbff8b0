"""The memory with which an engine plans, which may grow while it runs."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace

from modelpool.pool.devices.device_kinds import OpenDevice
from modelpool.pool.devices.vram_policy import capacity_bytes
from modelpool.pool.values.core.errors import format_bytes
from modelpool.pool.weights.vram.vram_manager import VramManager

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Capacity, link speed and name of the device of an engine.

    capacity_bytes  for weights, scratch and activations together: what plans distribute
    overhead_bytes  memory of the engine beside that: copies ahead of use, workspaces of libraries
    holds_shares    whether it may hold weights for the other members of a gang
    gang_link_bytes_per_second  to other GPUs of the machine, as the operator states it; 0: gangs measure it
    """

    capacity_bytes: int
    link_bytes_per_second: float
    device_name: str
    overhead_bytes: int = 0
    holds_shares: bool = False
    gang_link_bytes_per_second: float = 0.0


class EngineCapacity:
    """The facts of an engine on an open device, `reserve_bytes` of which are for other programs."""

    def __init__(
        self, device: OpenDevice, vram: VramManager, facts: EngineFacts, reserve_bytes: int, may_grow: bool
    ) -> None:
        """`may_grow` is False where device memory is the host's: the free bytes there change all the time."""
        self.facts = facts
        self._device, self._vram, self._reserve_bytes, self._may_grow = device, vram, reserve_bytes, may_grow

    @property
    def may_grow(self) -> bool:
        """Whether `grow` would take memory now, on any thread: a question to the driver, of some microseconds. False on
        a lost device, which the next run finds."""
        with suppress(RuntimeError):
            return self._may_grow and self._device.memory.may_grow()
        return False

    def grow(self) -> None:
        """Take memory that other processes have given back since the device was opened; the next residency has the new
        capacity."""
        if not self._may_grow or not self._device.memory.grow():
            return
        room_bytes = capacity_bytes(None, self._device.memory.total_bytes(), self._reserve_bytes)
        before, now_bytes = self.facts, room_bytes - self.facts.overhead_bytes
        if now_bytes <= before.capacity_bytes:
            return
        self.facts = replace(before, capacity_bytes=now_bytes)
        self._vram.capacity_bytes = now_bytes
        _LOG.info(
            "other processes have freed memory of %s: plans use %s now, %s before",
            before.device_name,
            format_bytes(now_bytes),
            format_bytes(before.capacity_bytes),
        )
