"""Runs that stop and resume on a real Ray, with real engines: pixels are the pixels of runs that nothing disturbed."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelpool import GenerateRequest, ModelPool, PoolConfig
from modelpool.actors.client.opening import OpenedPool, start_pool
from modelpool.actors.control.controller import Controller
from modelpool.actors.outputs.results.progress import RunningJob
from modelpool.actors.ray.state_folder import own_checkpoints
from modelpool.actors.worker.step_checkpoints.checkpoint_folder import CheckpointFolder

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "laptop.toml"
#: of a run that lasts seconds
STEPS = 200
#: between two looks at the progress, which takes the time of the workers
LOOK_SECONDS = 0.02


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedPool]:
    folder = tmp_path_factory.mktemp("resume")
    text = CONFIG.read_text().replace("../examples", str(ROOT / "examples")).replace("../outputs", str(folder))
    config = folder / "resume.toml"
    text = text.replace("[pool]\n", "[pool]\ncheckpoint_seconds = 0.05\n")
    config.write_text(f"{text}\n[scheduler]\npreemption_wait_seconds = 0\n")
    started = start_pool(PoolConfig.load(config).override(device="cpu", workers=1, name="resume"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def pool(opened: OpenedPool) -> ModelPool:
    found = ModelPool(opened.connection, lambda: None, None)
    found.wait_ready(120)
    return found


def long(seed: int, **fields: object) -> GenerateRequest:
    prompt = {"model": "shapes", "prompt": "a blue square", "seed": seed, "steps": STEPS, "sampler": "uni_pc"}
    return GenerateRequest.model_validate({**prompt, **fields})


def pixels(jobs) -> dict[int, bytes]:
    found = {image.request.seed: image.pixels.tobytes() for image in jobs.images()}
    assert jobs.failures == ()
    return found


#: the pixels of the long run with this seed, which nothing disturbs
Expected = Callable[[int], bytes]


@pytest.fixture(scope="module")
def expected(pool: ModelPool) -> Expected:
    return functools.cache(lambda seed: pixels(pool.submit([long(seed)], output=False))[seed])


def running_at(jobs, step: int) -> RunningJob:
    """Wait until a run has done that step."""
    while True:
        for one in jobs.progress().running:
            if one.steps == STEPS and one.step >= step:
                return one
        time.sleep(LOOK_SECONDS)


def kept_at(jobs, step: int) -> RunningJob:
    """Wait until a run has done that step, and half of these steps are on disk, however slow the disk is."""
    found = running_at(jobs, step)
    while max(CheckpointFolder(own_checkpoints(), 1 << 30).steps().values(), default=0) < step // 2:
        assert jobs.progress().ended == 0, "the run ended before half of its steps were on disk"
        time.sleep(LOOK_SECONDS)
    return found


def steps_until_the_end(jobs) -> list[int]:
    """The steps that the runs of a submission were seen to have done until it ended."""
    seen: list[int] = []
    while jobs.progress().ended == 0:
        seen += [one.step for one in jobs.progress().running if one.step]
        time.sleep(LOOK_SECONDS)
    return seen


def test_a_killed_worker_loses_no_more_than_a_checkpoint_interval(pool: ModelPool, expected: Expected) -> None:
    undisturbed = expected(1)
    (victim,) = pool._connection.call(Controller.memory_reports).values()
    jobs = pool.submit([long(1)], output=False)
    before = kept_at(jobs, STEPS // 2)
    os.kill(victim.pid, signal.SIGKILL)
    seen = steps_until_the_end(jobs)
    (image,) = jobs.images()
    assert image.pixels.tobytes() == undisturbed
    (resumed,) = [task.resumed for task in image.tasks if task.resumed]
    assert int(resumed.split()[2]) >= STEPS // 4, resumed
    assert before.steps == STEPS
    later = [step for step in seen if step < STEPS // 4]
    assert not later, f"steps {later[:5]} were done again"


def test_a_long_run_makes_way_for_a_higher_priority_and_resumes(pool: ModelPool, expected: Expected) -> None:
    undisturbed = expected(2)
    jobs = pool.submit([long(2)], output=False)
    running_at(jobs, 10)
    urgent = pool.submit([long(3, steps=2, priority=5)], output=False)
    ((_, image),) = pixels(urgent).items()
    assert image
    assert jobs.progress().ended == 0, "the long run was not overtaken"
    seen = steps_until_the_end(jobs)
    assert pixels(jobs) == {2: undisturbed}
    assert min(seen) >= 10, "its steps were counted from the first again"


def test_a_run_resumes_from_disk_under_the_next_controller(
    opened: OpenedPool, pool: ModelPool, expected: Expected
) -> None:
    """The controller is killed with its worker in the middle of a run: all that is left is on disk."""
    undisturbed = expected(1)
    kept_at(pool.submit([long(1)], output=False), STEPS // 2)
    assert opened.restart is not None
    opened.restart()
    with ModelPool(opened.connection, lambda: None, None) as again:
        (image,) = again.submit([long(1)], output=False).images()
        assert image.pixels.tobytes() == undisturbed
        (resumed,) = [task.resumed for task in image.tasks if task.resumed]
        assert int(resumed.split()[2]) >= STEPS // 4, resumed
    until = time.monotonic() + 60.0
    while left := CheckpointFolder(own_checkpoints(), 1 << 30).steps():  # a thread removes it: the run succeeded
        assert time.monotonic() < until, left
        time.sleep(LOOK_SECONDS)
