"""The whole way on the shipped model: driver, controller, core, workers, patchers, images. Real Ray, simulated GPUs.

Proves: images show what their prompts say, with and without LoRAs; pixels do not depend on how many workers there
are, how little memory they have, or whether one is killed in the middle; a batch uploads the base model once a worker
and switches LoRAs far less often than arrival order would; the workers of a node share one host copy of the weights.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from examples.shapes.checker import matches, read_image
from modelpool import GenerateRequest, ImageResult, ModelPool
from modelpool.actors.control.controller import Controller
from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.specs.spec import Stage

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "laptop.toml"
WEIGHTS = ROOT / "examples" / "shapes" / "models" / "shapes.safetensors"
PROMPTS = ("a red circle", "a blue square", "a yellow triangle", "a green circle")
#: the least that decodes a 64x64 image, and so the least that makes one
SMALLEST = "4800KiB"


@pytest.fixture(scope="module")
def pool() -> Iterator[ModelPool]:
    with ModelPool.start(CONFIG, device="sim", workers=2, vram="64MiB") as opened:
        yield opened


def config_with(folder: Path, line: str) -> Path:
    """The configuration with this line for the scheduler."""
    text = CONFIG.read_text().replace("../examples", str(ROOT / "examples")).replace("../outputs", str(folder))
    (folder / "with.toml").write_text(f"{text}\n[scheduler]\n{line}\n")
    return folder / "with.toml"


def requests(count: int, **fields: object) -> list[GenerateRequest]:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    return [
        GenerateRequest.model_validate({"model": "shapes", "prompt": p, "seed": i, **fields})
        for i, p in enumerate(prompts)
    ]


def pixels_of(pool: ModelPool, wanted: Sequence[GenerateRequest]) -> list[bytes]:
    jobs = pool.submit(wanted, output=False)
    images = sorted(jobs.images(), key=lambda image: image.index)
    assert jobs.failures == ()
    return [image.pixels.tobytes() for image in images]


@pytest.fixture(scope="module")
def expected(pool: ModelPool) -> list[bytes]:
    return pixels_of(pool, requests(6, steps=6))


@pytest.fixture(scope="module")
def written(pool: ModelPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ImageResult]]:
    """Eight images of four prompts, and the folder to which they were written."""
    folder = tmp_path_factory.mktemp("written")
    return folder, list(pool.submit(requests(8), output=folder).images())


def test_two_workers_share_a_run_and_its_pixels_are_those_of_one(pool: ModelPool) -> None:
    """A shared run predicts for each prompt apart: the last bits may differ from one pass for both."""
    alone = pixels_of(pool, requests(2, steps=6, cfg=3.0, gpus=1))
    jobs = pool.submit(requests(2, steps=6, cfg=3.0, gpus=2), output=False)
    images = sorted(jobs.images(), key=lambda image: image.index)
    assert jobs.failures == ()
    for image, one in zip(images, alone, strict=True):
        pixels = np.frombuffer(one, np.uint8).reshape(image.pixels.shape).astype(int)
        assert np.abs(image.pixels.astype(int) - pixels).max() <= 1
        sampled = next(task for task in pool.history(image.job_id).tasks if task.stage is Stage.SAMPLE)
        note = sampled.attempts[-1].why.note
        assert note.startswith(("2 GPUs (gpu-0, gpu-1)", "2 GPUs (gpu-1, gpu-0)")), note


def test_images_show_what_their_prompts_say(written: tuple[Path, list[ImageResult]]) -> None:
    folder, images = written
    assert len(images) == 8
    wrong = [i.request.prompt for i in images if not matches(read_image(i.pixels), i.request.prompt)]
    assert not wrong
    for image in images:
        assert image.path is not None
        assert np.array_equal(np.asarray(image.pil), image.pixels)
    assert len((folder / "manifest.jsonl").read_text().splitlines()) == 8


def test_an_image_alone_takes_its_inputs_from_its_worker_and_has_the_same_pixels() -> None:
    """Its stages follow each other there; those of several images at a time read what the controller sends. One worker:
    with two, the idle one may suit the next stage as well. On a busy machine, a short stage may end before the next one
    is sent: more images are tried then."""
    wanted = [one.model_copy(update={"prompt": f"{one.prompt} alone"}) for one in requests(30, steps=6)]
    found, followers = [], 0
    with ModelPool.start(CONFIG, device="sim", workers=1, vram="64MiB", name="alone") as alone:
        for one in wanted:
            jobs = alone.submit([one], output=False)
            found += [image.pixels.tobytes() for image in jobs.images()]
            tasks = alone.history(f"{jobs.id}-0").tasks
            followers += sum("computed there" in attempt.why.note for task in tasks for attempt in task.attempts)
            if followers and len(found) >= 3:
                break
        assert followers > 0
        assert found == pixels_of(alone, wanted[: len(found)])


@pytest.mark.rotates
@pytest.mark.parametrize("sampler", ["euler_a", "dpmpp_2m", "ddim", "uni_pc"])
def test_every_sampler_makes_the_image(pool: ModelPool, sampler: str) -> None:
    images = list(pool.submit(requests(4, sampler=sampler), output=False).images())
    right = sum(matches(read_image(i.pixels), i.request.prompt) for i in images)
    assert right >= 3


def test_images_that_share_runs_are_those_made_alone(expected: list[bytes], tmp_path: Path) -> None:
    """But for a level here and there, where a number was between two."""
    config = config_with(tmp_path, "batch_limit = 4")
    with ModelPool.start(config, device="sim", workers=1, vram="64MiB", name="shared-runs") as shared:
        found = pixels_of(shared, requests(6, steps=6))
    for one, other in zip(found, expected, strict=True):
        apart = np.abs(np.frombuffer(one, np.uint8).astype(int) - np.frombuffer(other, np.uint8))
        assert apart.max() <= 1
        assert (apart > 0).mean() < 1e-3


def test_loras_change_what_they_should_and_keep_the_rest(pool: ModelPool) -> None:
    light = list(pool.submit(requests(4, loras=[("light", 1.0)]), output=False).images())
    outline = list(pool.submit(requests(4, loras=[("outline", 1.0)]), output=False).images())
    assert sum(read_image(i.pixels).background == "light" for i in light) >= 3
    assert sum(not read_image(i.pixels).filled for i in outline) >= 3
    right = sum(matches(read_image(i.pixels), i.request.prompt) for i in (*light, *outline))
    assert right >= 7


def test_a_wrong_text_makes_a_wrong_image(written: tuple[Path, list[ImageResult]]) -> None:
    """The checker can fail: images of one prompt do not match another."""
    _, images = written
    others = [PROMPTS[(PROMPTS.index(i.request.prompt) + 1) % len(PROMPTS)] for i in images]
    assert not any(matches(read_image(i.pixels), other) for i, other in zip(images, others, strict=True))


def test_stages_composed_by_hand_give_the_same_image(pool: ModelPool, expected: list[bytes]) -> None:
    request = requests(1, steps=6)[0]
    latent = pool.sample(pool.encode(request.prompt, model="shapes"), model="shapes", steps=6, seed=request.seed)
    image = pool.decode(latent, model="shapes").result(60)
    assert image.pixels_HWC.tobytes() == expected[0]


def test_equal_texts_are_encoded_once(pool: ModelPool) -> None:
    jobs = pool.submit([GenerateRequest(model="shapes", prompt="a cyan square", seed=s, steps=2) for s in range(6)])
    encodes = [task for task in jobs.wait(120).tasks if task.stage is Stage.ENCODE]
    assert len(encodes) <= 2


def test_a_worker_killed_in_the_middle_changes_nothing(pool: ModelPool, expected: list[bytes]) -> None:
    restarts = pool.status().restarts
    victim = next(iter(pool._connection.call(Controller.memory_reports).values()))
    jobs = pool.submit(requests(6, steps=6), output=False)
    images: dict[int, ImageResult] = {}
    for image in jobs.images():
        if not images:
            os.kill(victim.pid, signal.SIGKILL)
        images[image.index] = image
    assert jobs.failures == ()
    assert [images[i].pixels.tobytes() for i in range(6)] == expected
    end = time.monotonic() + 120
    while pool.status().restarts == restarts and time.monotonic() < end:  # others may have made all images by now
        time.sleep(0.1)
    pool.wait_ready(120)
    assert pool.status().restarts == restarts + 1


def test_a_member_killed_in_the_middle_of_a_shared_run_changes_nothing(pool: ModelPool) -> None:
    """The other one says who was lost, and the run goes on when there are two workers again. On any number of GPUs it
    predicts for each prompt by itself, so the scheduler's choice has the same bytes."""
    pool.wait_ready(120)
    wanted = requests(1, steps=60, cfg=4.0, width=128, height=128)
    (chosen,) = pixels_of(pool, [one.model_copy(update={"gpus": "auto"}) for one in wanted])
    victim = list(pool._connection.call(Controller.memory_reports).values())[-1]
    jobs = pool.submit([one.model_copy(update={"gpus": 2}) for one in wanted], output=False)
    while not any(step.step for step in jobs.progress().running):
        time.sleep(0.02)
    os.kill(victim.pid, signal.SIGKILL)
    (image,) = jobs.images()
    assert jobs.failures == ()
    assert image.pixels.tobytes() == chosen
    sampled = next(task for task in pool.history(image.job_id).tasks if task.stage is Stage.SAMPLE)
    assert len(sampled.attempts) > 1


