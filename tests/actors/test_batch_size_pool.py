"""Fixed batch sizes through the whole pool. Real Ray, simulated GPUs.

Proves: the bytes of an image with a batch size are the same in any order of submission, on one, two or three workers,
beside other requests, with a worker killed in the middle, alone, and when an output is verified; passes are shared.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from modelpool import GenerateRequest, ModelPool
from modelpool.actors.control.controller import Controller
from modelpool.pool.values.core.errors import UserError
from tests.actors.test_shapes_pool import CONFIG, requests

pytestmark = pytest.mark.ray

MAIN = "from modelpool.actors.cli.main import main; main()"
COUNT, SIZE, STEPS = 21, 8, 6


def bytes_of(pool: ModelPool, wanted: list[GenerateRequest], kills: bool = False) -> dict[int, bytes]:
    """The pixels by seed; with `kills`, a worker ends with the first image."""
    jobs, found = pool.submit(wanted, output=False), {}
    for image in jobs.images():
        if kills and not found:
            victim = next(iter(pool._connection.call(Controller.memory_reports).values()))
            os.kill(victim.pid, signal.SIGKILL)
        assert image.request.seed is not None
        found[image.request.seed] = image.pixels.tobytes()
    assert jobs.failures == ()
    return found


def test_bytes_depend_on_the_batch_size_and_on_nothing_else() -> None:
    wanted = requests(COUNT, steps=STEPS, batch=SIZE)
    others = [each.model_copy(update={"batch": 1, "prompt": f"{each.prompt} again"}) for each in wanted[:6]]
    with ModelPool.start(CONFIG, device="sim", workers=1, vram="64MiB", name="one") as pool:
        expected = bytes_of(pool, wanted)
        jobs = pool.submit([wanted[4]], output=False)
        assert [image.pixels.tobytes() for image in jobs.images()] == [expected[4]], "alone, with padding"
        for task in pool.history(f"{jobs.id}-0").tasks:
            assert task.attempts[-1].cost is not None
    for workers, kills in ((2, True), (3, False)):
        mixed = [*wanted, *(others if kills else ())]
        Random(workers).shuffle(mixed)
        with ModelPool.start(CONFIG, device="sim", workers=workers, vram="64MiB", name=f"of-{workers}") as pool:
            found = bytes_of(pool, [each for each in mixed if each.batch == SIZE], kills)
            assert found == expected, (workers, [seed for seed in expected if found.get(seed) != expected[seed]])


def test_passes_are_shared_and_an_output_is_verified_with_its_batch_size(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with ModelPool.start(CONFIG, device="sim", workers=1, vram="64MiB", name="shared") as pool:
        jobs = pool.submit(requests(SIZE, steps=STEPS, batch=SIZE), output=folder)
        images = list(jobs.images())
        assert {image.recipe.batch for image in images} == {SIZE}
        passes = {
            attempt.cost.batched
            for index in range(SIZE)
            for task in pool.history(f"{jobs.id}-{index}").tasks
            for attempt in task.attempts
            if attempt.cost is not None
        }
        assert SIZE in passes
        with pytest.raises(UserError, match=r"^batch: found 8, expected 1: the steps of sampler dpm_adaptive"):
            pool.submit(requests(1, sampler="dpm_adaptive", batch=SIZE))
    command = ("verify", str(folder), "--config", str(CONFIG), "--device", "sim", "--vram", "64MiB", "--sample", "25%")
    verified = subprocess.run([sys.executable, "-c", MAIN, *command], capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr
