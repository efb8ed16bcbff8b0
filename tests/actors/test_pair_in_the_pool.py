"""A video that two diffusion models make one after the other, in a pool: a state halfway is a result like others, and
is there again when a worker or a result is lost between the two."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.stage_params import SampleParams, SamplerState, VideoFrames
from modelpool.pool.values.specs.spec import JobId
from modelpool.scheduler.model.messages import Outcome
from tests.actors.fake_fleet import Desk, Sent, settle
from tests.actors.fakes import PAIR, FakeCatalog, image_of
from tests.actors.loop_connection import open_pool


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(
        **{"model": PAIR, "prompt": "p", "seed": 1, "frames": 5, "steps": 8, "width": 64, "height": 64, **fields}
    )


def expected_frames(wanted: GenerateRequest) -> Any:
    _, cut = build_graph(wanted, JobId("x"), FakeCatalog())
    video: Any = image_of(dict(cut.works), cut.job.tasks)
    assert isinstance(video, VideoFrames)
    return video.frames_THWC


def resumes(sent: Sent) -> bool:
    return isinstance(sent.request.work, SampleParams) and sent.request.work.schedule.resumes


def runs_of_the_first(desk: Desk) -> int:
    works = [sent.request.work for sent in desk.fleet.sent]
    return sum(isinstance(work, SampleParams) and not work.schedule.resumes for work in works)


async def between_the_two(desk: Desk) -> Sent:
    """The run of the second model, which has begun."""
    while not resumes(desk.fleet.running[0]):
        await desk.finish(*desk.fleet.running)
    assert isinstance(desk.fleet.running[0].inputs[-1].value, SamplerState)
    return desk.fleet.running[0]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "lost"])
def test_a_worker_that_dies_between_the_two_models_leaves_the_video_as_it_is(is_kept: bool, workers: int) -> None:
    """What the first one left is read again where it is kept, and is made again where it went with the worker."""

    async def talk() -> None:
        desk = await Desk(workers).open()
        await desk.submit(request())
        second = await between_the_two(desk)
        second.inputs[-1].lost = not is_kept
        desk.fleet.kill(second.worker_id)
        await settle()
        (ended,) = await desk.run_dry()
        assert ended.outcome is Outcome.SUCCEEDED
        assert runs_of_the_first(desk) == (1 if is_kept else 2)
        np.testing.assert_array_equal(ended.result.value.frames_THWC, expected_frames(request()))

    asyncio.run(talk())


def test_videos_that_differ_in_the_second_model_go_on_from_one_result() -> None:
    async def talk() -> None:
        desk = await Desk().open()
        wanted = [request(low_noise=strength) for strength in (2, 3, 5)]
        await desk.submit(*wanted)
        ended = await desk.run_dry()
        assert runs_of_the_first(desk) == 1
        for one, asked in zip(sorted(ended, key=lambda job: job.index), wanted, strict=True):
            np.testing.assert_array_equal(one.result.value.frames_THWC, expected_frames(asked))
        assert len({one.result.value.frames_THWC.tobytes() for one in ended}) == 3

    asyncio.run(talk())


def test_stages_that_a_driver_composes_are_made_by_both() -> None:
    with open_pool() as pool:
        text = pool.encode("p", model=PAIR)
        latent = pool.sample(text, model=PAIR, seed=1, frames=5, steps=8, width=64, height=64, loras=["light:1:low"])
        video = pool.decode(latent, model=PAIR).result(10)
    wanted = request(cfg=5.0, loras=["light:1:low"])
    assert isinstance(video, VideoFrames)
    np.testing.assert_array_equal(video.frames_THWC, expected_frames(wanted))