def test_cancelled_jobs_end_and_the_pool_goes_on(pool: ModelPool, expected: list[bytes]) -> None:
    jobs = pool.submit(requests(40, steps=400, width=128, height=128), output=False)
    jobs.cancel()
    summary = jobs.wait(120)
    assert summary.cancelled == 40
    assert pixels_of(pool, requests(6, steps=6)) == expected


def test_a_batch_uploads_the_base_once_a_worker_and_seldom_switches_loras(expected: list[bytes]) -> None:
    """200 jobs over 2 LoRAs in turn on 3 workers; arrival order would switch at nearly every job. The workers share one
    host copy of the weights."""
    with ModelPool.start(CONFIG, device="sim", workers=3, vram="64MiB", name="three") as three:
        jobs = three.submit(requests(6, steps=6), output=False)
        images = sorted(jobs.images(), key=lambda image: image.index)
        assert [image.pixels.tobytes() for image in images] == expected
        first = jobs.wait(300)
        three.wait_ready(120)
        before = three.status()
        wanted = [
            GenerateRequest(
                model="shapes", prompt=PROMPTS[s % 4], seed=s, steps=2, loras=[(("light", "outline")[s % 2], 0.8)]
            )
            for s in range(200)
        ]
        summary = three.submit(wanted, output=False).wait(300)
        after = three.status()
        reports = three._connection.call(Controller.memory_reports).values()
    assert summary.succeeded == 200
    base_bytes = WEIGHTS.stat().st_size
    tasks = (*first.tasks, *summary.tasks)
    switches = after.patch_switches - before.patch_switches
    # A preload during another task's run loads the patched weights of the next task, or some of them: that task then
    # uploads the rest, and its own load is no switch. So both share one bound.
    unswitched_bytes = sum(t.uploaded_bytes for t in tasks if not t.patch_switches)
    preloaded_bytes = after.uploaded_bytes - sum(t.uploaded_bytes for t in tasks)
    assert unswitched_bytes + preloaded_bytes <= (3 + 3 + switches) * base_bytes
    arrival_order_switches = 200 * 2 // 3  # in turn on three workers, two of three jobs meet the other LoRA
    assert switches < arrival_order_switches / 3
    for worker in after.workers:
        assert any("diffusion_model" in name for name in worker.resident)
    diffusion_share = 0.45  # of the file; not every worker needs to have encoded or decoded
    assert len(reports) == 3
    assert sum(r.weights_rss_bytes for r in reports) > 3 * diffusion_share * base_bytes
    assert sum(r.weights_pss_bytes for r in reports) < 1.05 * base_bytes


def test_the_smallest_budget_and_one_task_at_a_time_give_the_same_pixels(expected: list[bytes], tmp_path: Path) -> None:
    """It streams; and it sends no worker its next task ahead, as the other pool does."""
    config = config_with(tmp_path, "send_ahead_seconds = 0.0")
    with ModelPool.start(config, device="sim", workers=1, vram=SMALLEST, name="one") as one:
        assert pixels_of(one, requests(6, steps=6)) == expected
        status = one.status()
        assert status.streamed_bytes > WEIGHTS.stat().st_size
        with pytest.raises(DoesNotFit, match="needs at least"):
            one.submit(requests(1, width=512, height=512))
