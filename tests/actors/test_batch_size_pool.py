"""Fixed batch sizes through the whole pool. Real Ray, simulated GPUs.

Proves: the bytes of an image with a batch size are the same in any order of submission, on one, two or three workers,
beside other requests, with a worker killed in the middle, alone, and when an output is verified; passes are shared; the
size that measurements choose is recorded, and its bytes are the bytes of the number; a submission that is resumed on
more workers keeps the size that it began with.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from modelpool import GenerateRequest, ModelPool
from modelpool.actors.client.jobs import Jobs
from modelpool.actors.control.controller import Controller
from modelpool.pool.families.batch_gain_table import measured_gains
from modelpool.pool.values.core.batch_gains import BatchedWork
from modelpool.pool.values.core.errors import UserError
from tests.actors.test_shapes_pool import CONFIG, requests

pytestmark = pytest.mark.ray

MAIN = "from modelpool.actors.cli.main import main; main()"
SIZE, STEPS = 8, 6
#: seeds of requests without a batch size, which run beside the others
OTHERS_FROM = 1000


def bytes_of(pool: ModelPool, wanted: list[GenerateRequest], kills_at: tuple[int, ...] = ()) -> dict[int, bytes]:
    """The pixels by seed of the images with a batch size; a worker is killed after so many images."""
    jobs, found = pool.submit(wanted, output=False), {}
    for place, image in enumerate(jobs.images()):
        if place in kills_at:
            victim = next(iter(pool._connection.call(Controller.memory_reports).values()))
            os.kill(victim.pid, signal.SIGKILL)
        assert image.request.seed is not None
        assert image.recipe.batch == (0 if image.request.seed >= OTHERS_FROM else SIZE), image.request
        if image.recipe.batch:
            found[image.request.seed] = image.pixels.tobytes()
    assert jobs.failures == ()
    return found


def require_equal_bytes(count: int, others: int, kills_at: tuple[int, ...]) -> None:
    """Of `count` images with a batch size: on one worker; on two, of which some are killed, beside `others`, with sizes
    that measurements choose; on three. Always in another order."""
    wanted = requests(count, steps=STEPS, batch=SIZE)
    more = [each.model_copy(update={"seed": OTHERS_FROM + n, "batch": 1}) for n, each in enumerate(wanted[:others])]
    chosen = [each.model_copy(update={"batch": "auto"}) for each in wanted]
    assert (count + others) % (2 * SIZE) == 0, "measurements would choose a size with which two workers end earlier"
    with ModelPool.start(CONFIG, device="sim", workers=1, vram="64MiB", name="one") as pool:
        expected = bytes_of(pool, wanted)
    for workers, kills, asked in ((2, kills_at, [*chosen, *more]), (3, (), wanted)):
        mixed = list(asked)
        Random(workers).shuffle(mixed)
        with ModelPool.start(CONFIG, device="sim", workers=workers, vram="64MiB", name=f"of-{workers}") as pool:
            if not kills:
                assert bytes_of(pool, [wanted[4]]) == {4: expected[4]}, "alone, with padding"
            found = bytes_of(pool, mixed, kills)
        assert found == expected, (workers, [seed for seed in expected if found.get(seed) != expected[seed]])


def test_bytes_depend_on_the_batch_size_and_on_nothing_else() -> None:
    """Also of requests that leave the size to the measurements. Requests without one were not among them before, and
    the image alone was one that the pool still had."""
    require_equal_bytes(count=24, others=8, kills_at=(0,))


def test_bytes_of_outputs_in_tiles_depend_on_the_batch_size_and_on_nothing_else() -> None:
    """One alone with padding, and one of a full pass beside others on two workers. Tiles are seen in the pixels."""
    fields = {"steps": 2, "width": 192, "height": 192, "batch": SIZE}
    wanted = [each.model_copy(update={"vae_tile": 64}) for each in requests(SIZE + 2, **fields)]
    with ModelPool.start(CONFIG, device="sim", workers=1, vram="64MiB", name="alone") as pool:
        alone = bytes_of(pool, wanted[3:4])
    with ModelPool.start(CONFIG, device="sim", workers=2, vram="64MiB", name="beside") as pool:
        found = bytes_of(pool, wanted[::-1])
        assert found[3] == alone[3]
        assert bytes_of(pool, requests(4, **fields)[3:])[3] != alone[3], "else the test shows nothing"


@pytest.mark.nightly(usually="tests/actors/test_batch_size_pool.py")
def test_bytes_of_many_depend_on_the_batch_size_and_on_nothing_else() -> None:
    require_equal_bytes(count=64, others=32, kills_at=(0, 20, 45))


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


def written(folder: Path) -> dict[int, tuple[int, bytes]]:
    """The batch size and the file of each seed."""
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    return {
        line["recipe"]["seed"]: (line["recipe"].get("batch", 0), (folder / line["file"]).read_bytes())
        for line in lines
        if "recipe" in line
    }


def ended(jobs: Jobs) -> int:
    """Wait for a submission; return how many of its images exist."""
    return len({image.index for image in jobs.images()})


@pytest.mark.nightly(usually="tests/actors/graph/test_auto_batch.py")
def test_a_submission_that_is_resumed_on_more_workers_keeps_its_size(tmp_path: Path) -> None:
    """Two workers would end sooner with passes of four, which a new submission of them has: its files differ."""
    wanted = requests(3 * SIZE, steps=STEPS, batch="auto")
    work = BatchedWork("sd1", "sim", 9_000_000, measured_gains("sd1", "sim"))
    chosen = [work.usual_size(64, 64, 0, len(wanted), workers).size for workers in (1, 2)]
    assert chosen == [SIZE, SIZE // 2], "else the test shows nothing"
    with ModelPool.start(CONFIG, device="sim", workers=1, vram="64MiB", name="few") as pool:
        assert ended(pool.submit(wanted, output=tmp_path / "undisturbed")) == len(wanted)
        jobs = pool.submit(wanted, output=tmp_path / "resumed")
        next(iter(jobs.images()))
        jobs.cancel()
        assert ended(jobs) < len(wanted)
    assert 0 < len(written(tmp_path / "resumed")) < len(wanted)
    with ModelPool.start(CONFIG, device="sim", workers=2, vram="64MiB", name="more") as pool:
        assert ended(pool.submit(wanted, output=tmp_path / "resumed")) == len(wanted)
        assert ended(pool.submit(wanted[::-1], output=tmp_path / "new")) == len(wanted)
    undisturbed, resumed, new = (written(tmp_path / name) for name in ("undisturbed", "resumed", "new"))
    assert {size for size, _ in resumed.values()} == {SIZE}
    assert {size for size, _ in new.values()} == {SIZE // 2}
    assert resumed == undisturbed
