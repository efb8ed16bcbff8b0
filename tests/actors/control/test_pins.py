"""Pinned models in the controller, with workers that the test ends, and in a complete pool without Ray."""

from __future__ import annotations

import time

import pytest

from modelpool.actors.client.client import ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control import job_queue
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnknownName, UnusableField
from modelpool.pool.values.specs.spec import RunError, RunErrorKind, WorkerId
from tests.actors.fake_fleet import Desk, dialogue, settle
from tests.actors.fakes import FakeEngine
from tests.actors.loop_connection import LoopConnection, open_pool, open_real_pool
from tests.actors.ray.local_cluster import SHAPES

REQUEST = GenerateRequest(model="shapes", prompt="a red circle", seed=1, steps=3)


async def pins(desk: Desk) -> list[str]:
    return [f"{pinned.model} {pinned.words}" for pinned in (await desk.controller.status()).pins]


@dialogue
async def test_a_pinned_model_is_loaded_and_shown() -> None:
    desk = await Desk(workers=2).open()
    assert [pinned.words for pinned in await desk.controller.pin(("shapes",), 2)] == [
        "on 0 of 2 workers; gpu-0, gpu-1 load it"
    ]
    await settle()
    first, second = desk.fleet.loads
    assert first.request.model.name == "shapes"
    assert [role.value for role in first.request.roles] == ["text_encoder", "diffusion_model", "vae"]
    desk.fleet.finish_load(first)
    await settle()
    assert await pins(desk) == ["shapes on 1 of 2 workers (gpu-0); gpu-1 loads it"]
    desk.fleet.finish_load(second)
    await settle()
    assert await pins(desk) == ["shapes on 2 of 2 workers (gpu-0, gpu-1)"]
    await desk.controller.pin(("shapes",), 0)
    assert await pins(desk) == []


@dialogue
async def test_a_run_stops_a_load_and_does_not_wait_for_it() -> None:
    desk = await Desk(workers=1).open()
    await desk.controller.pin(("forms",), 1)
    await settle()
    (load,) = desk.fleet.loads
    await desk.submit(REQUEST)
    assert load.stop_asked
    assert len(desk.fleet.running) == 1
    desk.fleet.finish_load(load)
    await desk.run_dry()
    (again,) = desk.fleet.loads  # the worker is idle again
    assert not again.stop_asked
    assert {task.load_seconds for ended in desk.ended for task in ended.tasks} == {0.0}


@dialogue
async def test_a_load_of_a_lost_worker_begins_again_elsewhere() -> None:
    desk = await Desk(workers=2).open()
    await desk.controller.pin(("shapes",), 1)
    await settle()
    (load,) = desk.fleet.loads
    desk.fleet.loads.clear()
    desk.fleet.kill(load.worker_id)
    await settle()
    (again,) = desk.fleet.loads
    assert again.worker_id != load.worker_id
    load.report.cancel()


@dialogue
async def test_a_failed_load_is_shown_with_its_reason_and_ends_nothing() -> None:
    desk = await Desk(workers=1).open()
    await desk.controller.pin(("shapes",), 1)
    await settle()
    desk.fleet.finish_load(desk.fleet.loads[0], RunError(RunErrorKind.OUT_OF_VRAM, "another program took it"))
    await settle()
    assert await pins(desk) == ["shapes on 0 of 1 worker; loading it failed, and is tried again"]
    await desk.submit(REQUEST)
    (ended,) = await desk.run_dry()
    assert ended.error is None


@dialogue
async def test_wrong_pins_change_nothing() -> None:
    desk = await Desk(workers=1).open()
    await desk.controller.pin(("shapes",), 1)
    for models, replicas, wrong in ((("forms", "nothing"), 1, "nothing"), (("shapes", "forms"), 0, "forms")):
        with pytest.raises(UnknownName, match=wrong):
            await desk.controller.pin(models, replicas)
        assert [words.split()[0] for words in await pins(desk)] == ["shapes"]


@dialogue
async def test_pinned_models_keep_their_sizes_and_files_when_others_are_forgotten() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_queue, "COMPONENTS_KEPT", 1)
        desk = await Desk().open()
        await desk.controller.pin(("forms",), 1)
        await settle()
        desk.fleet.finish_load(desk.fleet.loads[0])
        await settle()
        desk.fleet.kill(WorkerId("gpu-0"))
        for seed in range(3):
            await desk.submit(REQUEST.model_copy(update={"seed": seed}), submission=f"{seed}")
            await desk.run_dry()
        await settle()
        (load,) = desk.fleet.loads
        assert load.request.model.name == "forms"


def test_pins_of_the_configuration_are_loaded_at_the_start() -> None:
    line = LoopConnection(2, FakeEngine, pins=(("shapes", 1),))
    with ModelPool(line, line.end, None) as pool:
        while not pool.status().pins[0].holders:
            time.sleep(0.01)
        assert [(len(pinned.holders), pinned.replicas) for pinned in pool.status().pins] == [(1, 1)]


def test_a_pool_does_not_start_with_settings_for_a_model_that_it_lacks() -> None:
    named = LoopConnection(1, FakeEngine, named=("shapes",))
    with ModelPool(named, named.end, None):
        pass
    with pytest.raises(UnknownName, match="shape"):
        LoopConnection(1, FakeEngine, named=("sheeps",))


def test_a_pool_pins_by_name_and_checks_arguments() -> None:
    with open_pool() as pool:
        with pytest.raises(UnusableField, match="replicas"):
            pool.pin("shapes", replicas=0)
        with pytest.raises(UnknownName, match="nothing"):
            pool.pin("nothing")
        assert [pinned.model for pinned in pool.pin("shapes", "forms")] == ["shapes", "forms"]
        assert [pinned.model for pinned in pool.unpin("shapes")] == ["forms"]


def test_weights_of_a_pinned_model_are_resident_before_its_first_image() -> None:
    """A real engine: the first image moves nothing, and equals the image of a pool without pins."""
    config = PoolConfig().override(
        device="sim", workers=1, vram="64MiB", models=[SHAPES / "models"], loras=[SHAPES / "loras"]
    )
    with open_real_pool(config) as pool:
        pool.pin("shapes")
        while not pool.status().pins[0].holders:
            time.sleep(0.01)
        jobs = pool.submit([REQUEST], output=False)
        (image,) = jobs.images()
        assert {(task.resident, task.uploaded_bytes) for task in image.tasks} == {(True, 0)}
        pinned_pixels = image.pixels
    with open_real_pool(config) as pool:
        (image,) = pool.submit([REQUEST], output=False).images()
        assert any(task.uploaded_bytes for task in image.tasks)
        assert (image.pixels == pinned_pixels).all()
