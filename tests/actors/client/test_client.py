"""The Python door, on a whole pool in this process: what a driver script may rely on."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from modelpool.actors.client import result_queue
from modelpool.actors.client.client import CHUNK, ModelPool, WorkersFailed
from modelpool.actors.control.connection import ResultGone
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.outputs.folder import file_name, pixels_sha256
from modelpool.actors.outputs.manifest import Manifest
from modelpool.actors.outputs.open_outputs import existing_outputs
from modelpool.actors.outputs.results.job_ledger import MOST_REPEATS
from modelpool.actors.outputs.results.outcomes import ImageResult, JobFailed, JobFailure, PoolLost
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import JobEnded
from modelpool.pool.values.core.errors import OutputFailed, UnknownName, UnusableField, UserError
from modelpool.pool.values.core.stage_params import Encoded, ImagePixels, Latent
from modelpool.pool.values.specs.spec import JobId, RunErrorKind, Stage, TaskId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome
from tests.actors.fakes import ENDLESS, FAIL, VIDEOS, FakeCatalog, FakeEngine, image_of
from tests.actors.loop_connection import open_pool


@pytest.fixture
def pool() -> Iterator[ModelPool]:
    with open_pool() as opened:
        yield opened


def request(prompt: str = "a red circle", **fields) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": prompt, "seed": 1, "steps": 2, **fields})


def expected(wanted: GenerateRequest) -> np.ndarray:
    _, cut = build_graph(wanted, JobId("x"), FakeCatalog())
    return image_of(cut.works, cut.job.tasks).pixels_HWC


class SignallingEngine(FakeEngine):
    """Sets an event when an endless prompt has begun."""

    begun = threading.Event()

    def _say(self, pipe: str, word: str) -> None:
        self.begun.set()


@pytest.fixture
def endless_pool() -> Iterator[ModelPool]:
    SignallingEngine.begun = threading.Event()
    with open_pool(workers=1, make_engine=SignallingEngine) as opened:
        yield opened


def test_failed_jobs_are_remembered_where_their_output_would_be(tmp_path) -> None:
    """A report of the folder names them, without the event log of the pool."""
    with open_pool(output=tmp_path) as pool:
        jobs = pool.submit([request(FAIL, id="a", line=3), request(seed=2), request(FAIL, seed=3)])
        assert jobs.wait(60).failed == 2
        messages = {failure.index: failure.message for failure in jobs.failures}
        cancelled = pool.submit(request(ENDLESS))
        cancelled.cancel()
        assert cancelled.wait(60).cancelled == 1
    noted = existing_outputs(tmp_path).failures()
    assert {each.index: each.message for each in noted} == messages
    assert {(each.title, each.seed) for each in noted} == {
        (f"job {jobs.id}-0 (id a, line 3)", 1),
        (f"job {jobs.id}-2", 3),
    }


def test_images_in_an_object_store_have_a_url_and_are_read_from_there(pool) -> None:
    url = f"memory://{uuid.uuid4().hex}/outputs"
    wanted = [request(seed=seed) for seed in range(3)]
    images = sorted(pool.submit(wanted, output=url).images(), key=lambda image: image.index)
    for image, one in zip(images, wanted, strict=True):
        assert (image.path, image.url) == (None, f"{url}/{file_name(image.recipe)}")
        assert (image.pixels == expected(one)).all()
    assert [entry.pixels_sha256 for entry in existing_outputs(url).entries()] == [i.pixels_sha256 for i in images]


# ---- images --------------------------------------------------------------------------------------------------------


def test_images_come_with_all_that_made_them(pool) -> None:
    wanted = [request(seed=seed, loras=[("light", 0.8)]) for seed in range(5)]
    images = sorted(pool.submit(wanted).images(), key=lambda image: image.index)
    assert [image.index for image in images] == [0, 1, 2, 3, 4]
    for image, one in zip(images, wanted, strict=True):
        assert image.request == one
        assert (image.pixels == expected(one)).all()
        assert image.seed == one.seed
        assert image.path is None
        assert image.worker in ("gpu-0", "gpu-1")
        assert image.recipe.prompt == one.prompt
        assert [t.stage for t in image.tasks][-2:] == [Stage.SAMPLE, Stage.DECODE]
        assert image.seconds == sum(t.seconds for t in image.tasks if not t.shared)
        assert (np.asarray(image.pil) == image.pixels).all()
        assert image.pil is image.pil


def test_a_single_request_is_a_submission_of_one(pool) -> None:
    (image,) = pool.submit(request()).images()
    assert (image.pixels == expected(request())).all()


def test_one_call_returns_an_image(pool, tmp_path) -> None:
    """Also in asyncio, without a blocked loop. Written where `output` says, and with the fields of a request."""
    image = pool.generate("a red circle", model="shapes", seed=1, steps=2)
    assert (image.pixels == expected(request())).all()
    written = pool.generate("a red circle", model="shapes", seed=1, num_inference_steps=2, output=tmp_path)
    assert written.path is not None
    assert written.path.parent == tmp_path

    async def render() -> tuple[list[ImageResult], int]:
        rounds = 0
        several = asyncio.gather(*(pool.generate_async("a", model="shapes", seed=seed, steps=2) for seed in range(3)))
        while not several.done():
            rounds += 1
            await asyncio.sleep(0)
        return list(await several), rounds

    images, rounds = asyncio.run(render())
    assert rounds > 1
    assert [image.seed for image in images] == [0, 1, 2]
    for each in images:
        assert (each.pixels == expected(request("a", seed=each.seed))).all()


def test_one_call_refuses_what_is_no_single_image_before_it_is_queued(pool) -> None:
    refused: dict[str, dict[str, Any]] = {
        "n: found 3, expected 1": {"n": 3},
        "steps: found 0, expected": {"steps": 0},
        "unknown model 'shapse'": {"model": "shapse"},
        f"model: found {VIDEOS!r}, expected one that generates images; this one generates videos": {"model": VIDEOS},
    }
    found = {}
    for message, fields in refused.items():
        with pytest.raises(UserError) as raised:
            pool.generate("a", **{"model": "shapes", **fields})
        found[message] = str(raised.value)
    assert all(text.startswith(message) for message, text in found.items()), found
    assert pool.status().jobs["live"] == 0
    with pytest.raises(JobFailed, match="the engine was asked to fail"):
        pool.generate(FAIL, model="shapes", steps=2)


def test_a_call_that_is_interrupted_cancels_its_image(endless_pool) -> None:
    async def render() -> None:
        task = asyncio.create_task(endless_pool.generate_async(ENDLESS, model="shapes", steps=2))
        await asyncio.to_thread(SignallingEngine.begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(render())
    until = time.monotonic() + 60
    while endless_pool.status().jobs["live"] and time.monotonic() < until:
        time.sleep(0.02)
    assert endless_pool.status().jobs["cancelled"] == 1


def test_nothing_wanted_is_nothing_made(pool) -> None:
    jobs = pool.submit([])
    assert list(jobs.images()) == []
    assert jobs.wait(1).jobs == 0


def test_a_seed_that_is_left_out_is_drawn_and_told(pool) -> None:
    images = list(pool.submit(request(seed=None) for _ in range(4)).images())
    assert len({image.seed for image in images}) == 4
    for image in images:
        assert image.request.seed == image.seed
        assert (image.pixels == expected(image.request)).all()


def test_failures_are_told_and_sink_nothing(pool) -> None:
    jobs = pool.submit([request(FAIL), request(seed=2), request(FAIL, seed=3)])
    results = list(jobs.results())
    assert sorted(type(result).__name__ for result in results) == ["ImageResult", "JobFailure", "JobFailure"]
    assert sorted(failure.index for failure in jobs.failures) == [0, 2]
    failure = jobs.failures[0]
    assert (failure.kind, failure.request.prompt) == (RunErrorKind.INTERNAL, FAIL)
    assert "the engine was asked to fail" in failure.message
    assert "Traceback" in failure.traceback_text
    assert list(jobs.images()) == []


def test_every_image_is_handed_out_once_over_all_iterators(pool) -> None:
    jobs = pool.submit(request(seed=seed) for seed in range(6))
    first = [next(iterator).index for iterator in (jobs.images() for _ in range(3))]
    rest = [image.index for image in jobs.images()]
    assert sorted(first + rest) == [0, 1, 2, 3, 4, 5]


def test_the_summary_counts_each_run_once(pool) -> None:
    jobs = pool.submit([*(request(seed=seed) for seed in range(4)), request(FAIL)])
    summary = jobs.wait(60)
    assert (summary.jobs, summary.succeeded, summary.failed, summary.cancelled) == (5, 4, 1, 0)
    stages = [task.stage for task in summary.tasks]
    assert (stages.count(Stage.ENCODE), stages.count(Stage.SAMPLE), stages.count(Stage.DECODE)) == (3, 4, 4)
    totals = summary.per_worker()
    assert sum(t.tasks for t in totals) == len(stages)
    assert sum(t.uploaded_bytes for t in totals) == pool.status().uploaded_bytes
    assert summary.seconds > 0
    assert jobs.summary() == summary
    assert len(list(jobs.images())) == 4  # waiting took nothing away


# ---- submitting ------------------------------------------------------------------------------------------------------


def test_a_list_with_one_bad_request_is_refused_whole(pool) -> None:
    wanted = [request(seed=seed) for seed in range(CHUNK + 10)]
    with pytest.raises(UnknownName, match=f"request {CHUNK + 9}: unknown model"):
        pool.submit([*wanted[:-1], request(model="none")])
    assert pool.status().tasks_total == 0
    assert pool.status().jobs["live"] == 0


def test_a_generator_is_drawn_while_its_beginning_is_queued(pool) -> None:
    def draw() -> Iterator[GenerateRequest]:
        for seed in range(CHUNK + 1):
            if seed == CHUNK:
                jobs = pool.status().jobs
                assert jobs["live"] + jobs["succeeded"] == CHUNK
            yield request(seed=seed, cfg=1.0)

    assert pool.submit(draw()).wait(120).succeeded == CHUNK + 1


@pytest.mark.parametrize("how", ["the generator raises", "a request is bad"])
def test_a_generator_that_ends_badly_leaves_nothing_behind(pool, how) -> None:
    def draw() -> Iterator[GenerateRequest]:
        yield from (request(f"{ENDLESS} {seed}", seed=seed) for seed in range(CHUNK))
        if how == "the generator raises":
            raise ZeroDivisionError
        yield request(model="none")

    pool.close()
    SignallingEngine.begun = threading.Event()
    with open_pool(make_engine=SignallingEngine) as endless:
        with pytest.raises((ZeroDivisionError, UnknownName)):
            endless.submit(draw())
        endless.submit(request(seed=99)).wait(60)  # only when nothing endless is left on the workers
        assert endless.status().jobs["live"] == 0


def test_what_is_no_request_is_refused(pool) -> None:
    for wrong in (None, 5, "a red circle", [5], [request(), "a red circle"], object()):
        with pytest.raises(UnusableField, match=r"requests: found .*, expected a GenerateRequest"):
            pool.submit(wrong)
    with pytest.raises(UnusableField, match="requests: found 5, expected names of fields"):
        pool.submit({5: "a red circle"})
    with pytest.raises(UnusableField, match="output: found 5, expected a folder"):
        pool.submit(request(), output=5)
    assert pool.status().tasks_total == 0


def test_recipes_are_told_without_making_anything(pool) -> None:
    good, bad = pool.recipes([request(), request(model="shaps")])
    (image,) = pool.submit(request()).images()
    assert good == image.recipe
    assert isinstance(bad, UnknownName)
    assert pool.recipe(request()).digest == good.digest
    with pytest.raises(UnknownName, match="shapes"):
        pool.recipe(request(model="shaps"))


# ---- watching and stopping -------------------------------------------------------------------------------------------


def test_progress_arrives_step_by_step_and_ends(endless_pool) -> None:
    jobs = endless_pool.submit([request(ENDLESS), request(seed=2)])
    SignallingEngine.begun.wait()
    seen = jobs.progress()
    while not seen.running or seen.running[0].step < 2:
        seen = jobs.progress()
    (running,) = seen.running
    assert (running.index, running.prompt, running.stage, running.worker) == (0, ENDLESS, Stage.SAMPLE, "gpu-0")
    assert (seen.total, seen.ended) == (2, 0)
    jobs.cancel()
    jobs.wait(60)
    ended = jobs.progress()
    assert (ended.cancelled, ended.running) == (2, ())


def test_cancelling_stops_a_run_in_the_middle_and_is_idempotent(endless_pool) -> None:
    jobs = endless_pool.submit([request(ENDLESS, seed=seed) for seed in range(3)])
    SignallingEngine.begun.wait()
    jobs.cancel()
    jobs.cancel()
    summary = jobs.wait(60)
    assert (summary.cancelled, summary.failed) == (3, 0)
    assert jobs.failures == ()
    results = list(jobs.results())
    assert all(isinstance(result, JobFailure) and result.cancelled for result in results)
    jobs.cancel()
    (image,) = endless_pool.submit(request()).images()
    assert isinstance(image, ImageResult)


def test_an_interrupt_while_waiting_leaves_jobs_that_can_be_cancelled_and_read() -> None:
    SignallingEngine.begun = threading.Event()
    handed_out = threading.Event()
    main = threading.main_thread().ident

    def interrupt() -> None:
        SignallingEngine.begun.wait()
        handed_out.wait()
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    seen = []

    def look() -> None:
        for image in jobs.images():
            seen.append(image.index)
            handed_out.set()

    with open_pool(workers=2, make_engine=SignallingEngine) as pool:
        jobs = pool.submit([request(seed=1), request(ENDLESS)])
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            look()
        interrupter.join()
        jobs.cancel()
        assert [image.index for image in jobs.images()] == []
        assert seen == [0]
        assert jobs.summary().cancelled == 1


def test_waiting_sleeps_in_pieces_so_that_an_interrupt_that_came_just_before_is_heard(endless_pool) -> None:
    # Python's handler runs when the main thread wakes: a signal between its last look and its sleep wakes nobody
    jobs = endless_pool.submit(request(ENDLESS))
    sleep, sleeps = jobs._followed.monitor._changed.wait, []

    def counted(timeout=None) -> bool:
        sleeps.append(timeout)
        if len(sleeps) == 3:
            raise KeyboardInterrupt
        return sleep(timeout)

    jobs._followed.monitor._changed.wait = counted
    with pytest.raises(KeyboardInterrupt):
        next(jobs.images())
    with pytest.raises(TimeoutError):
        jobs.wait(0.01)
    assert all(seconds is not None and seconds <= 1 for seconds in sleeps), sleeps
    jobs.cancel()


def test_an_interrupt_while_a_image_is_fetched_does_not_lose_it(pool) -> None:
    jobs = pool.submit(request())
    jobs.wait(60)
    fetch = pool._connection.fetch

    def interrupted(ref):
        pool._connection.fetch = fetch
        raise KeyboardInterrupt

    pool._connection.fetch = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(jobs.images())
    (image,) = jobs.images()
    assert (image.pixels == expected(request())).all()


def test_waiting_has_a_limit(endless_pool) -> None:
    jobs = endless_pool.submit(request(ENDLESS))
    with pytest.raises(TimeoutError, match="1 of 1 job has not ended"):
        jobs.wait(0.01)
    jobs.cancel()
    assert jobs.wait(60).cancelled == 1


# ---- files -----------------------------------------------------------------------------------------------------------


def test_images_are_written_as_they_arrive(tmp_path) -> None:
    with open_pool(output=tmp_path / "configured") as pool:
        images = list(pool.submit(request(seed=seed) for seed in range(3)).images())
        for image in images:
            assert image.path is not None
            assert image.path.parent == tmp_path / "configured"
            assert image.path.read_bytes().startswith(b"\x89PNG")
        lines = (tmp_path / "configured" / "manifest.jsonl").read_text().splitlines()
        assert {json.loads(line)["recipe"]["seed"] for line in lines} == {0, 1, 2}
        (other,) = pool.submit(request(seed=7), output=tmp_path / "other").images()
        assert other.path.parent == tmp_path / "other"
        (nowhere,) = pool.submit(request(seed=8), output=False).images()
        assert nowhere.path is None


def test_waiting_is_enough_for_images_to_be_written(tmp_path) -> None:
    with open_pool(output=tmp_path) as pool:
        pool.submit(request(seed=seed) for seed in range(3)).wait(60)
        assert len(list(tmp_path.glob("*.png"))) == 3


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_made(tmp_path, pool) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputFailed, match="file"):
        pool.submit(request(), output=tmp_path / "file")
    assert pool.status().tasks_total == 0


def test_a_removed_folder_is_created_again_for_the_next_submission(tmp_path) -> None:
    with open_pool(output=tmp_path / "out") as pool:
        pool.submit(request(seed=1)).wait(60)
        shutil.rmtree(tmp_path / "out")
        assert pool.submit(request(seed=2)).wait(60).succeeded == 1
        assert len(list((tmp_path / "out").glob("*.png"))) == 1


def test_an_image_that_alone_cannot_be_written_is_a_failure_that_stops_no_others(tmp_path) -> None:
    """Something is in the way of one file."""
    with open_pool(output=tmp_path) as pool:
        (tmp_path / file_name(pool.recipe(request(seed=1)))).mkdir()
        jobs = pool.submit([request(seed=seed) for seed in (1, 2, 3)])
        assert jobs.wait(60).succeeded == 2
        (failure,) = jobs.failures
        assert failure.kind is RunErrorKind.OUTPUT
        assert "could not be written" in failure.message
        assert "Is a directory" in failure.message


def test_written_images_are_not_kept_in_the_object_store(tmp_path, monkeypatch) -> None:
    with open_pool(output=tmp_path) as pool:
        jobs = pool.submit([request(seed=seed) for seed in range(4)])
        jobs.wait(60)
        assert [ready.job.result for ready in jobs._followed.outputs._waiting] == [None] * 4
        monkeypatch.setattr(pool._connection, "fetch", None)
        for image in jobs.images():
            assert (image.pixels == expected(request(seed=image.seed))).all()
            assert image.pixels_sha256 == pixels_sha256(image.pixels)


def test_written_videos_are_exact_until_too_many_wait(tmp_path, monkeypatch) -> None:
    """No format keeps them exactly: up to a bound the object store does."""

    def videos(pool) -> list:
        wanted = [request(model=VIDEOS, seed=seed, format="gif", frames=5) for seed in range(3)]
        jobs = pool.submit(wanted)
        jobs.wait(60)
        assert (jobs._followed.outputs._kept_bytes > 0) == (result_queue.MOST_KEPT_BYTES > 0)
        found = sorted(jobs.videos(), key=lambda video: video.index)
        assert (jobs._followed.outputs._kept_bytes, len(jobs._followed.outputs._kept)) == (0, 0)
        return found

    with open_pool(output=tmp_path) as pool:
        exact = videos(pool)
        monkeypatch.setattr(result_queue, "MOST_KEPT_BYTES", 0)
        read = videos(pool)
        for one, other in zip(exact, read, strict=True):
            assert pixels_sha256(one.frames) == one.pixels_sha256 == other.pixels_sha256
            assert other.frames.shape == one.frames.shape
            assert other.frame_rate == one.frame_rate
            assert (other.frames != one.frames).any()


# ---- a folder that fails ---------------------------------------------------------------------------------------------


class CountedEngine(FakeEngine):
    """Decodes only as often as it is allowed to."""

    permits = threading.Semaphore(0)
    decoded: ClassVar[list[str]] = []

    def run(self, task, *args, **kwargs):
        if task.stage is Stage.DECODE:
            assert self.permits.acquire(timeout=60)
            self.decoded.append(task.task_id)
        return super().run(task, *args, **kwargs)


class FailingFolder:
    """An output folder that can be put out of order, with a pool that writes there."""

    def __init__(self, path, monkeypatch) -> None:
        self.path = path
        self.monkeypatch = monkeypatch
        self.full = threading.Event()
        append = Manifest.append

        def append_or_fail(manifest, entry):
            if self.full.is_set():
                raise OSError(28, "No space left on device")
            append(manifest, entry)

        monkeypatch.setattr(Manifest, "append", append_or_fail)
        monkeypatch.setattr("modelpool.actors.client.output_writer._RETRY_SECONDS", 0.01)

    def fail(self, how: str) -> None:
        if how == "full":
            self.full.set()
            return
        self.path.rename(self.path.with_name("away"))
        if how == "replaced by a file":
            self.path.write_text("in the way")

    def mend(self) -> None:
        self.full.clear()
        if self.path.is_file():
            self.path.unlink()
        if not self.path.exists():
            self.path.with_name("away").rename(self.path)


@pytest.fixture
def failing_folder(tmp_path, monkeypatch) -> FailingFolder:
    CountedEngine.permits, CountedEngine.decoded = threading.Semaphore(3), []
    return FailingFolder(tmp_path / "out", monkeypatch)


def open_counted(hold_seconds: float) -> ModelPool:
    """A pool that sends nothing ahead: what workers have is not withdrawn."""
    never_ahead = SchedulerConfig(send_ahead_seconds=0.0)
    return open_pool(make_engine=CountedEngine, hold_seconds=hold_seconds, scheduler=never_ahead)


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def fail_in_the_middle(pool, folder: FailingFolder, how: str, count: int = 40):
    """Submit; after the first image, the folder fails. Return the jobs, whose submission is held, and the first."""
    jobs = pool.submit([request(seed=seed) for seed in range(count)], output=folder.path)
    results = jobs.results()
    first = [next(results) for _ in range(3)]
    folder.fail(how)
    CountedEngine.permits.release(2)
    until(lambda: jobs.progress().held or jobs._followed.writing._given_up)
    until(lambda: sum(pool.status().waiting.values()) < 8)  # the rest is withdrawn
    CountedEngine.permits.release(1000)
    return jobs, results, first


@pytest.mark.parametrize("how", ["full", "removed", "replaced by a file"])
def test_a_folder_that_fails_holds_the_submission_until_it_is_usable(failing_folder, how) -> None:
    """Nothing is computed to be thrown away, nothing is lost, and everything is written once."""
    with open_counted(1e6) as pool:
        jobs, results, first = fail_in_the_middle(pool, failing_folder, how)
        assert "cannot be written" in jobs.progress().held
        assert len(CountedEngine.decoded) < 12, "the rest was withdrawn"
        failing_folder.mend()
        images = [*first, *results]
        assert sorted(image.seed for image in images) == list(range(40))
        assert jobs.progress().held == ""
        assert jobs.summary().succeeded == 40
        lines = [json.loads(line) for line in (failing_folder.path / "manifest.jsonl").read_text().splitlines()]
        assert sorted(line["recipe"]["seed"] for line in lines) == list(range(40))
        assert len(CountedEngine.decoded) == 40, "what had finished was not computed again"


def test_a_folder_that_fails_for_too_long_ends_the_submission_with_the_reason(failing_folder) -> None:
    """What was computed could not be written; what had not started says why; and the next submission goes on."""
    with open_counted(0.05) as pool:
        jobs, results, _ = fail_in_the_middle(pool, failing_folder, "full")
        ends = list(results)
        assert jobs.summary().cancelled + jobs.summary().failed == len(ends) == 37
        kinds = {end.kind for end in ends}
        assert kinds == {RunErrorKind.OUTPUT, RunErrorKind.CANCELLED}
        assert all("No space left on device" in end.message for end in ends)
        failing_folder.mend()
        again = pool.submit([request(seed=seed) for seed in range(40)], output=failing_folder.path)
        assert again.wait(60).succeeded == 40


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_held_submission_can_be_cancelled_and_its_pool_closed(failing_folder, how) -> None:
    with open_counted(1e6) as pool:
        jobs, _, _ = fail_in_the_middle(pool, failing_folder, "removed")
        if how == "cancel":
            jobs.cancel()
            summary = jobs.wait(60)
            assert (summary.succeeded, summary.failed + summary.cancelled) == (3, 37)
            assert summary.failed < 25


def test_a_generator_is_not_drawn_while_the_folder_fails(failing_folder, monkeypatch) -> None:
    monkeypatch.setattr("modelpool.actors.client.client.CHUNK", 8)
    drawn: list[int] = []
    drawn_when_mended: list[int] = []

    def mend() -> None:
        until(lambda: len(drawn) >= 16)
        time.sleep(0.1)  # room for a chunk that must not come
        drawn_when_mended.append(len(drawn))
        failing_folder.mend()

    with open_counted(1e6) as pool:

        def requests():
            for seed in range(24):
                if seed == 8:
                    until(lambda: len(list(failing_folder.path.glob("*.png"))) == 3)
                    failing_folder.fail("full")
                    CountedEngine.permits.release(100)
                    until(lambda: any(writer._failing_since for writer in pool._outputs._writers.values()))
                    threading.Thread(target=mend).start()
                drawn.append(seed)
                yield request(seed=seed)

        jobs = pool.submit(requests(), output=failing_folder.path)
        assert jobs.wait(60).succeeded == 24
        assert drawn_when_mended == [16]


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_stages_compose_to_the_image_that_a_request_makes(pool) -> None:
    text = pool.encode("a red circle", model="shapes", loras=["thick:0.5"])
    latent = pool.sample(text, model="shapes", loras=[("thick", 0.5)], steps=2, seed=1)
    image = pool.decode(latent, model="shapes")
    assert isinstance(text.result(60), Encoded)
    assert isinstance(latent.result(60), Latent)
    assert isinstance(image.result(60), ImagePixels)
    negative = request(negative="", loras=["thick:0.5"])
    assert (image.result().pixels_HWC == expected(negative)).all()
    again = pool.decode(latent.result(), model="shapes").result(60)
    assert (again.pixels_HWC == image.result().pixels_HWC).all()


def test_a_later_stage_runs_only_what_is_not_there(pool) -> None:
    latent = pool.sample(pool.encode("p", model="shapes"), model="shapes", steps=2, seed=1)
    latent.result(60)
    before = pool.status().tasks_total
    pool.decode(latent, model="shapes").result(60)
    assert pool.status().tasks_total == before + 1


def test_a_stage_that_fails_raises_where_its_result_is_asked_for(pool) -> None:
    latent = pool.sample(pool.encode(FAIL, model="shapes"), model="shapes", steps=2, seed=1)
    with pytest.raises(JobFailed, match="the engine was asked to fail") as caught:
        latent.result(60)
    assert caught.value.failure.kind is RunErrorKind.INTERNAL
    with pytest.raises(JobFailed):
        pool.decode(latent, model="shapes").result(60)


def test_stages_are_told_apart(pool) -> None:
    text = pool.encode("p", model="shapes")
    with pytest.raises(UnusableField, match=r"latent: found 'a result of encode\(\)', expected a result of sample"):
        pool.decode(text, model="shapes")
    latent = pool.sample(text, model="shapes", seed=1)
    with pytest.raises(UnusableField, match=r"positive: found 'a result of sample\(\)', expected a result of encode"):
        pool.sample(latent, model="shapes")
    with pytest.raises(UnknownName, match="did you mean 'shapes'"):
        pool.encode("p", model="shaps")
    with pytest.raises(UnusableField, match="steps"):
        pool.sample(text, model="shapes", steps=0)


# ---- the pool itself -------------------------------------------------------------------------------------------------


def test_status_adds_up(pool) -> None:
    pool.wait_ready(60)
    pool.submit(request(seed=seed) for seed in range(3)).wait(60)
    status = pool.status()
    assert [(w.id, w.state, w.device, w.incarnation) for w in status.workers] == [
        ("gpu-0", "idle", "fake", 1),
        ("gpu-1", "idle", "fake", 1),
    ]
    assert status.jobs == {"live": 0, "succeeded": 3, "failed": 0, "cancelled": 0}
    assert set(status.waiting.values()) == {0}
    assert status.tasks_total == 8
    assert status.restarts == 0
    assert all(w.used_bytes > 0 and w.resident for w in status.workers if w.used_bytes)


def test_models_and_loras_are_listed(pool) -> None:
    assert "shapes" in pool.models()
    assert "light" in pool.loras()


def test_readiness_tells_of_workers_that_do_not_come_up() -> None:
    class Dead(FakeEngine):
        def __init__(self) -> None:
            raise RuntimeError("no such device")

    says = r"gpu-0 \(starts again; before: RuntimeError: no such device\)"
    with open_pool(workers=1, make_engine=Dead) as pool, pytest.raises(TimeoutError, match=says):
        pool.wait_ready(0.2)


def test_readiness_raises_when_a_worker_was_given_up(pool, monkeypatch) -> None:
    from dataclasses import replace

    status = pool.status()
    given_up = replace(status.workers[0], state="given_up", trouble="no such device")
    monkeypatch.setattr(pool._connection, "call", lambda question, *args: replace(status, workers=(given_up,)))
    with pytest.raises(WorkersFailed, match="gpu-0: no such device"):
        pool.wait_ready(5)
    monkeypatch.undo()


def test_closing_twice_is_closing_once_and_unblocks_who_waits(endless_pool) -> None:
    jobs = endless_pool.submit(request(ENDLESS))
    SignallingEngine.begun.wait()
    endless_pool.close()
    endless_pool.close()
    with pytest.raises(PoolLost):
        list(jobs.images())
    with pytest.raises(PoolLost):
        jobs.wait(1)


def test_a_pool_that_goes_away_is_told_to_everyone_who_waits(endless_pool) -> None:
    text = endless_pool.encode("p", model="shapes")
    text.result(60)
    jobs = endless_pool.submit(request(ENDLESS))
    SignallingEngine.begun.wait()
    late = endless_pool.sample(text, model="shapes", seed=5)
    endless_pool._connection.lose()
    with pytest.raises(PoolLost):
        list(jobs.images())
    with pytest.raises(PoolLost):
        late.result(60)
    with pytest.raises(PoolLost):
        endless_pool.submit(request())


def test_an_image_that_was_lost_is_generated_again(pool) -> None:
    """Its node can go between the end of the job and the moment at which the driver fetches it."""
    jobs = pool.submit([request(seed=1), request(seed=2)])
    jobs.wait(60)
    gone = jobs._followed.outputs._waiting[0].job
    gone.result.lost = True
    images = {image.index: image for image in jobs.results()}
    assert sorted(images) == [0, 1]
    for index, image in images.items():
        assert isinstance(image, ImageResult)
        assert (image.pixels == expected(request(seed=index + 1))).all()
    assert images[gone.index].job_id != gone.job_id
    summary = jobs.summary()
    assert (summary.succeeded, summary.failed) == (2, 0)


def test_a_job_that_runs_again_keeps_its_deadline(pool, monkeypatch) -> None:
    """It was sent again with all of it, and went before jobs that were submitted meanwhile."""
    jobs = pool.submit([request(seed=1), request(seed=2, deadline=1000.0)])
    jobs.wait(60)
    followed = jobs._followed
    sent = []

    def submit_again(wanted, submission_id) -> None:
        sent.extend((index, again.deadline) for index, again in wanted)
        submit(wanted, submission_id)

    submit = followed.pool._submit_again
    monkeypatch.setattr(followed.pool, "_submit_again", submit_again)
    followed.pool.follower._times[0] -= 600.0  # it was submitted ten minutes ago
    for ready in followed.outputs._waiting:
        ready.job.result.lost = True
    assert len(list(jobs.images())) == 2
    deadlines = dict(sent)
    assert deadlines[0] is None
    assert 1.0 <= deadlines[1] <= 400.0


def test_an_output_that_is_lost_after_a_cancellation_is_not_generated_again(endless_pool) -> None:
    """The pool ran it although its program wanted nothing more, and nobody cancelled it."""
    jobs = endless_pool.submit([request(seed=1), request(ENDLESS)])
    while not jobs.progress().done:
        time.sleep(0.01)
    jobs._followed.outputs._waiting[0].job.result.lost = True
    jobs.cancel()
    ends = sorted(jobs.results(), key=lambda end: end.index)
    assert [(end.index, end.kind) for end in ends] == [(0, RunErrorKind.INPUT_LOST), (1, RunErrorKind.CANCELLED)]
    summary = jobs.summary()
    assert (summary.succeeded, summary.failed, summary.cancelled) == (0, 1, 1)


def test_a_job_that_is_cancelled_while_it_is_sent_again_is_cancelled(endless_pool, monkeypatch) -> None:
    """The pool did not know the new id yet when it was cancelled, and the job ran to its end."""
    jobs = endless_pool.submit([request(seed=1), request(ENDLESS)])
    while not jobs.progress().done:
        time.sleep(0.01)
    followed = jobs._followed
    followed.outputs._waiting[0].job.result.lost = True
    submit_again = followed.pool._submit_again

    def cancelled_first(requests: Any, submission_id: Any) -> None:
        jobs.cancel()
        submit_again([(index, request(ENDLESS)) for index, _ in requests], submission_id)

    monkeypatch.setattr(followed.pool, "_submit_again", cancelled_first)
    assert [end.kind for end in jobs.results()] == [RunErrorKind.CANCELLED] * 2


#: ends when it is killed: after two outputs and a failure, while another job runs
KILLED_DRIVER = """
import os, signal, sys, time
from pathlib import Path
from modelpool.actors.outputs.open_outputs import existing_outputs
from tests.actors.client.test_client import ENDLESS, FAIL, SignallingEngine, request
from tests.actors.loop_connection import open_pool
folder = Path(sys.argv[1])
with open_pool(output=folder, workers=1, make_engine=SignallingEngine) as pool:
    jobs = pool.submit([request(seed=1), request(FAIL, seed=2), request(seed=3)])
    jobs.wait(60)
    running = pool.submit(request(ENDLESS))
    while not existing_outputs(folder).failures() or not running.progress().running:
        time.sleep(0.01)
    print(jobs.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_killed_driver_has_the_ends_failures_and_ids_of_its_jobs(tmp_path) -> None:
    """All that a journal of attached jobs would have: the same batch again runs the job that was running, and the one
    that had failed."""
    command = [sys.executable, "-c", KILLED_DRIVER, str(tmp_path)]
    killed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    name = killed.stdout.strip()
    place = existing_outputs(tmp_path)
    assert {entry.fields["job_id"] for entry in place.entries()} == {f"{name}-0", f"{name}-2"}
    (failure,) = place.failures()
    assert (failure.job_id, failure.index, failure.kind) == (f"{name}-1", 1, RunErrorKind.INTERNAL.value)
    assert "the engine was asked to fail" in failure.message
    assert not list(place.damaged())


def test_an_end_that_arrives_twice_counts_once(endless_pool) -> None:
    """While another job runs: the submission is not over, and its program gets each job once."""
    jobs = endless_pool.submit([request(seed=1), request(ENDLESS)])
    first = next(iter(jobs.results()))
    assert isinstance(first, ImageResult)
    followed = jobs._followed
    followed.on_job_ended(
        JobEnded(followed.id, first.index, first.job_id, TaskId("t"), Outcome.CANCELLED, None, None, None, ())
    )
    progress = jobs.progress()
    assert (progress.total, progress.done, progress.cancelled) == (2, 1, 0)
    assert not followed.ends.is_over
    assert followed.outputs.next_result() is None
    jobs.cancel()
    assert [(end.index, end.kind) for end in jobs.results()] == [(1, RunErrorKind.CANCELLED)]


def test_a_file_whose_image_was_lost_is_written_after_another_run(pool, tmp_path, monkeypatch) -> None:
    fetch, lost = pool._connection.fetch, []

    def fetch_later(ref):
        if not lost:
            lost.append(ref)
            raise ResultGone("its node is gone")
        return fetch(ref)

    monkeypatch.setattr(pool._connection, "fetch", fetch_later)
    images = sorted(pool.submit([request(seed=1), request(seed=2)], output=tmp_path).images(), key=lambda i: i.index)
    assert [image.index for image in images] == [0, 1]
    assert len({image.path for image in images}) == 2
    assert len((tmp_path / "manifest.jsonl").read_text().splitlines()) == 2


def test_an_image_that_is_lost_again_and_again_is_a_failure(pool, monkeypatch) -> None:
    lost = expected(request(seed=1))
    fetch, losses = pool._connection.fetch, []

    def fetch_others(ref):
        result = fetch(ref)
        if (result.pixels_HWC == lost).all():
            losses.append(ref)
            raise ResultGone("its node is gone")
        return result

    monkeypatch.setattr(pool._connection, "fetch", fetch_others)
    jobs = pool.submit([request(seed=1), request(seed=2)])
    failure, image = sorted(jobs.results(), key=lambda end: end.index)
    assert isinstance(image, ImageResult)
    assert failure.kind is RunErrorKind.INPUT_LOST
    assert len(losses) == 1 + MOST_REPEATS
    summary = jobs.summary()
    assert (summary.succeeded, summary.failed) == (1, 1)
