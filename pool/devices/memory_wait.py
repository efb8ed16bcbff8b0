"""Waits, when a device is opened, until the memory of processes that are ending there is free.

The driver takes seconds to free the memory of a killed process. A worker that takes its place would otherwise read the
little that is free meanwhile as the memory of the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from modelpool.pool.values.core.errors import format_bytes

_LOG = logging.getLogger(__name__)

#: a device with this fraction free is not waited for: the rest is the driver's, or a display's
ENOUGH_SHARE = 0.9
#: of the quiet time, until a device with enough free is taken for settled, if it was waited for
ENOUGH_QUIET_SHARE = 0.3
#: changes of this size are noise: a display, or the contexts of other processes
RISE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class MemoryWait:
    """Limits of a wait.

    quiet_seconds  free memory that has not risen for so long stays as it is
    most_seconds   maximum of the wait
    poll_seconds   between two looks
    """

    quiet_seconds: float = 1.0
    most_seconds: float = 20.0
    poll_seconds: float = 0.05
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def until_settled(self, device: str, read: Callable[[], tuple[int, int]], budget_bytes: int | None) -> int:
        """Wait until `read`, which returns free and total bytes, has the budget (None: most of the device) or no longer
        rises. Returns the free bytes. The log has the reason of the wait, and the bytes that are missing in the end."""
        free_bytes, total_bytes = read()
        enough_bytes = int(total_bytes * ENOUGH_SHARE)
        enough_bytes = enough_bytes if budget_bytes is None else min(budget_bytes, enough_bytes)
        first_bytes, highest_bytes = free_bytes, free_bytes
        began = risen_at = self.clock()
        while free_bytes < enough_bytes or highest_bytes > first_bytes:
            now, quiet_seconds = self.clock(), self.quiet_seconds
            if free_bytes >= enough_bytes:
                quiet_seconds *= ENOUGH_QUIET_SHARE
            if now - risen_at >= quiet_seconds or now - began >= self.most_seconds:
                break
            self.sleep(self.poll_seconds)
            free_bytes, _ = read()
            if free_bytes >= highest_bytes + RISE_BYTES:
                highest_bytes, risen_at = free_bytes, self.clock()
        if highest_bytes > first_bytes:
            _LOG.info(
                "device %s: waited %.1f s while other processes ended there: %s free, %s before",
                device,
                risen_at - began,
                format_bytes(free_bytes),
                format_bytes(first_bytes),
            )
        if free_bytes < enough_bytes:
            _LOG.warning(
                "device %s: other processes use %s of %s. A worker takes more once it is free; end what uses it to "
                "have it from the start",
                device,
                format_bytes(total_bytes - free_bytes),
                format_bytes(total_bytes),
            )
        return free_bytes
