"""`KeptPreviews`: the last previews of the jobs of a submission, until their outputs are returned."""

from __future__ import annotations

from collections import deque

from modelpool.actors.client.monitor import Monitor
from modelpool.actors.outputs.results.previews import ImagePreview

#: previews of one job, some KiB each, and jobs that have some: the oldest are dropped
PREVIEWS_KEPT = 16
MOST_PREVIEWED_JOBS = 256


class KeptPreviews:
    """The previews by index of the job, the oldest job first."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._by_index: dict[int, deque[ImagePreview]] = {}

    def add(self, preview: ImagePreview) -> None:
        """Keep the newest preview of a job."""
        with self._monitor:
            self._by_index.setdefault(preview.index, deque(maxlen=PREVIEWS_KEPT)).append(preview)
            while len(self._by_index) > MOST_PREVIEWED_JOBS:
                del self._by_index[next(iter(self._by_index))]
            self._monitor.notify()

    def newest(self, index: int) -> ImagePreview | None:
        """Return the newest preview of the output at `index`; None if there is none, or if that was returned."""
        with self._monitor:
            found = self._by_index.get(index)
            return found[-1] if found else None

    def take(self, index: int) -> tuple[ImagePreview, ...]:
        """Return the previews of an output that is returned now, and forget them."""
        with self._monitor:
            return tuple(self._by_index.pop(index, ()))
