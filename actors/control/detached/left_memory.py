"""The memory of a controller as a journal stores it: with the moment at which it was stored, which tells the next
controller how long the pool had none.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from modelpool.actors.control.past_jobs import memory_in_text, plain_memory
from modelpool.pool.values.core.process_identity import boot_id
from modelpool.scheduler.model.pool_memory import learned_only

#: after the end of a controller, its nodes stay for this time at most, and cost money
LONGEST_GAP_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class LeftMemory:
    """What the last controller has left.

    memory       of its core, as text; "" if there is none
    controllers  of the pool until then, since its regular end
    at, boot     monotonic seconds, and the start of the machine to which they belong
    """

    memory: str = ""
    controllers: int = 0
    at: float = 0.0
    boot: str = ""

    def gap_seconds(self) -> float:
        """Return for how long nobody has counted what the pool costs; 0 if the machine was started again since."""
        if not self.boot or self.boot != boot_id():
            return 0.0
        return min(max(0.0, time.monotonic() - self.at), LONGEST_GAP_SECONDS)


def stored_memory(memory: str, controllers: int) -> str:
    """Return the text that a journal stores now."""
    return json.dumps({"memory": memory, "controllers": controllers, "at": time.monotonic(), "boot": boot_id()})


def left_memory(stored: str) -> LeftMemory:
    """Return what `stored_memory` wrote; an empty memory for "", and for what another version wrote."""
    try:
        return LeftMemory(**json.loads(stored)) if stored else LeftMemory()
    except (ValueError, TypeError):
        return LeftMemory()


def ended_memory(stored: str) -> str:
    """Return what stays of a stored memory when the pool ends in order: what was measured."""
    left = left_memory(stored)
    try:
        return stored_memory(plain_memory(learned_only(memory_in_text(left.memory))), 0) if left.memory else stored
    except ValueError:
        return ""
