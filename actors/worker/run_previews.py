"""`RunPreviews`: makes previews of a worker's sampling runs while somebody wants them, and sends the newest.

The thread of the run only copies a small latent from the device, at most once per interval and image. Another thread
makes the image and sends it; of an image that is generated, only the newest latent waits. Without a wish, a step costs
one look-up: nothing is copied, computed or sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from modelpool.actors.worker.step_checkpoints.latest_queue import LatestQueue
from modelpool.actors.worker.wire.messages import PreviewMade, RunRequest
from modelpool.pool.values.core.previews import Preview, PreviewKind, PreviewWish
from modelpool.pool.values.core.stage_params import FloatArray, ModelRef, SampleParams
from modelpool.pool.values.specs.spec import WorkerId

logger = logging.getLogger(__name__)

#: wishes for runs that are remembered: more than the tasks of any batch
WISHES_KEPT = 256
#: returns the preview of a latent as a WebP file; None if there is none
MakePreview = Callable[[ModelRef, FloatArray, PreviewWish], bytes | None]


class RunPreviews:
    """The previews of one worker; methods are for the thread that runs, unless they say otherwise."""

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: int,
        make: MakePreview,
        send: Callable[[PreviewMade], None],
    ) -> None:
        """`make` and `send` are called in the thread of the previews."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._make = make
        self._send = send
        self._queue = LatestQueue("make previews")
        #: wishes that came during runs, oldest first; replace the wish of the request
        self._wishes: dict[int, PreviewWish | None] = {}

    def rename(self, worker_id: WorkerId, incarnation: int) -> None:
        """Send previews under another name from now on."""
        self._worker_id, self._incarnation = worker_id, incarnation

    def want(self, run: int, wish: PreviewWish | None) -> None:
        """Make previews of a run as `wish` says from now on, or none. Any thread."""
        self._wishes[run] = wish
        for old in tuple(self._wishes)[:-WISHES_KEPT]:
            self._wishes.pop(old, None)

    def forget_wishes(self) -> None:
        """Forget the wishes of an earlier controller, which numbered its runs, too."""
        self._wishes = {}

    def wish_of(self, request: RunRequest) -> PreviewWish | None:
        """Return the wish for previews of a run now."""
        wish = self._wishes.get(request.run, request.preview)
        return None if wish is None or wish.kind is PreviewKind.NONE else wish

    def callback(
        self, request: RunRequest, steps_done: Callable[[], int], is_current: Callable[[], bool]
    ) -> Callable[[Callable[[], Sequence[FloatArray]]], None] | None:
        """Return the callback after each prediction of a run; None for stages without previews. Only a run that
        `is_current` has some."""
        work = request.work
        if not isinstance(work, SampleParams):
            return None
        made_at = float("-inf")
        steps = work.steps_run

        def preview(latents: Callable[[], Sequence[FloatArray]]) -> None:
            nonlocal made_at
            wish = self.wish_of(request)
            if wish is None:
                return
            now = time.monotonic()
            if now - made_at < wish.interval_seconds or not is_current():
                return
            made_at = now
            (latent_CHW,) = latents()
            step = min(steps_done() + 1, steps)
            task_id = request.task.task_id
            self._queue.put(task_id, partial(self._make_and_send, request, wish, latent_CHW, step, steps))

        return preview

    def flush(self, seconds: float) -> bool:
        """Wait until all previews are sent, at most `seconds`; return whether they are."""
        return self._queue.flush(seconds)

    def close(self) -> None:
        """Make no more previews. Idempotent."""
        self._queue.close()

    def _make_and_send(
        self, request: RunRequest, wish: PreviewWish, latent_CHW: FloatArray, step: int, steps: int
    ) -> None:
        assert isinstance(request.work, SampleParams), "only sampling runs have previews"
        content = self._make(request.work.model, latent_CHW, wish)
        if content is not None:
            preview = Preview(step, steps, content)
            self._send(PreviewMade(self._worker_id, self._incarnation, request.task.task_id, request.run, preview))
