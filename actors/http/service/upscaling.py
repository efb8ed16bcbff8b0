"""`Upscaling`: images of callers that are enlarged without generating one, within the limits of their callers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelpool.actors.http.service.access import Caller
from modelpool.actors.http.service.caller_names import check_upscaler
from modelpool.actors.http.service.ports import HttpStage
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.services import ClientGone, Services, disconnected
from modelpool.actors.outputs.results.outcomes import JobFailed
from modelpool.actors.request.upscale_fields import Upscale
from modelpool.pool.values.core.stage_params import ImagePixels

if TYPE_CHECKING:
    from PIL.Image import Image
    from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class ImageToEnlarge:
    """An image, and the upscaler that enlarges it."""

    image: Image
    upscale: Upscale


class Upscaling:
    """The images that are being enlarged. Belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        #: by owner
        self._running: dict[str, list[HttpStage]] = {}

    async def enlarge(self, request: Request, caller: Caller, wanted: Sequence[ImageToEnlarge]) -> list[Image]:
        """Enlarge images for a caller, and wait for all; they are cancelled if the client goes. Raises UserError,
        HttpProblem (429 for too many jobs) and PoolLost.
        """
        names = frozenset[str]()
        if wanted:
            names = await self._services.listed_names()
        for each in wanted:
            check_upscaler(each.upscale.model, names)
        with self._services.arriving(caller, len(wanted)):
            stages: list[HttpStage] = []
            running = self._running.setdefault(caller.owner, [])
            try:
                for each in wanted:
                    stages.append(await asyncio.to_thread(self._submitted, caller, each))
                    running.append(stages[-1])
                await _all_ended(request, stages)
                return [await asyncio.to_thread(_image_of, stage) for stage in stages]
            finally:
                for stage in stages:
                    running.remove(stage)
                    await asyncio.to_thread(stage.cancel)  # stages of a call that failed or was left
                if not running:
                    self._running.pop(caller.owner, None)

    async def cancel(self, owner: str) -> None:
        """Cancel the stages that run for `owner`."""
        for stage in tuple(self._running.get(owner, ())):
            await asyncio.to_thread(stage.cancel)

    def _submitted(self, caller: Caller, wanted: ImageToEnlarge) -> HttpStage:
        priority = self._services.settings.priority_of(caller.user)
        return self._services.pool.upscale(wanted.image, wanted.upscale, user=caller.user, priority=priority)


async def _all_ended(request: Request, stages: Sequence[HttpStage]) -> None:
    """Wait for the ends of all. Raises ClientGone."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    left = len(stages)

    def count() -> None:
        nonlocal left
        left -= 1
        if not left:
            over.set()

    def ended() -> None:
        try:
            loop.call_soon_threadsafe(count)
        except RuntimeError:
            return  # the loop has ended, and with it the caller

    for stage in stages:
        stage.watch(ended)
    if not stages:
        return
    tasks = [asyncio.ensure_future(over.wait()), asyncio.ensure_future(disconnected(request))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not over.is_set():
            raise ClientGone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _image_of(stage: HttpStage) -> Image:
    """Return the image of a stage that has ended. Raises HttpProblem."""
    import PIL.Image

    try:
        made = stage.result(timeout=0)
    except JobFailed as failed:
        failure = failed.failure
        if failure.cancelled:
            raise HttpProblem(409, "the call was interrupted") from None
        status = 400 if failure.kind.value == "bad_input" else 500
        raise HttpProblem(status, f"{failure.kind.value}: {failure.message}") from None
    assert isinstance(made, ImagePixels), "an enlarged image"
    return PIL.Image.fromarray(made.pixels_HWC)
