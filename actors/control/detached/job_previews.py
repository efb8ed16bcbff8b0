"""`DetachedPreviews`: the newest previews of detached jobs, which are made while somebody asks for them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from modelpool.actors.outputs.results.previews import ImagePreview

#: how long previews of a submission are made after somebody has asked for them
LEASE_SECONDS = 10.0
#: jobs of which the newest preview is kept, some KiB each
MOST_KEPT = 256


class DetachedPreviews:
    """Belongs to one job service. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: by submission, until when previews of it are wanted, on the monotonic clock
        self._leases: dict[str, float] = {}
        #: by submission and place, the oldest first
        self._newest: OrderedDict[tuple[str, int], ImagePreview] = OrderedDict()

    def ask(self, name: str) -> bool:
        """Want previews of a submission for LEASE_SECONDS. Returns whether nobody wanted some before."""
        with self._lock:
            is_first = self._leases.get(name, 0.0) <= time.monotonic()
            self._leases[name] = time.monotonic() + LEASE_SECONDS
        return is_first

    def wanted(self) -> frozenset[str]:
        """Return the submissions of which previews are wanted; previews of others are forgotten."""
        now = time.monotonic()
        with self._lock:
            self._leases = {name: until for name, until in self._leases.items() if until > now}
            for key in [key for key in self._newest if key[0] not in self._leases]:
                del self._newest[key]
            return frozenset(self._leases)

    def note(self, name: str, preview: ImagePreview) -> None:
        """Keep the newest preview of a job."""
        with self._lock:
            self._newest.pop((name, preview.index), None)
            self._newest[name, preview.index] = preview
            while len(self._newest) > MOST_KEPT:
                self._newest.popitem(last=False)

    def newest(self, name: str) -> tuple[ImagePreview, ...]:
        """Return the newest preview of each job of a submission, the latest last."""
        with self._lock:
            return tuple(preview for (each, _), preview in self._newest.items() if each == name)
