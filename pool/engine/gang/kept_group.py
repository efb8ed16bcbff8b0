"""`KeptGroup`: the process group of a worker's last gang, for the next gang of the same members: to form one takes 0.03
to 0.8 s, which consecutive runs spend once.

It is left when another gang forms, when a member comes without it (its process has ended, or its own copy), when it is
idle for `KEPT_SECONDS`, and when its memory is needed. One per process, as torch's default group is.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from modelpool.pool.devices.torch_api.process_groups import abandon_group
from modelpool.pool.engine.gang.gang_group import FAILURES, FormedGroup
from modelpool.pool.engine.gang.gang_layout import layout_of
from modelpool.pool.values.specs.gang import Gang

#: runs of a model that follow each other come within this time, in which their texts are encoded and latents decoded
KEPT_SECONDS = 30.0


class KeptGroup:
    """The group that this process keeps, if any. The thread of the runs and a timer use it."""

    def __init__(self, idle_seconds: float = KEPT_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._formed: FormedGroup | None = None
        self._timer: threading.Timer | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The members of each group that may be connected; () if none is kept."""
        formed = self._formed
        return () if formed is None else (*formed.layout.group_sizes, len(formed.members))

    def keep(self, formed: FormedGroup) -> None:
        """Keep a group after all its members have ended their run well."""
        with self._lock:
            self._formed = formed
            self._timer = threading.Timer(self._idle_seconds, self._expire, (formed,))
            self._timer.daemon = True
            self._timer.start()

    def take(self) -> FormedGroup | None:
        """Return the group, which belongs to the caller then; None if there is none."""
        with self._lock:
            formed, self._formed = self._formed, None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return formed

    def drop(self) -> None:
        """Leave the group, if there is one."""
        with self._lock:
            if self._formed is not None:
                self._formed = None
                _leave()

    def drop_others(self, gang: Gang, texts: int) -> None:
        """Leave the group unless it is for `gang`, in a run with so many texts."""
        formed = self._formed
        if formed is not None and not formed.is_for(gang, layout_of(gang.degree, texts)):
            self.drop()

    def _expire(self, formed: FormedGroup) -> None:
        with self._lock:  # the next gang waits for it: there is one default group
            if self._formed is formed:
                self._formed = self._timer = None
                _leave()


def _leave() -> None:
    with suppress(*FAILURES):
        abandon_group()
