"""Opens a device for one process: usable memory and measured link speed."""

from __future__ import annotations

import time

import torch

from modelpool.pool.devices.device_kinds import OpenDevice, open_device
from modelpool.pool.devices.pinned_memory import SLOT_BYTES, SLOTS
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.devices.vram_policy import LEAST_ROOM_BYTES, capacity_bytes
from modelpool.pool.values.core.errors import DoesNotFit, format_bytes

#: maximum size of the copy that measures the link at start; where copies go through a ring, it passes through all of
#: its buffers, so that filling and copying overlap as they do for weights
LINK_PROBE_BYTES = 32 << 20
RING_PROBE_BYTES = SLOTS * SLOT_BYTES


def open_with_room(kind: str, index: int, budget_bytes: int | None) -> OpenDevice:
    """`open_device`. Raises DoesNotFit if the device lacks even the memory that a process needs to start there."""
    try:
        return open_device(kind, index, budget_bytes)
    except RuntimeError as error:  # torch's errors of devices are of this kind, as is its running out of memory
        if "out of memory" not in str(error):
            raise
        raise DoesNotFit(
            f"device {kind}:{index}: next to nothing is free, not even what a process needs to begin there ({error}); "
            f"end what uses the device"
        ) from error


def usable_bytes(
    device: OpenDevice, index: int, budget_bytes: int | None, reserve_bytes: int, workspaces_bytes: int = 0
) -> int:
    """Return the memory for this process, with `workspaces_bytes` for workspaces of libraries. Raises DoesNotFit if
    it is too little."""
    free_bytes = device.memory.free_bytes()
    room_bytes = capacity_bytes(budget_bytes, free_bytes, reserve_bytes)
    if room_bytes - workspaces_bytes >= LEAST_ROOM_BYTES:
        return room_bytes
    least_bytes = LEAST_ROOM_BYTES + workspaces_bytes
    budget = "" if budget_bytes is None else f", {format_bytes(budget_bytes)} were given to it (vram)"
    raise DoesNotFit(
        f"device {device.kind.value}:{index}: {format_bytes(free_bytes)} are free, of which "
        f"{format_bytes(reserve_bytes)} are reserved for other programs (reserve_vram){budget}; a worker needs at "
        f"least {format_bytes(least_bytes)} of the rest: end what uses the device, or change these settings"
    )


def measure_link(device: torch.device, pipeline: TransferPipeline, room_bytes: int) -> float:
    """Return the host-to-device speed for weights in bytes per second: a copy after a warm-up copy."""
    most_bytes = RING_PROBE_BYTES if device.type == "cuda" else LINK_PROBE_BYTES
    probe = torch.zeros(min(most_bytes, room_bytes // 4), dtype=torch.uint8)

    def copy() -> None:
        copied = probe.clone() if device.type == "cpu" else pipeline.bring(probe)
        copied[-1].item()  # waits for the copy

    copy()
    started = time.perf_counter()
    copy()
    return probe.nbytes / max(time.perf_counter() - started, 1e-9)
